"""Leads boxes of viewed tensors back to boxes of stored ones. Load, read, diff and export call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import Target
from holdfast.base.types.view import View
from holdfast.core.engine.view_target import ViewTarget
from holdfast.core.plan.unfold import unfold
from holdfast.errors import InvalidError

SameContent = Callable[[str, str], bool]
"""Whether two stored tensors hold equal bytes."""


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

    def open_dim(self, fqn: str) -> int | None:
        """Return the dimension along which a state may have a tensor longer: the rest is padding."""
        for view in reversed(self.views):
            tensor = view.tensors[fqn]
            if tensor.terms is not None:
                return tensor.open_dim
            (fqn,) = tensor.sources
        return None

    def is_same(self, first: str, second: str, same: SameContent) -> bool:
        """Return whether two tensors are known to hold equal bytes: equal elements of equal stored tensors.

        Args:
            first, second: Names in `tensors`.
            same: Decides for two stored tensors.
        """
        return _is_same(self.views, first, second, same)

    def with_equal_counts(self, same: SameContent, where: str) -> Viewed:
        """Return this; refuse parameters that become one and have taken unlike numbers of steps.

        Args:
            same: Decides for two stored tensors.
            where: The checkpoint, for messages.
        Raises:
            InvalidError: Names both counts.
        """
        for number, view in enumerate(self.views):
            for first, second in view.equal:
                if not _is_same(self.views[:number], first, second, same):
                    raise InvalidError(
                        f"{where}: {first} and {second} differ; expected equal counts of steps, since the layout joins "
                        "their parameters. Load the model alone, or write a layout that keeps them apart"
                    )
        return self

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


def _is_same(views: tuple[View, ...], first: str, second: str, same: SameContent) -> bool:
    if not views:
        return first == second or same(first, second)
    below, view = views[:-1], views[-1]
    one, other = view.tensors[first], view.tensors[second]
    if (one.terms is None) is not (other.terms is None):
        return False
    if one.terms is None:
        return _is_same(below, one.sources[0], other.sources[0], same)
    of_one, of_other = one.listed_terms(), other.listed_terms()
    if [alongs for _, alongs in of_one] != [alongs for _, alongs in of_other]:
        return False
    pairs = {(one.sources[a], other.sources[b]) for (a, _), (b, _) in zip(of_one, of_other, strict=True)}
    return all(_is_same(below, *pair, same) for pair in pairs)


def _stored(views: tuple[View, ...], fqn: str, box: Box, target: Target) -> Iterator[tuple[str, Box, Target]]:
    if not views:
        yield fqn, box, target
        return
    below, view = views[:-1], views[-1]
    tensor = view.tensors[fqn]
    if tensor.terms is None:
        yield from _stored(below, tensor.sources[0], box, target)
        return
    for source, part, alongs in unfold(tensor, box):
        yield from _stored(below, source, part, ViewTarget(target, alongs, tensor.spec.dtype))
