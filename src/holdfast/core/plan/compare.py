"""Which chunks of two copies must be read to compare them: those not proved equal by digests, in bounded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import DIGEST_BYTES, chunk_count, chunk_range
from holdfast.base.geometry.region import flat_run, run_boxes
from holdfast.base.geometry.value_class import value_class
from holdfast.base.types.plan import Piece

Spot = tuple[object, ...]
"""Identifies the elements of a chunk and their order: equal for chunks of the same elements."""


@value_class
class CompareWindow:
    """A run of a piece's own elements, compared at once."""

    number: int
    """Number of the comparison that it belongs to."""

    piece: Piece
    """The piece."""

    start: int
    """Index of the first element, in the piece's own order."""

    stop: int
    """Index past the last element."""

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Its elements as boxes, in order, global coordinates."""
        return tuple(run_boxes(self.piece.region, self.piece.tensor.global_shape, self.start, self.stop))

    @property
    def bytes(self) -> int:
        """Bytes of the window."""
        return (self.stop - self.start) * self.piece.tensor.itemsize


def windows_of(number: int, piece: Piece) -> Iterator[CompareWindow]:
    """Yield the chunks of a piece as windows."""
    itemsize = piece.tensor.itemsize
    for chunk in range(chunk_count(piece.bytes, piece.chunk_bytes)):
        start, stop = chunk_range(piece.bytes, piece.chunk_bytes, chunk)
        yield CompareWindow(number, piece, start // itemsize, stop // itemsize)


def sampled(number: int, piece: Piece, blocks: int, block_bytes: int) -> Iterator[CompareWindow]:
    """Yield evenly spaced blocks of a piece, including its first and last element; all of it if it is small."""
    numel, length, count = piece.region.numel, max(block_bytes // piece.tensor.itemsize, 1), max(blocks, 2)
    if numel <= count * length:
        if numel:
            yield CompareWindow(number, piece, 0, numel)
        return
    for block in range(count):
        start = (numel - length) * block // (count - 1)
        yield CompareWindow(number, piece, start, start + length)


def unsettled(number: int, a: Sequence[Piece], b: Sequence[Piece]) -> tuple[list[CompareWindow], int]:
    """Return the chunks of a tensor that digests do not prove equal in both copies, and the bytes that they do.

    Args:
        number: Number of the comparison.
        a, b: The pieces of one tensor, of one dtype and shape, in two checkpoints.
    Returns:
        Windows over pieces of `a`, sorted by their start in the tensor, so that windows close in the tensor are close
        in the list, however the pieces are cut; and the bytes of `a` that need not be read.
    """
    known: dict[Spot, bytes] | None = None
    whole = {(piece.region, piece.chunk_bytes): piece.digests for piece in b if piece.digests}
    windows: list[CompareWindow] = []
    settled_bytes = 0
    for piece in a:
        if piece.digests and whole.get((piece.region, piece.chunk_bytes)) == piece.digests:
            settled_bytes += piece.bytes
            continue
        same: list[bool] = []
        if piece.digests:
            if known is None:
                known = {spot: digest for other in b for spot, digest in _digests(other)}
            same = [known.get(spot) == digest for spot, digest in _digests(piece)]
        for chunk, window in enumerate(windows_of(number, piece)):
            if same and same[chunk]:
                settled_bytes += window.bytes
            else:
                windows.append(window)
    windows.sort(key=lambda window: window.boxes[0].start)
    return windows, settled_bytes


def batches(
    groups: Iterable[Sequence[CompareWindow]],
    bytes_max: int,
    bytes_of: Callable[[CompareWindow], int] = lambda window: window.bytes,
) -> Iterator[tuple[CompareWindow, ...]]:
    """Yield windows in batches of at most `bytes_max` bytes, or of one window. A group that fits is not divided.

    Args:
        groups: Windows to read together if possible: those of one tensor.
        bytes_max: Bytes of a batch.
        bytes_of: Returns the bytes that a window counts; more than its own if the other copy has a wider type.
    """
    batch: list[CompareWindow] = []
    batch_bytes = 0
    for group in groups:
        if batch_bytes + sum(map(bytes_of, group)) > bytes_max and batch:
            yield tuple(batch)
            batch, batch_bytes = [], 0
        for window in group:
            if batch_bytes + bytes_of(window) > bytes_max and batch:
                yield tuple(batch)
                batch, batch_bytes = [], 0
            batch.append(window)
            batch_bytes += bytes_of(window)
    if batch:
        yield tuple(batch)


def _digests(piece: Piece) -> Iterator[tuple[Spot, bytes]]:
    """Yield the elements and the digest of each chunk; nothing if the piece has no digests."""
    run = flat_run(piece.region, piece.tensor.global_shape)
    for window, at in zip(windows_of(0, piece), range(0, len(piece.digests), DIGEST_BYTES), strict=False):
        digest = piece.digests[at : at + DIGEST_BYTES]
        if run is not None:
            yield (run.start + window.start, run.start + window.stop), digest
        else:
            yield (piece.region, window.start, window.stop), digest
