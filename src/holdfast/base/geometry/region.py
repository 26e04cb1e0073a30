"""Regions of a tensor: a box, or a run of the flattened tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.base.geometry.box import Box, flat_range_boxes


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A half-open run `[start, stop)` of a tensor's row-major elements, as ZeRO and other flat partitions hold it."""

    start: int
    """Row-major number of the first element."""

    stop: int
    """Row-major number past the last element."""

    @property
    def numel(self) -> int:
        """Count of elements."""
        return self.stop - self.start


Region = Box | FlatRange


def run_boxes(region: Region, global_shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that a run of a region's own elements covers, in order, global coordinates.

    Args:
        region: The region.
        global_shape: Shape of the whole tensor.
        start, stop: Half-open element numbers in the region's own order: row-major within a box,
            row-major within the tensor for a flat range.
    """
    if isinstance(region, FlatRange):
        yield from flat_range_boxes(global_shape, region.start + start, region.start + stop)
        return
    if start == 0 and stop == region.numel:
        yield region
        return
    for box in flat_range_boxes(region.shape, start, stop):
        yield Box(
            tuple(a + o for a, o in zip(box.start, region.start, strict=True)),
            tuple(b + o for b, o in zip(box.stop, region.start, strict=True)),
        )


def region_boxes(region: Region, global_shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the boxes of a region: itself, or at most 2·ndim − 1 boxes for a flat range."""
    if isinstance(region, Box):
        return (region,)
    return tuple(flat_range_boxes(global_shape, region.start, region.stop))


def flat_run(region: Region, global_shape: tuple[int, ...]) -> FlatRange | None:
    """Return a region as one run of row-major elements; None if it consists of several runs."""
    if isinstance(region, FlatRange):
        return region
    if not region.numel:
        return None
    first = row_major(region.start, global_shape)
    last = row_major(tuple(stop - 1 for stop in region.stop), global_shape)
    return FlatRange(first, last + 1) if last + 1 - first == region.numel else None


def elements_spanned(region: Region, global_shape: tuple[int, ...], wanted: Box) -> tuple[int, int]:
    """Return the first and past-the-last element of a region, in its own order, that a box may meet.

    The run between them holds every common element; `(0, 0)` if there is none.
    """
    if isinstance(region, Box):
        overlap = region.intersect(wanted)
        if overlap is None:
            return 0, 0
        if overlap == region:
            return 0, region.numel
        first = row_major(tuple(a - o for a, o in zip(overlap.start, region.start, strict=True)), region.shape)
        last = row_major(tuple(b - 1 - o for b, o in zip(overlap.stop, region.start, strict=True)), region.shape)
        return first, last + 1
    if not wanted.numel:
        return 0, 0
    first = max(row_major(wanted.start, global_shape), region.start)
    last = min(row_major(tuple(b - 1 for b in wanted.stop), global_shape) + 1, region.stop)
    return (first - region.start, last - region.start) if first < last else (0, 0)


def coordinate_at(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinate of a row-major number; the inverse of `row_major`."""
    coordinate = []
    for length in reversed(shape):
        number, position = divmod(number, length)
        coordinate.append(position)
    return tuple(reversed(coordinate))


def corners(region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first coordinates of a region and those past the last. A flat range has one coordinate."""
    if isinstance(region, FlatRange):
        return (region.start,), (region.stop,)
    return region.start, region.stop


def contains(outer: Region, inner: Region) -> bool:
    """Return whether `outer` contains `inner`; both of one kind."""
    if isinstance(outer, Box):
        return isinstance(inner, Box) and outer.contains(inner)
    return isinstance(inner, FlatRange) and outer.start <= inner.start and inner.stop <= outer.stop


def first_element(region: Region, part: Region) -> int:
    """Return the position of the first element of a part in a region of its kind, in the region's row-major order."""
    if isinstance(region, FlatRange):
        assert isinstance(part, FlatRange), "a part is of the kind of the region it is cut from"
        return part.start - region.start
    assert isinstance(part, Box), "a part is of the kind of the region it is cut from"
    element = 0
    for at, origin, length in zip(part.start, region.start, region.shape, strict=True):
        element = element * length + at - origin
    return element


def row_major(position: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the row-major number of an element."""
    return sum(coordinate * math.prod(shape[dim + 1 :]) for dim, coordinate in enumerate(position))
