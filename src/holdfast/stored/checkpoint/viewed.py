"""Leads boxes of viewed tensors back to boxes of stored ones. Load, read, diff and export call it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import Target
from holdfast.base.types.view import View
from holdfast.core.engine.view_target import ViewTarget
from holdfast.core.plan.unfold import unfold


@dataclass(frozen=True, slots=True)
class Viewed:
    """The tensors of a checkpoint under layouts that stand on each other."""

    views: tuple[View, ...]
    """In the order in which they are applied; empty: the stored tensors as they are."""

    tensors: Mapping[str, TensorSpec]
    """What can be asked for, by name."""

    aliases: Mapping[str, str]
    """Tied names: alias to a name in `tensors`."""

    @staticmethod
    def of(views: Sequence[View], tensors: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> Viewed:
        """Return what views make of stored tensors and tied names."""
        if views:
            tensors, aliases = {name: each.spec for name, each in views[-1].tensors.items()}, views[-1].aliases
        return Viewed(tuple(views), tensors, aliases)

    def stored(self, fqn: str, box: Box, target: Target) -> Iterator[tuple[str, Box, Target]]:
        """Yield stored boxes that fill a box, each with the target that takes it.

        Args:
            fqn: A name in `tensors`.
            box: Of that tensor.
            target: Where the box goes.
        """
        yield from _stored(self.views, fqn, box, target)

    def is_padded(self, fqn: str) -> bool:
        """Return whether a state may have a tensor longer: the rest is padding."""
        for view in reversed(self.views):
            tensor = view.tensors[fqn]
            if tensor.terms is not None:
                return tensor.open_dim is not None
            (fqn,) = tensor.sources
        return False

    def renamed(self, fqn: str) -> str | None:
        """Return the stored name of a tensor that has another name only; None if its elements are taken apart."""
        for view in reversed(self.views):
            tensor = view.tensors[fqn]
            if tensor.terms is not None:
                return None
            (fqn,) = tensor.sources
        return fqn

    def sources(self, fqn: str) -> tuple[str, ...]:
        """Return the stored names of the tensors that a tensor is made of."""
        names: tuple[str, ...] = (fqn,)
        for view in reversed(self.views):
            names = tuple(dict.fromkeys(source for name in names for source in view.tensors[name].sources))
        return names


def _stored(views: tuple[View, ...], fqn: str, box: Box, target: Target) -> Iterator[tuple[str, Box, Target]]:
    if not views:
        yield fqn, box, target
        return
    *below, view = views
    tensor = view.tensors[fqn]
    if tensor.terms is None:
        yield from _stored(tuple(below), tensor.sources[0], box, target)
        return
    for source, part, alongs in unfold(tensor, box):
        yield from _stored(tuple(below), source, part, ViewTarget(target, alongs, tensor.spec.dtype))
