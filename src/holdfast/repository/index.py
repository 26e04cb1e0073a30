"""The index: which tensors there are, which pieces they are stored as, what each chunk hashes to.

Columnar, one packed array per field. Chunk offsets follow from the piece, so a chunk costs its digest alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from holdfast.errors import CorruptError, InvalidError
from holdfast.repository.columns import packed, unpacked
from holdfast.repository.names import is_pack_name
from holdfast.settings import MIB, PAGE_BYTES
from holdfast.spec.box import Box
from holdfast.spec.dtype import DTYPES
from holdfast.spec.plan import Piece
from holdfast.spec.region import FlatRange, Region
from holdfast.spec.tensor import TensorSpec

Column = tuple[int, bytes]
_BOX, _FLAT = 0, 1
"""Kinds of pieces in the column `piece_kinds`."""

NDIM_MAX = 64
"""Dimensions of a tensor, as in torch and numpy."""

_CHUNK_BYTES_MAX = 4 * MIB
"""What one digest may vouch for; also what bounds the tensors that a small index can claim."""

INDEX_BYTES_MAX = 1 << 30
"""An index file or part larger than this is taken for damage, not read."""

_TENSOR_BYTES_MAX = 1 << 62
"""Bytes of one tensor, its empty dimensions counted as one: what numpy and torch can address."""


class IndexDocument(msgspec.Struct, forbid_unknown_fields=False):
    """The index as it lies in a file: some columns go by tensor, `piece_*` by piece, ordered by tensor."""

    chunk_bytes: int
    fqns: list[str]
    dtypes: list[str]
    dtype_numbers: Column
    ndims: Column
    shapes: Column
    packs: list[tuple[str, str]]
    piece_tensors: Column
    piece_packs: Column
    piece_offsets: Column
    piece_starts: Column
    piece_stops: Column
    digests: bytes
    piece_kinds: Column | None = None


@dataclass(slots=True)
class Index:
    """Tensors and pieces, with lookup by FQN."""

    chunk_bytes: int
    """Bytes of every chunk but the last of a piece."""

    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    """Every tensor by FQN."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Pieces of every tensor by FQN; a tensor may have none only while parts are being merged."""

    def pieces_of(self, fqn: str) -> Sequence[Piece]:
        """Return the stored pieces of a tensor."""
        return self.pieces.get(fqn, ())

    def all_pieces(self) -> Iterator[Piece]:
        """Yield every piece, by FQN."""
        for fqn in sorted(self.pieces):
            yield from self.pieces[fqn]

    def add(self, piece: Piece, where: str) -> None:
        """Add one piece.

        Raises:
            InvalidError: The tensor is known with another dtype or shape.
        """
        self._know(piece.tensor, where)
        self.pieces.setdefault(piece.tensor.fqn, []).append(piece)

    def _know(self, tensor: TensorSpec, where: str) -> None:
        known = self.tensors.setdefault(tensor.fqn, tensor)
        if known is not tensor and known != tensor:
            raise InvalidError(
                f"{where}: {tensor.fqn} is {tensor.dtype} {list(tensor.global_shape)} here and "
                f"{known.dtype} {list(known.global_shape)} on another rank; expected one tensor"
            )

    def merge(self, other: Index, where: str) -> None:
        """Add everything another index lists.

        Raises:
            InvalidError: The two cut chunks differently, or describe one tensor differently.
        """
        if other.chunk_bytes != self.chunk_bytes:
            raise InvalidError(f"{where}: chunk_bytes={other.chunk_bytes}; expected {self.chunk_bytes} as elsewhere")
        for tensor in other.tensors.values():
            self._know(tensor, where)
        for fqn, pieces in other.pieces.items():
            self.pieces.setdefault(fqn, []).extend(pieces)

    def split(self, chunks_max: int) -> Iterator[Index]:
        """Yield indexes of at most `chunks_max` chunks each (or of one tensor), in FQN order; at least one."""
        current, chunks = Index(self.chunk_bytes), 0
        for fqn in sorted(self.tensors):
            pieces = self.pieces.get(fqn, [])
            count = sum(len(piece.digests) for piece in pieces) // 16
            if current.tensors and chunks + count > chunks_max:
                yield current
                current, chunks = Index(self.chunk_bytes), 0
            current.tensors[fqn] = self.tensors[fqn]
            current.pieces[fqn] = sorted(pieces, key=lambda piece: _coordinates(piece.region))
            chunks += count
        yield current


def document_of(index: Index) -> IndexDocument:
    """Return an index as it is stored."""
    fqns = sorted(index.tensors)
    tensors = [index.tensors[fqn] for fqn in fqns]
    dtypes = sorted({tensor.dtype for tensor in tensors})
    pieces = list(index.all_pieces())
    packs = sorted({piece.pack for piece in pieces})
    pack_number = {name: number for number, name in enumerate(packs)}
    tensor_number = {fqn: number for number, fqn in enumerate(fqns)}
    kinds = [_FLAT if isinstance(piece.region, FlatRange) else _BOX for piece in pieces]
    return IndexDocument(
        chunk_bytes=index.chunk_bytes,
        fqns=fqns,
        dtypes=dtypes,
        dtype_numbers=packed([dtypes.index(tensor.dtype) for tensor in tensors]),
        ndims=packed([len(tensor.global_shape) for tensor in tensors]),
        shapes=packed([length for tensor in tensors for length in tensor.global_shape]),
        packs=[("own", name) for name in packs],
        piece_tensors=packed([tensor_number[piece.tensor.fqn] for piece in pieces]),
        piece_packs=packed([pack_number[piece.pack] for piece in pieces]),
        piece_offsets=packed([piece.offset for piece in pieces]),
        piece_starts=packed([at for piece in pieces for at in _coordinates(piece.region)[0]]),
        piece_stops=packed([at for piece in pieces for at in _coordinates(piece.region)[1]]),
        digests=b"".join(piece.digests for piece in pieces),
        piece_kinds=packed(kinds) if any(kinds) else None,
    )


def _coordinates(region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return start and stop of a region as stored: one number per dimension, one for a flat range."""
    return ((region.start,), (region.stop,)) if isinstance(region, FlatRange) else (region.start, region.stop)


def index_of(document: IndexDocument, where: str) -> Index:
    """Return a stored index, every number of it checked.

    Raises:
        CorruptError: A count, name, shape or range is impossible; the message says which.
    """
    if not PAGE_BYTES <= document.chunk_bytes <= _CHUNK_BYTES_MAX or document.chunk_bytes % PAGE_BYTES:
        expected = f"a multiple of {PAGE_BYTES}, at most {_CHUNK_BYTES_MAX}"
        raise CorruptError(f"{where}: chunk_bytes={document.chunk_bytes}; expected {expected}")
    tensors = _tensors(document, where)
    for origin, name in document.packs:
        if origin != "own" or not is_pack_name(name):
            raise CorruptError(f"{where}: pack {name!r} of kind {origin!r}; expected a pack of this checkpoint")
    numbers = unpacked(document.piece_tensors, where).tolist()
    packs = unpacked(document.piece_packs, where, len(numbers)).tolist()
    offsets = unpacked(document.piece_offsets, where, len(numbers)).tolist()
    if numbers and (max(numbers) >= len(tensors) or max(packs) >= len(document.packs)):
        raise CorruptError(f"{where}: a piece names a tensor or pack that is not listed")
    if any(later < number for number, later in pairwise(numbers)):
        raise CorruptError(f"{where}: pieces are not in the order of their tensors")
    kinds = [_BOX] * len(numbers)
    if document.piece_kinds is not None:
        kinds = unpacked(document.piece_kinds, where, len(numbers)).tolist()
    if not set(kinds) <= {_BOX, _FLAT}:
        raise CorruptError(f"{where}: a piece of kind {max(kinds)}; expected {_BOX} (box) or {_FLAT} (flat range)")
    widths = [
        1 if kind == _FLAT else len(tensors[number].global_shape) for kind, number in zip(kinds, numbers, strict=True)
    ]
    coordinates = sum(widths)
    starts = unpacked(document.piece_starts, where, coordinates).tolist()
    stops = unpacked(document.piece_stops, where, coordinates).tolist()
    index = Index(document.chunk_bytes, {tensor.fqn: tensor for tensor in tensors})
    at = digest_at = 0
    for number, pack, offset, kind, width in zip(numbers, packs, offsets, kinds, widths, strict=True):
        tensor = tensors[number]
        region = _region(tensor, kind, tuple(starts[at : at + width]), tuple(stops[at : at + width]), where)
        at += width
        digest_bytes = 16 * -(-(region.numel * tensor.itemsize) // document.chunk_bytes)
        if digest_at + digest_bytes > len(document.digests):
            raise CorruptError(f"{where}: {tensor.fqn}: digests end before the pieces do")
        digests = document.digests[digest_at : digest_at + digest_bytes]
        digest_at += digest_bytes
        piece = Piece(tensor, region, document.packs[pack][1], offset, digests, document.chunk_bytes)
        index.pieces.setdefault(tensor.fqn, []).append(piece)
    if digest_at != len(document.digests):
        raise CorruptError(f"{where}: {len(document.digests)} bytes of digests; expected {digest_at}")
    return index


def _region(tensor: TensorSpec, kind: int, start: tuple[int, ...], stop: tuple[int, ...], where: str) -> Region:
    """Return the region a piece states.

    Raises:
        CorruptError: It does not lie inside its tensor.
    """
    if kind == _BOX and stop == tensor.global_shape and not any(start):
        return Box.whole(stop)
    bounds = (math.prod(tensor.global_shape),) if kind == _FLAT else tensor.global_shape
    if any(not a <= b <= n for a, b, n in zip(start, stop, bounds, strict=True)):
        raise CorruptError(f"{where}: {tensor.fqn}: piece {start}–{stop}; expected it inside {tensor.global_shape}")
    return FlatRange(start[0], stop[0]) if kind == _FLAT else Box(start, stop)


def _tensors(document: IndexDocument, where: str) -> list[TensorSpec]:
    count = len(document.fqns)
    if any(fqn >= later for fqn, later in pairwise(document.fqns)):
        raise CorruptError(f"{where}: an FQN is listed twice, or FQNs are not in order")
    if count and not document.fqns[0]:
        raise CorruptError(f"{where}: an FQN is empty")
    unknown = [name for name in document.dtypes if name not in DTYPES]
    if unknown:
        raise CorruptError(f"{where}: dtype {unknown[0]!r}; expected one of {', '.join(DTYPES)}")
    dtypes = unpacked(document.dtype_numbers, where, count).tolist()
    ndims = unpacked(document.ndims, where, count).tolist()
    if (dtypes and max(dtypes) >= len(document.dtypes)) or (ndims and max(ndims) > NDIM_MAX):
        raise CorruptError(f"{where}: a tensor names a dtype that is not listed or has over {NDIM_MAX} dimensions")
    lengths = unpacked(document.shapes, where, sum(ndims)).tolist()
    tensors = []
    at = 0
    for fqn, dtype, ndim in zip(document.fqns, dtypes, ndims, strict=True):
        shape = tuple(lengths[at : at + ndim])
        at += ndim
        count = math.prod(shape) or math.prod(length or 1 for length in shape)
        if count * DTYPES[document.dtypes[dtype]].itemsize >= _TENSOR_BYTES_MAX:
            raise CorruptError(f"{where}: {fqn}: {document.dtypes[dtype]} of shape {shape}; expected under 2**62 bytes")
        tensors.append(TensorSpec(fqn, document.dtypes[dtype], shape))
    return tensors


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(IndexDocument)


def encode_index(index: Index) -> bytes:
    """Return the bytes of one index file."""
    return _ENCODER.encode(document_of(index))


def decode_index(data: bytes, where: str) -> Index:
    """Return the index that a file holds.

    Raises:
        CorruptError: It is not an index, or not a possible one.
    """
    try:
        document = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"{where}: not an index of format 1 ({error})") from error
    return index_of(document, where)
