"""Tensors that a layout makes, for an import: read and saved again, or found whole in the files of another system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import sub

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import Region, flat_run, run_boxes
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import Target
from holdfast.base.types.plan import Piece
from holdfast.core.engine.read import execute
from holdfast.core.engine.target import HostTarget
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.errors import InvalidError
from holdfast.offline.imports.stored_source import READ, Read, StoredSource
from holdfast.stored.checkpoint.checkpoint import Checkpoint


class ViewedSource(StoredSource):
    """A tensor that a layout makes, as a `Source`. A save reads and checks each part when the part is written."""

    def __init__(self, checkpoint: Checkpoint, spec: TensorSpec) -> None:
        """Read nothing yet."""
        self._checkpoint, self._spec, self._itemsize = checkpoint, spec, spec.itemsize

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Read:
        """Copy a run of a region's bytes to the front of `buffer`."""
        spec, checkpoint = self._spec, self._checkpoint
        first, last = start // spec.itemsize, -(-stop // spec.itemsize)
        targets = [HostTarget(spec.dtype, box) for box in run_boxes(piece, spec.global_shape, first, last)]
        wanted = [(spec.fqn, target.box, target) for target in targets]
        plan, parts = checkpoint.reads_for(wanted, checkpoint.settings._tuning.read_window_bytes)
        execute(plan, checkpoint.packs, parts, checkpoint.settings, checkpoint.codecs)
        data = b"".join(target.array.tobytes() for target in targets)
        at = start - first * spec.itemsize
        buffer[: stop - start] = data[at : at + stop - start]
        return READ


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
