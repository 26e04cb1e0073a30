"""Where ZeRO puts the elements of each parameter: pure arithmetic over shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from holdfast.geometry.value_class import value_class

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Shapes of the parameters of one flat buffer by name, in the order in which they lie in it."""


@value_class
class FlatPart:
    """A run of a flattened parameter in one rank's share of a flat buffer."""

    rank: int
    """Data-parallel rank."""

    at: int
    """Element of the rank's share where it starts."""

    start: int
    """Element of the flattened parameter where it starts."""

    stop: int
    """Element of the flattened parameter past its end."""


def parts_of_even_cut(shapes: Shapes, paddings: Sequence[int], share: int) -> Iterator[tuple[str, list[FlatPart]]]:
    """Yield where each parameter lies as ZeRO-1, ZeRO-2 and BF16_Optimizer put it.

    All parameters lie one after the other, and the whole is cut into equal shares, one a rank; what is left at the end
    is padding.

    Args:
        shapes: The parameters.
        paddings: Elements between each and the next.
        share: Elements of one rank's share.
    """
    first = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        last = first + math.prod(shape)
        parts = []
        for rank in range(first // share, -(-last // share)) if last > first else ():
            start, stop = max(first, rank * share), min(last, (rank + 1) * share)
            parts.append(FlatPart(rank, start - rank * share, start - first, stop - first))
        yield name, parts
        first = last + padding


def parts_of_each_cut(shapes: Shapes, ranks: int) -> Iterator[tuple[str, list[FlatPart]]]:
    """Yield where each parameter lies as ZeRO-3 puts it.

    Each parameter is cut into one share a rank, the last ones padded or nothing but padding; a rank's shares lie one
    after the other.
    """
    at = 0
    for name, shape in shapes.items():
        yield name, parts_of_one(math.prod(shape), ranks, at)
        at += share_of_one(math.prod(shape), ranks)


def parts_of_one(numel: int, ranks: int, at: int = 0) -> list[FlatPart]:
    """Return where one parameter lies that is cut by itself, each share starting at element `at` of what a rank has."""
    share = share_of_one(numel, ranks)
    held = -(-numel // share) if share else 0
    return [FlatPart(rank, at, rank * share, min((rank + 1) * share, numel)) for rank in range(held)]


def share_of_one(numel: int, ranks: int) -> int:
    """Return the elements that each rank has of a parameter cut by itself, padding included."""
    return -(-numel // ranks)


def numel_of(shapes: Shapes, paddings: Sequence[int]) -> int:
    """Return the elements of a flat buffer without the padding at its end."""
    return sum(map(math.prod, shapes.values())) + sum(paddings)


def share_of(lengths: Sequence[int], paddings: Sequence[int]) -> int | None:
    """Return the elements of one rank's share of a flat buffer, None where the ranks contradict each other.

    ZeRO-1 and 2 leave a rank's padding out of the master copy and say how much; BF16_Optimizer keeps it there.

    Args:
        lengths: Elements of the master copy in each rank's file.
        paddings: Padding that each file states.
    """
    with_padding = {length + padding for length, padding in zip(lengths, paddings, strict=True)}
    for shares in (with_padding, set(lengths)):
        if len(shares) == 1:
            return shares.pop()
    return None
