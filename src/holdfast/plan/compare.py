"""What of two copies must be read to compare them: which chunks digests do not settle, in batches of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.geometry.box import Box
from holdfast.geometry.chunking import DIGEST_BYTES, chunk_count, chunk_range
from holdfast.geometry.region import flat_run, run_boxes
from holdfast.geometry.value_class import value_class
from holdfast.types.plan import Piece

Spot = tuple[object, ...]
"""Which elements a chunk holds, in which order: equal for chunks that hold the same."""


@value_class
class CompareWindow:
    """A run of a piece's own elements, compared at once."""

    number: int
    """Which comparison it is a part of."""

    piece: Piece
    """The piece."""

    start: int
    """Number of the first element, in the piece's own order."""

    stop: int
    """Number past the last."""

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What of the tensor it is, in order, global coordinates."""
        return tuple(run_boxes(self.piece.region, self.piece.tensor.global_shape, self.start, self.stop))

    @property
    def bytes(self) -> int:
        """Bytes of it."""
        return (self.stop - self.start) * self.piece.tensor.itemsize


def windows_of(number: int, piece: Piece) -> Iterator[CompareWindow]:
    """Yield the chunks of a piece as windows."""
    for chunk in range(chunk_count(piece.bytes, piece.chunk_bytes)):
        yield _window(number, piece, chunk)


def sampled(number: int, piece: Piece, blocks: int, block_bytes: int) -> Iterator[CompareWindow]:
    """Yield blocks spread evenly over a piece, its first and its last element among them; all of it if it is small."""
    numel, length, count = piece.region.numel, max(block_bytes // piece.tensor.itemsize, 1), max(blocks, 2)
    if numel <= count * length:
        if numel:
            yield CompareWindow(number, piece, 0, numel)
        return
    for block in range(count):
        start = (numel - length) * block // (count - 1)
        yield CompareWindow(number, piece, start, start + length)


def unsettled(number: int, a: Sequence[Piece], b: Sequence[Piece]) -> tuple[list[CompareWindow], int]:
    """Return the chunks of a tensor that digests do not show to be the same in both copies, and the bytes they do.

    Args:
        number: Which comparison it is.
        a, b: The pieces of one tensor, of one dtype and shape, in two checkpoints.
    Returns:
        Windows over pieces of `a`, by where they begin in the tensor, so that those that lie near each other in it come
        near each other, however it is cut; and the bytes of `a` that need not be read.
    """
    known: dict[Spot, bytes] = {}
    whole = {(piece.region, piece.chunk_bytes): piece.digests for piece in b if piece.digests}
    windows: list[CompareWindow] = []
    settled_bytes = 0
    for piece in a:
        if piece.digests and whole.get((piece.region, piece.chunk_bytes)) == piece.digests:
            settled_bytes += piece.bytes
            continue
        if piece.digests and not known:
            known = {spot: digest for other in b for spot, digest in _digests(other)}
        same = [known.get(spot) == digest for spot, digest in _digests(piece)]
        for chunk, window in enumerate(windows_of(number, piece)):
            if same and same[chunk]:
                settled_bytes += window.bytes
            else:
                windows.append(window)
    windows.sort(key=_first)
    return windows, settled_bytes


def batches(
    groups: Iterable[Sequence[CompareWindow]],
    bytes_max: int,
    bytes_of: Callable[[CompareWindow], int] = lambda window: window.bytes,
) -> Iterator[tuple[CompareWindow, ...]]:
    """Yield windows in batches of at most so many bytes, or of one window; a group that fits is not cut.

    Args:
        groups: Windows that are best read together: those of one tensor.
        bytes_max: What a batch may have.
        bytes_of: What a window has, where the other copy of it may be the wider one.
    """
    batch: list[CompareWindow] = []
    held = 0
    for group in groups:
        if held + sum(map(bytes_of, group)) > bytes_max and batch:
            yield tuple(batch)
            batch, held = [], 0
        for window in group:
            if held + bytes_of(window) > bytes_max and batch:
                yield tuple(batch)
                batch, held = [], 0
            batch.append(window)
            held += bytes_of(window)
    if batch:
        yield tuple(batch)


def _window(number: int, piece: Piece, chunk: int) -> CompareWindow:
    start, stop = chunk_range(piece.bytes, piece.chunk_bytes, chunk)
    itemsize = piece.tensor.itemsize
    return CompareWindow(number, piece, start // itemsize, stop // itemsize)


def _digests(piece: Piece) -> Iterator[tuple[Spot, bytes]]:
    """Yield what each chunk holds and its digest; nothing where there are none."""
    run = flat_run(piece.region, piece.tensor.global_shape)
    for chunk in range(len(piece.digests) // DIGEST_BYTES):
        window = _window(0, piece, chunk)
        digest = piece.digests[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)]
        if run is not None:
            yield (run.start + window.start, run.start + window.stop), digest
        else:
            yield (piece.region, window.start, window.stop), digest


def _first(window: CompareWindow) -> tuple[int, ...]:
    boxes = run_boxes(window.piece.region, window.piece.tensor.global_shape, window.start, window.stop)
    return next(boxes).start
