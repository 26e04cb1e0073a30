"""Tensors that a layout makes, for an import: read and saved again, or found whole in the files of another system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import sub
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box, flat_range_boxes
from holdfast.base.geometry.region import Region, first_element, flat_run, run_boxes
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import DONE, Target, Ticket
from holdfast.base.types.plan import Piece
from holdfast.core.engine.read import execute
from holdfast.core.engine.target import HostTarget
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.errors import InvalidError
from holdfast.offline.imports.stored_source import StoredSource
from holdfast.settings import MIB
from holdfast.stored.checkpoint.checkpoint import Checkpoint

_WINDOW_BYTES = 128 * MIB


class ViewedSource(StoredSource):
    """A tensor that a layout makes, as a `Source`: read and checked in large windows, from front to back.

    The elements of a window lie all over the source. So a window that is half as large reads the source twice.
    """

    def __init__(self, checkpoint: Checkpoint, spec: TensorSpec) -> None:
        """Read nothing yet."""
        self._checkpoint, self._spec, self._itemsize = checkpoint, spec, spec.itemsize
        self._lock = Lock()
        self._window: tuple[int, bytes] = 0, b""

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        """Copy a run of a region's bytes to the front of `buffer`."""
        first = first_element(Box.whole(self._spec.global_shape), piece) * self._itemsize
        start, stop = first + start, first + stop
        with self._lock:  # The store may ask for several parts at once.
            at, data = self._window
            if not at <= start <= stop <= at + len(data):
                at = start - start % self._itemsize
                data = self._read(at, max(stop, min(at + _WINDOW_BYTES, self._spec.global_bytes)))
            # The last bytes are asked for last.
            self._window = (at, data) if stop < self._spec.global_bytes else (0, b"")
        buffer[: stop - start] = data[start - at : stop - at]
        return DONE

    def _read(self, start: int, stop: int) -> bytes:
        spec, checkpoint = self._spec, self._checkpoint
        run = start // spec.itemsize, -(-stop // spec.itemsize)
        targets = [HostTarget(spec.dtype, box) for box in flat_range_boxes(spec.global_shape, *run)]
        wanted = [(spec.fqn, target.box, target) for target in targets]
        plan, parts = checkpoint.reads_for(wanted, checkpoint.settings._tuning.read_window_bytes)
        execute(plan, checkpoint.packs, parts, checkpoint.settings, checkpoint.codecs)
        return b"".join(target.array.tobytes() for target in targets)


class _Found(Target):
    """Notes the boxes of the target that runs of stored bytes fill."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        raise AssertionError("nothing is read")

    def put(self, at: Sequence[slice], elements: NDArray[np.generic]) -> None:
        raise AssertionError("nothing is read")

    def memory(self, part: Box) -> memoryview | None:
        self.boxes.append(part)
        return None


def viewed_index(checkpoint: Checkpoint) -> Index:
    """Return an index of the tensors that layouts make, each as runs of the files of another system.

    Raises:
        InvalidError: The elements of a tensor are scattered; names the tensor and the rule.
    """
    builder = IndexBuilder(checkpoint.index.chunk_bytes, checkpoint.viewed.tensors.values())
    for fqn, spec in checkpoint.viewed.tensors.items():
        found = _Found()
        for stored, box, target in checkpoint.viewed.stored(fqn, Box.whole(spec.global_shape), found):
            for piece in checkpoint.index.pieces_near(stored, box):
                for part, offset in _runs(piece, box):
                    target.memory(part)
                    if offset is None or not found.boxes:
                        rule = checkpoint.viewed.views[-1].tensors[fqn].rule
                        raise InvalidError(
                            f"{checkpoint.url}: {fqn}, made by rule {rule}, is scattered in {piece.pack}; expected "
                            "runs of a file, since the step refers to files. Import it with --copy (copy=True)"
                        )
                    builder.add(spec, found.boxes.pop(), piece.pack, offset, b"")
    return builder.index()


def _runs(piece: Piece, box: Box) -> Iterator[tuple[Box, int | None]]:
    """Yield the parts of a piece inside a box, each with the byte of the file; None if a part is no run."""
    at = 0
    for region in run_boxes(piece.region, piece.tensor.global_shape, 0, piece.region.numel):
        part = region.intersect(box)
        if part is not None:
            start = tuple(map(sub, part.start, region.start))
            inside = Box(start, tuple(map(sub, part.stop, region.start)))
            run = flat_run(inside, region.shape)
            yield part, None if run is None else piece.offset + (at + run.start) * piece.tensor.itemsize
        at += region.numel
