"""Tensors of another shape than was saved: which of them a load fills in part, and which it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from holdfast.backends.torch.ties import storage_key
from holdfast.base.geometry.box import Box
from holdfast.base.name_patterns import with_names_above
from holdfast.base.ports.framework import Misfit
from holdfast.base.types.reports import PartlyFilled


class ResizedTensors:
    """The tensors of one state whose shape differs from the stored one."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Know no tensor yet.

        Args:
            patterns: `partial` of the load. A pattern applies to the names that it matches and to all names below them.
        """
        self._patterns = patterns
        self._refused: list[tuple[torch.Tensor, str, Misfit]] = []
        """Tensors that are not filled, each with its stored name."""
        self._filled: dict[tuple[object, ...], str] = {}
        """Stored name of each tensor that is filled in part, by its memory."""
        self.partly: list[PartlyFilled] = []
        """Tensors that are filled in part."""

    def chooses(self, *names: str) -> bool:
        """Return whether `partial` applies to one of some names."""
        above = [each for name in names for each in with_names_above(name)] if self._patterns else []
        return any(fnmatchcase(name, pattern) for pattern in self._patterns for name in above)

    def overlap(
        self,
        names: Sequence[str],
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        stored: str,
        stored_shape: tuple[int, ...],
    ) -> Box | None:
        """Return the region that is filled of a tensor whose shape differs; None if it is refused.

        Args:
            names: Its name, and that of the parameter whose state it is.
            tensor: The tensor.
            shape: Its global shape.
            stored: Its name in the checkpoint.
            stored_shape: Global shape there.
        """
        text = f"{names[0]}: {shape} here and {stored_shape} in the checkpoint"
        chosen = self.chooses(*names)
        if not chosen or len(shape) != len(stored_shape):
            text += ", which partial cannot fill" if chosen else ""
            self._refused.append((tensor, stored, Misfit(text, is_certain=True, fqn=names[0], is_shape=True)))
            return None
        filled = tuple(map(min, shape, stored_shape))
        memory = storage_key(tensor)
        if memory not in self._filled:
            self._filled[memory] = stored
            self.partly.append(PartlyFilled(names[0], filled, shape, stored_shape))
        return Box.whole(filled)

    def explain(self, path: str, note: Callable[[str], str]) -> None:
        """Add a note to the message on each refused tensor of a module.

        Args:
            path: The module.
            note: Returns it for a name below the module.
        """
        for number, (tensor, stored, misfit) in enumerate(self._refused):
            if misfit.fqn.startswith(f"{path}."):
                text = misfit.text + note(misfit.fqn.removeprefix(f"{path}."))
                self._refused[number] = tensor, stored, replace(misfit, text=text)

    def misfits(self, same_content: Callable[[str, str], bool]) -> list[Misfit]:
        """Return a misfit for each tensor that is refused.

        A tensor that is filled in part under a tied name is not refused under its other names.
        """
        return [
            misfit
            for tensor, stored, misfit in self._refused
            if (first := self._filled.get(storage_key(tensor)) if self._filled else None) is None
            or (first != stored and not same_content(first, stored))
        ]


def clipped(boxes: Sequence[Box], overlap: Box) -> tuple[Box, ...]:
    """Return what lies in an overlap of some boxes."""
    return tuple(part for box in boxes if (part := box.intersect(overlap)) is not None)
