"""Converts runs of elements in files to pieces of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from operator import add, sub

from holdfast.backends.foreign.messages import CONVERT
from holdfast.backends.foreign.pickles.tensors import StoredTensor, row_major_strides
from holdfast.base.geometry.box import Box, flat_range_boxes
from holdfast.base.geometry.region import FlatRange
from holdfast.base.geometry.value_class import value_class
from holdfast.base.types.listing import ListedPiece
from holdfast.errors import InvalidError

RUNS_MAX = 1 << 20
"""Largest number of runs of one tensor. More runs mean that single elements are scattered."""


@value_class
class ElementRun:
    """Consecutive elements of a flattened local tensor that are contiguous in a file."""

    start: int
    """Row-major number of the first element in the local tensor."""

    stop: int
    """Row-major number past the last element."""

    file: str
    """Key of the file."""

    offset: int
    """Byte of the first element."""


@value_class
class Slice:
    """A box of a local tensor, and its place in the whole tensor."""

    local: Box
    """Coordinates in the local tensor."""

    start: tuple[int, ...]
    """Coordinates of its first element in the whole tensor."""

    copy: bool = False
    """Whether another rank holds the same box and is the one that is read."""

    def place(self, box: Box) -> Box:
        """Return a box of the local tensor, inside this slice, in coordinates of the whole tensor."""
        shift = tuple(map(sub, self.start, self.local.start))
        return Box(tuple(map(add, box.start, shift)), tuple(map(add, box.stop, shift)))


def runs_of(tensor: StoredTensor, where: str) -> list[ElementRun]:
    """Return the runs of a tensor in its file: one if it is contiguous.

    Raises:
        InvalidError: It has more than `RUNS_MAX` runs.
    """
    if 0 in tensor.shape:
        return []
    if tensor.is_contiguous:
        return [ElementRun(0, tensor.numel, tensor.file, tensor.offset)]
    whole = len(tensor.shape)  # Dimensions from here on form one run.
    length = 1
    while tensor.strides[whole - 1] == length or tensor.shape[whole - 1] == 1:
        length *= tensor.shape[whole - 1]
        whole -= 1
    outer = tensor.shape[:whole]
    if math.prod(outer) > RUNS_MAX:
        raise InvalidError(
            f"{where}: shape {list(tensor.shape)} with strides {list(tensor.strides)} has {math.prod(outer)} runs; "
            f"expected at most {RUNS_MAX}. Save tensor.contiguous()"
        )
    offsets = [0]
    for count, stride in zip(outer, tensor.strides[:whole], strict=True):
        offsets = [offset + number * stride for offset in offsets for number in range(count)]
    return [
        ElementRun(number * length, (number + 1) * length, tensor.file, tensor.offset + offset * tensor.itemsize)
        for number, offset in enumerate(offsets)
    ]


def pieces_of(
    runs: Sequence[ElementRun],
    local_shape: tuple[int, ...],
    cut: Slice,
    global_shape: tuple[int, ...],
    itemsize: int,
) -> Iterator[ListedPiece]:
    """Yield the pieces of a whole tensor that one slice of a local tensor holds.

    Args:
        runs: Runs of the local tensor.
        local_shape: Shape of the local tensor.
        cut: The slice.
        global_shape: Shape of the whole tensor.
        itemsize: Bytes of an element.
    """
    if not cut.local.numel:
        return
    # A cut along dimension 0 keeps rows whole, so each run stays one piece; other cuts split it into boxes.
    if local_shape[1:] == global_shape[1:] == cut.local.shape[1:]:
        yield from _rows_of(runs, cut, global_shape, itemsize)
        return
    steps = row_major_strides(local_shape)
    for run in runs:
        for held in flat_range_boxes(local_shape, run.start, run.stop):
            common = held.intersect(cut.local)
            for box in _unbroken(common, local_shape) if common is not None else ():
                at = sum(coordinate * step for coordinate, step in zip(box.start, steps, strict=True))
                yield ListedPiece(cut.place(box), run.file, run.offset + (at - run.start) * itemsize)


def _rows_of(
    runs: Sequence[ElementRun], cut: Slice, global_shape: tuple[int, ...], itemsize: int
) -> Iterator[ListedPiece]:
    """Yield the pieces of a slice of whole rows. Such runs are runs of the whole tensor too."""
    row = math.prod(global_shape[1:])
    first, last = (cut.local.start[0] * row, cut.local.stop[0] * row) if global_shape else (0, 1)
    shift = cut.start[0] * row - first if global_shape else 0
    for run in runs:
        start, stop = max(run.start, first), min(run.stop, last)
        if start < stop:
            is_whole = stop - start == math.prod(global_shape)
            region = Box.whole(global_shape) if is_whole else FlatRange(start + shift, stop + shift)
            yield ListedPiece(region, run.file, run.offset + (start - run.start) * itemsize)


def _unbroken(box: Box, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield the parts of a box whose elements are consecutive in an array of `shape`."""
    split = len(shape)
    while split > 0 and box.shape[split - 1] == shape[split - 1]:
        split -= 1
    outer = max(split - 1, 0)  # The dimension at `outer` may be cut: its elements are consecutive all the same.
    if math.prod(box.shape[:outer]) > RUNS_MAX:
        raise InvalidError(
            f"a slice {list(box.shape)} of a tensor {list(shape)} has {math.prod(box.shape[:outer])} runs; "
            f"expected at most {RUNS_MAX}. {CONVERT}"
        )
    for start in itertools.product(*map(range, box.start[:outer], box.stop[:outer])):
        yield Box((*start, *box.start[outer:]), (*(at + 1 for at in start), *box.stop[outer:]))
