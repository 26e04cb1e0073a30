"""One case of the corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.hostile.crafting import Crafted

HARMLESS = "nobody"
"""Who notices a change that no reader depends on: what is loaded is what was saved."""


@dataclass(frozen=True)
class Case:
    """One crafted run."""

    name: str
    """What is wrong, in a few words."""

    noticed_by: str
    """The first of the stages of `trial` that must refuse it, or `HARMLESS`."""

    craft: Callable[[Crafted], object]
    """Makes it of a good one."""
