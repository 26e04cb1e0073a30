"""Plans what a load must read: intersects stored pieces with wanted boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter

from holdfast.geometry.box import Box
from holdfast.geometry.chunking import chunk_count, chunk_range
from holdfast.geometry.region import elements_spanned, run_boxes
from holdfast.types.plan import ChunkRead, LoadPlan, Part, Piece, ReadRun, WantedBoxes


def load_plan(
    wanted: Sequence[WantedBoxes], pieces_near: Callable[[str, Box], Sequence[Piece]], run_bytes_max: int
) -> LoadPlan:
    """Return the reads that fill every wanted box: each chunk that overlaps one is read once and whole, no other is.

    Args:
        wanted: Wanted boxes; a part refers to them by index.
        pieces_near: Returns stored pieces of an FQN, at least all that overlap a box.
        run_bytes_max: Adjacent chunks are read together up to this many bytes.
    """
    # By pack, offset, bytes and element size: tied tensors of a foreign checkpoint may share an offset, but differ in
    # length or type.
    chunks: dict[tuple[str, int, int, int], tuple[Piece, int, list[Part]]] = {}
    for number, request in enumerate(wanted):
        for box in request.boxes:
            for piece in pieces_near(request.stored_fqn, box):
                region, count = piece.region, piece.bytes
                if (region is box or region == box) and 0 < count <= piece.chunk_bytes:
                    # A fast path for nearly every tiny tensor: there may be 100,000 of them.
                    key = piece.pack, piece.offset, count, piece.tensor.itemsize
                    chunks.setdefault(key, (piece, 0, []))[2].append(Part(number, box, box, 0))
                    continue
                for chunk_number, part in _parts(number, piece, box):
                    start, stop = chunk_range(count, piece.chunk_bytes, chunk_number)
                    key = piece.pack, piece.offset + start, stop - start, piece.tensor.itemsize
                    chunks.setdefault(key, (piece, chunk_number, []))[2].append(part)
    reads = (
        (pack, ChunkRead(piece, chunk_number, offset, chunk_bytes, tuple(parts)))
        for (pack, offset, chunk_bytes, _), (piece, chunk_number, parts) in sorted(chunks.items(), key=itemgetter(0))
    )
    return LoadPlan(tuple(_runs(reads, run_bytes_max)))


def _parts(wanted_number: int, piece: Piece, wanted: Box) -> Iterator[tuple[int, Part]]:
    """Yield the parts of a piece that a wanted box needs, with their chunk numbers."""
    itemsize, shape = piece.tensor.itemsize, piece.tensor.global_shape
    first, last = elements_spanned(piece.region, shape, wanted)
    for number in range(first * itemsize // piece.chunk_bytes, chunk_count(last * itemsize, piece.chunk_bytes)):
        start, stop = chunk_range(piece.bytes, piece.chunk_bytes, number)
        at = 0
        for source_box in run_boxes(piece.region, shape, start // itemsize, stop // itemsize):
            part = source_box.intersect(wanted)
            if part is not None:
                yield number, Part(wanted_number, part, source_box, at)
            at += source_box.numel * itemsize


def _runs(reads: Iterable[tuple[str, ChunkRead]], run_bytes_max: int) -> Iterator[ReadRun]:
    """Yield adjacent chunks joined into runs."""
    current: list[ChunkRead] = []
    current_pack, stop = "", -1
    for pack, read in reads:
        if pack != current_pack or read.offset != stop or read.offset + read.bytes - current[0].offset > run_bytes_max:
            if current:
                yield ReadRun.of(current_pack, tuple(current))
            current_pack, current = pack, []
        current.append(read)
        stop = read.offset + read.bytes
    if current:
        yield ReadRun.of(current_pack, tuple(current))
