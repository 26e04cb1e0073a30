"""What a caller asks of a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.base.layouts.layout import Layout
from holdfast.base.ports.framework import Selection
from holdfast.training.loading.rename_rules import Renames


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load and how."""

    state: Mapping[str, object]
    """The state to fill."""

    selection: Selection
    """Names that take part, and how they are filled."""

    strict: bool
    """Whether missing or unexpected names are an error."""

    rename: Renames = field(default_factory=Renames)
    """How names of the checkpoint become names of the state."""

    layouts: tuple[Layout, ...] = ()
    """Layouts that make the tensors of the state; they come before `rename`."""

    @property
    def call(self) -> str:
        """The arguments that must agree on all ranks, as text; empty if none is given."""
        chosen = self.selection
        parts = [f"layout=[{', '.join(map(str, self.layouts))}]"] if self.layouts else []
        parts += [f"rename={self.rename}"] if self.rename.rules else []
        parts += [f"partial={list(chosen.partial)}"] if chosen.partial else []
        parts += [] if chosen.hyperparameters else ["hyperparameters=False"]
        return ", ".join(parts)

    @property
    def is_whole(self) -> bool:
        """Whether it asks for everything that the checkpoint has, unchanged."""
        chosen = self.selection
        return chosen.only is None and not chosen.skip and not chosen.cast and not self.call
