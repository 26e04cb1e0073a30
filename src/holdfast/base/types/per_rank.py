"""State that differs by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Resize = Literal["error", "first"] | Callable[[Sequence[object], int, int], object]
"""What a rank loads if the number of ranks changed: an error, rank 0's value, or the result of a function. The function
gets all saved values by rank, the rank, and the new number of ranks."""


@dataclass(slots=True, eq=False)
class PerRank:
    """A value that differs by rank; takes the place of the value in the state.

    Loading sets `value`, or calls `load_state_dict` if the value is an object that has it (a data loader, say).
    """

    value: object
    """This rank's value: of the closed set of plain values, or an object with `state_dict` and `load_state_dict`."""

    resize: Resize = "error"
    """What a rank loads if the number of ranks changed."""


@dataclass(frozen=True, slots=True, eq=False)
class RngState:
    """The state of this process's random generators: Python's, numpy's, torch's, and each device's.

    A rank that existed when the checkpoint was saved gets its own back. A rank that did not is seeded from run,
    step and rank, so that a resumed run is reproducible and no two ranks draw the same numbers.
    """
