"""Half-open boxes in global element coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import sub
from types import EllipsisType

from holdfast.errors import InvalidError


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open n-dimensional region `[start, stop)` of a tensor, in global element coordinates."""

    start: tuple[int, ...]
    """First coordinate of the region, one per dimension."""

    stop: tuple[int, ...]
    """Coordinate past the last one, one per dimension."""

    _numel: int = field(default=-1, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise InvalidError(f"box: start has {len(self.start)} dimensions, stop has {len(self.stop)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """Count of elements; 1 for a 0-d box."""
        if self._numel < 0:
            # Reckoned once: a box is asked many times, and that of a whole tensor is shared by all of its shape.
            object.__setattr__(self, "_numel", math.prod(map(sub, self.stop, self.start)))
        return self._numel

    @staticmethod
    @lru_cache(maxsize=4096)
    def whole(global_shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of `global_shape`."""
        return Box((0,) * len(global_shape), global_shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the overlap of two boxes, or None if they share no element.

        Raises:
            InvalidError: ndim differs.
        Source: interval overlap per dimension, as in DCP `resharding.py`.
        """
        if len(self.start) != len(other.start):
            raise InvalidError(f"box: cannot intersect {len(self.start)} with {len(other.start)} dimensions")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def relative_to(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices that select this box in an array whose first element is at `origin`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, origin, strict=True))

    def contains(self, other: Box) -> bool:
        """Return whether this box contains every element of `other`."""
        return all(a <= c for a, c in zip(self.start, other.start, strict=True)) and all(
            d <= b for b, d in zip(self.stop, other.stop, strict=True)
        )


def grid_within(at: Sequence[slice], box: Box) -> tuple[slice | EllipsisType, ...]:
    """Return the slices that select a grid in an array of a box; the Ellipsis keeps a 0-d part an array.

    Args:
        at: The grid along each dimension, in global coordinates.
        box: The box of the array.
    """
    return (*(slice(a.start - o, a.stop - o, a.step) for a, o in zip(at, box.start, strict=True)), ...)


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that a half-open run of row-major elements covers, in order.

    A run decomposes into at most 2·ndim − 1 boxes: a ragged head, a full middle and a ragged tail,
    each ragged end again one dimension lower.

    Args:
        shape: Shape of the array that contains the run, in elements.
        start, stop: Row-major element numbers, `0 <= start <= stop <= prod(shape)`.
    """
    yield from _run_boxes((), shape, start, stop)


def _run_boxes(prefix: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield Box(prefix, tuple(p + 1 for p in prefix))
        return
    fixed_stop = tuple(p + 1 for p in prefix)
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _run_boxes((*prefix, first), shape[1:], head, tail)
        return
    if head:
        yield from _run_boxes((*prefix, first), shape[1:], head, row)
        first += 1
    if first < last:
        rest = shape[1:]
        yield Box((*prefix, first, *(0,) * len(rest)), (*fixed_stop, last, *rest))
    if tail:
        yield from _run_boxes((*prefix, last), shape[1:], 0, tail)
