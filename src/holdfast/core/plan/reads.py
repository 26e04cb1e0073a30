"""Plans what a load must read: intersects stored pieces with wanted boxes.

A chunk that is coded against a pair is read together with the pair's chunk, its base. Where the base is wanted too, it
is placed from there and read nowhere else. A base and the chunks that are coded against it are one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count, chunk_range
from holdfast.base.geometry.region import elements_spanned, run_boxes
from holdfast.base.types.plan import ChunkRead, LoadPlan, Part, Piece, ReadRun, WantedBoxes
from holdfast.core.format.coded_chunks import PAIR_RATIO, base_number
from holdfast.errors import CorruptError
from holdfast.settings import PAGE_BYTES

_Place = tuple[str, int, int, int]
"""Pack, offset, stored bytes and element size of a chunk. Tied tensors of a foreign checkpoint may share an offset, but
differ in length or type."""

_Chunks = dict[_Place, tuple[Piece, int, list[Part]]]
"""The piece, the number and the wanted parts of chunks, by place."""


def load_plan(
    wanted: Sequence[WantedBoxes],
    pieces_near: Callable[[str, Box], Sequence[Piece]],
    run_bytes_max: int,
    *,
    whole_units: bool = False,
) -> LoadPlan:
    """Return the reads that fill every wanted box: each chunk that overlaps one is read once and whole.

    No other chunk is read, except the base of one, and what `whole_units` asks for.

    Args:
        wanted: Wanted boxes; a part refers to them by index.
        pieces_near: Returns stored pieces of an FQN, at least all that overlap a box.
        run_bytes_max: Adjacent chunks are read together up to this many bytes, `longest_read` has the bound.
        whole_units: Whether all chunks that are coded against a base are read with it, wanted or not. Ranks that may
            exchange bytes ask for it: then whoever reads a unit reads the same bytes.
    Raises:
        CorruptError: A chunk is coded against a pair that is not stored, or that is coded against a pair itself.
    """
    chunks: _Chunks = {}
    coded_by_pair: dict[_Place, None] = {}
    for number, request in enumerate(wanted):
        for box in request.boxes:
            for piece in pieces_near(request.stored_fqn, box):
                region, count = piece.region, piece.bytes
                if (region is box or region == box) and 0 < count <= piece.chunk_bytes and piece.coding is None:
                    # A fast path for nearly every tiny tensor: there may be 100,000 of them.
                    place = piece.pack, piece.offset, count, piece.tensor.itemsize
                    chunks.setdefault(place, (piece, 0, []))[2].append(Part(number, box, box, 0))
                    continue
                for chunk_number, part in _parts(number, piece, box):
                    place = _place_of(piece, chunk_number)
                    chunks.setdefault(place, (piece, chunk_number, []))[2].append(part)
                    if piece.coding is not None and base_number(piece, chunk_number) is not None:
                        coded_by_pair[place] = None
    bases = _with_bases(chunks, coded_by_pair, whole_units=whole_units) if coded_by_pair else {}
    reads = (
        ChunkRead(
            piece,
            chunk_number,
            place[1],
            place[2] if piece.coding is None else _raw_bytes(piece, chunk_number),
            tuple(parts),
            bases.get(place) if bases else None,
        )
        for place, (piece, chunk_number, parts) in sorted(chunks.items(), key=itemgetter(0))
    )
    return LoadPlan(tuple(_runs(reads, run_bytes_max)))


def longest_read(run_bytes_max: int, chunk_bytes: int, *, coded: bool) -> int:
    """Return the memory for the longest run of a load plan, with what aligns it and its bases.

    Args:
        run_bytes_max: As for `load_plan`.
        chunk_bytes: Raw bytes of a chunk.
        coded: Whether pieces may be coded.
    """
    if not coded:
        return max(run_bytes_max, chunk_bytes) + PAGE_BYTES
    # A unit of two chunks and their base, or a run that ends with the second chunk of one.
    return max(run_bytes_max, 2 * chunk_bytes + _BASE_PAGES) + chunk_bytes + 2 * PAGE_BYTES


_BASE_PAGES = 2 * PAGE_BYTES
"""Memory for the alignment of one base, if no other lies before it."""


def _place_of(piece: Piece, number: int) -> _Place:
    start, stop = piece.stored_range(number)
    return piece.pack, start, stop - start, piece.tensor.itemsize


def _raw_bytes(piece: Piece, number: int) -> int:
    start, stop = chunk_range(piece.bytes, piece.chunk_bytes, number)
    return stop - start


def _with_bases(chunks: _Chunks, coded_by_pair: dict[_Place, None], *, whole_units: bool) -> dict[_Place, ChunkRead]:
    """Return the base of each chunk that is coded against a pair; they are taken out of the chunks.

    Args:
        chunks: All chunks. With `whole_units` the others of each unit are added.
        coded_by_pair: The places of those that are coded against a pair.
        whole_units: As for `load_plan`.
    """
    bases: dict[_Place, ChunkRead] = {}
    made: dict[_Place, ChunkRead] = {}
    for place in list(coded_by_pair):
        piece, number, _ = chunks[place]
        pair, base = _base_of(piece, number)
        base_place = _place_of(pair, base)
        if base_place not in made:
            parts = chunks.pop(base_place, (pair, base, []))[2]
            made[base_place] = ChunkRead(pair, base, base_place[1], _raw_bytes(pair, base), tuple(parts))
        bases[place] = made[base_place]
        if whole_units:
            count = chunk_count(piece.bytes, piece.chunk_bytes)
            for other in range(base * PAIR_RATIO, min((base + 1) * PAIR_RATIO, count)):
                if base_number(piece, other) is not None:
                    other_place = _place_of(piece, other)
                    chunks.setdefault(other_place, (piece, other, []))
                    bases[other_place] = made[base_place]
    return bases


def _base_of(piece: Piece, number: int) -> tuple[Piece, int]:
    """Return the stored piece of the pair, and the number of its chunk against which a chunk is coded."""
    base = base_number(piece, number)
    assert piece.coding is not None and base is not None, "its codec needs a pair"
    pair = piece.coding.pair
    if pair is None or not pair.region == piece.region or base_number(pair, base) is not None:
        raise CorruptError(
            f"{piece.tensor.fqn}: {piece.pack}: chunk {number} is coded against chunk {base} of "
            f"{piece.coding.pair_fqn!r}; expected a piece of the same region that is coded against none. Read another "
            "copy or another step"
        )
    return pair, base


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


def _runs(reads: Iterable[ChunkRead], run_bytes_max: int) -> Iterator[ReadRun]:
    """Yield adjacent chunks joined into runs. A run has bases or none, and is never cut inside a unit."""
    current: list[ChunkRead] = []
    current_pack, stop, count = "", -1, 0
    base: ChunkRead | None = None
    for read in reads:
        pack = read.piece.pack
        length = read.bytes if read.piece.coding is None else read.stored_bytes
        end = read.offset + length
        in_unit = read.base is not None and read.base is base
        if read.base is not None and not in_unit:
            length += read.base.stored_bytes + _BASE_PAGES
        if (
            pack != current_pack
            or read.offset != stop
            or (count + length > run_bytes_max and not in_unit)
            or (read.base is None) is not (base is None)
        ):
            if current:
                yield ReadRun.of(current_pack, tuple(current))
            current_pack, current, count = pack, [], 0
        current.append(read)
        stop, count, base = end, count + length, read.base
    if current:
        yield ReadRun.of(current_pack, tuple(current))
