"""Computes where ZeRO stores the elements of each parameter, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from holdfast.base.geometry.value_class import value_class

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Shapes of the parameters of one flat buffer by name, in the order of the buffer."""


@value_class
class FlatPart:
    """A run of a flattened parameter in one rank's share of a flat buffer."""

    rank: int
    """Data-parallel rank."""

    at: int
    """First element, in the rank's share."""

    start: int
    """First element, in the flattened parameter."""

    stop: int
    """Element past the last, in the flattened parameter."""


def parts_of_even_cut(shapes: Shapes, paddings: Sequence[int], share: int) -> Iterator[tuple[str, list[FlatPart]]]:
    """Yield the parts of each parameter in the layout of ZeRO-1, ZeRO-2 and BF16_Optimizer.

    The buffer holds all parameters in order. It is cut into equal shares, one a rank, and padded at the end.

    Args:
        shapes: The parameters.
        paddings: Elements of padding after each parameter.
        share: Elements of one rank's share.
    """
    first = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        last = first + math.prod(shape)
        parts = []
        # A parameter may span several ranks, or share a rank with others.
        for rank in range(first // share, -(-last // share)) if last > first else ():
            start, stop = max(first, rank * share), min(last, (rank + 1) * share)
            parts.append(FlatPart(rank, start - rank * share, start - first, stop - first))
        yield name, parts
        first = last + padding


def parts_of_each_cut(shapes: Shapes, ranks: int) -> Iterator[tuple[str, list[FlatPart]]]:
    """Yield the parts of each parameter in the layout of ZeRO-3.

    Each parameter is cut into one share a rank; the last shares are padded, or all padding. A rank stores its shares in
    the order of the parameters.
    """
    at = 0
    for name, shape in shapes.items():
        yield name, parts_of_one(math.prod(shape), ranks, at)
        at += -(-math.prod(shape) // ranks)


def parts_of_one(numel: int, ranks: int, at: int = 0) -> list[FlatPart]:
    """Return the parts of one parameter that is cut by itself. Each share starts at element `at` of its rank."""
    share = -(-numel // ranks)  # Padding included.
    held = -(-numel // share) if share else 0
    return [FlatPart(rank, at, rank * share, min((rank + 1) * share, numel)) for rank in range(held)]


def numel_of(shapes: Shapes, paddings: Sequence[int]) -> int:
    """Return the elements of a flat buffer without the padding at its end."""
    return sum(map(math.prod, shapes.values())) + sum(paddings)


def share_of(lengths: Sequence[int], paddings: Sequence[int]) -> int | None:
    """Return the elements of one rank's share of a flat buffer; None if the ranks contradict each other.

    ZeRO-1 and 2 store the master copy without padding and state its length; BF16_Optimizer stores the padding too.

    Args:
        lengths: Elements of the master copy in each rank's file.
        paddings: Elements of padding that each file states.
    """
    with_padding = {length + padding for length, padding in zip(lengths, paddings, strict=True)}
    for shares in (with_padding, set(lengths)):
        if len(shares) == 1:
            return shares.pop()
    return None
