"""Encodes and decodes the header of a pack: a safetensors header, padded so that data starts at a page boundary."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import BY_SAFETENSORS, DTYPES
from holdfast.base.geometry.region import FlatRange, Region, corners
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import CODED_FOLDER, OPAQUE_FOLDER, Coding, PackItem, PackPlan, Piece
from holdfast.core.format.coded_notes import CodedNote, chunk_bytes_in, coded_piece, longest_note, note_of
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.names import is_coded_pack_name
from holdfast.core.format.sealed_json import convert
from holdfast.core.format.values.json_text import loads
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import PAGE_BYTES

HEADER_BYTES_MAX = 100_000_000
"""The safetensors library opens no larger header."""


@dataclass(frozen=True, slots=True)
class HeaderBody:
    """The header of a pack without provenance, which is the same for every save of these pieces."""

    pack: str
    """Name of the pack."""

    pieces: int
    """Number of pieces."""

    metadata: bytes
    """Members of `__metadata__` as JSON, without provenance."""

    entries: bytes
    """The members after `__metadata__` as JSON, each led by a comma."""

    def header(self, provenance: Mapping[str, str]) -> bytes:
        """Return the bytes before the data: length, JSON, and spaces up to a whole number of pages.

        Args:
            provenance: Step, attempt and rank, as text.
        Raises:
            InvalidError: The header would be too large for the safetensors library.
        """
        members = b",".join(filter(None, (self.metadata, _origin(provenance))))
        text = b'{"__metadata__":{%b}%b}' % (members, self.entries)
        padded = _padded_bytes(len(text), self.pack, self.pieces)
        return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)


@dataclass(frozen=True, slots=True)
class CodedHeaderBody:
    """The header of a coded pack, whose numbers are known only once all data is written."""

    plan: PackPlan
    """The pack."""

    chunk_bytes: int
    """Raw bytes of each chunk but the last of a piece."""

    longest_bytes: int
    """Bytes of its longest JSON, without provenance."""

    def with_pairs(self, pair_fqns: Iterable[str]) -> CodedHeaderBody:
        """Return the header of the same pack if chunks of some pieces may be coded against a paired tensor.

        Args:
            pair_fqns: For each such piece the FQN of that tensor.
        """
        return replace(self, longest_bytes=self.longest_bytes + sum(map(_pair_bytes, pair_fqns)))

    def header_bytes(self, provenance: Mapping[str, str]) -> int:
        """Return the bytes of every header with this provenance: the start of the data.

        Raises:
            InvalidError: The header would be too large for the safetensors library.
        """
        return _padded_bytes(self.longest_bytes + len(_origin(provenance)) + 1, self.plan.name, len(self.plan.items))

    def header(self, provenance: Mapping[str, str], codings: Sequence[Coding], _digests: Sequence[bytes] = ()) -> bytes:
        """Return the bytes before the data: length, JSON, and spaces up to `header_bytes`.

        Args:
            provenance: Step, attempt and rank, as text.
            codings: How the chunks of each piece are stored.
        """
        notes = list(map(note_of, self.plan.items, codings))
        body = _coded_body(self.plan, self.chunk_bytes, notes, [coding.starts[-1] for coding in codings])
        padded, header = self.header_bytes(provenance), body.header(provenance)
        assert len(header) <= padded, f"{self.plan.name}: a header of {len(header)} bytes; expected at most {padded}"
        return struct.pack("<Q", padded - 8) + header[8:].ljust(padded - 8)


def _origin(provenance: Mapping[str, str]) -> bytes:
    return msgspec.json.encode({f"holdfast.{name}": text for name, text in provenance.items()})[1:-1]


def _padded_bytes(text_bytes: int, pack: str, pieces: int) -> int:
    """Return the bytes of a header with its length and spaces up to a whole number of pages."""
    padded = -(-(8 + text_bytes) // PAGE_BYTES) * PAGE_BYTES
    if padded - 8 > HEADER_BYTES_MAX:
        raise InvalidError(
            f"pack {pack}: header of {padded - 8} bytes for {pieces} pieces; expected at most {HEADER_BYTES_MAX}. Give "
            "its tensors shorter names"
        )
    return padded


def header_of(pack: PackPlan, provenance: Mapping[str, str]) -> bytes:
    """Return the whole header of a pack, as `HeaderBody.header`."""
    return header_body(pack).header(provenance)


def header_body(pack: PackPlan) -> HeaderBody:
    """Return the header of a pack without provenance.

    `DCP_SHARDING_INFO` lets PyTorch's `HuggingFaceStorageReader` reshard the pack.
    """
    shapes = {item.tensor.fqn: list(item.tensor.global_shape) for item in pack.items}
    metadata = {"format": "pt", "holdfast.global_shapes": _compact(shapes)}
    if pack.apart:
        metadata["holdfast.pieces"] = _compact({item.tensor.fqn: _piece_note(item) for item in pack.items})
    else:
        offsets = {item.tensor.fqn: {"saved_offsets": list(corners(item.region)[0])} for item in pack.items}
        metadata["DCP_SHARDING_INFO"] = _compact(offsets)
    entries: dict[str, object] = {}
    for item in pack.items:
        dtype, shape = header_entry(item.tensor.dtype, item.region, apart=pack.apart)
        entries[item.tensor.fqn] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [item.data_offset, item.data_offset + item.bytes],
        }
    return _body(pack, metadata, entries)


def _body(pack: PackPlan, metadata: Mapping[str, str], entries: Mapping[str, object]) -> HeaderBody:
    written = msgspec.json.encode(entries)[1:-1]
    return HeaderBody(
        pack.name, len(pack.items), msgspec.json.encode(metadata)[1:-1], b"," + written if written else b""
    )


def coded_header_body(pack: PackPlan, chunk_bytes: int) -> CodedHeaderBody:
    """Return the header of a coded pack without provenance, lengths and pairs.

    Args:
        pack: The pack.
        chunk_bytes: Raw bytes of each chunk but the last of a piece.
    """
    notes = [longest_note(item, chunk_bytes) for item in pack.items]
    body = _coded_body(pack, chunk_bytes, notes, [item.bytes for item in pack.items])
    return CodedHeaderBody(pack, chunk_bytes, len(b'{"__metadata__":{}}') + len(body.metadata) + len(body.entries))


def _pair_bytes(fqn: str) -> int:
    """Return by how many bytes a header grows if the note of a piece names its pair: notes are JSON in JSON."""
    return len(msgspec.json.encode(f',"pair":{_compact(fqn)}')) - len('""')


def _coded_body(
    pack: PackPlan, chunk_bytes: int, notes: Sequence[Mapping[str, object]], stored_bytes: Sequence[int]
) -> HeaderBody:
    """Return the header of a coded pack, without provenance and padding."""
    shapes, pieces, entries, start = {}, {}, {}, 0
    for item, note, size in zip(pack.items, notes, stored_bytes, strict=True):
        fqn = item.tensor.fqn
        shapes[fqn], pieces[fqn] = list(item.tensor.global_shape), note
        entries[fqn] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    metadata = {
        "format": "pt",
        "holdfast.global_shapes": _compact(shapes),
        "holdfast.pieces": _compact(pieces),
        "holdfast.chunk_bytes": str(chunk_bytes),
    }
    return _body(pack, metadata, entries)


def header_entry(dtype: str, region: Region, *, apart: bool) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape of a piece in a header: its own, or bytes for a flat range or an opaque pack."""
    if apart or not isinstance(region, Box):
        return "U8", (region.numel * DTYPES[dtype].itemsize,)
    return DTYPES[dtype].safetensors, region.shape


def _piece_note(item: PackItem) -> dict[str, object]:
    """Return the metadata of a piece in an opaque pack, from which repair rebuilds an index."""
    region = item.region
    kind = "flat" if isinstance(region, FlatRange) else "box"
    return {"dtype": item.tensor.dtype, kind: [region.start, region.stop]}


def _compact(document: object) -> str:
    return msgspec.json.encode(document).decode()


def pack_digest(header: bytes, chunk_digests: bytes) -> str:
    """Return the digest of a pack: xxh3-128 over its header and its chunks' digests, in file order."""
    return hex_digest_of(header, chunk_digests)


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One piece in the header of a pack."""

    fqn: str
    """Key of the entry."""

    dtype: str
    """Element type, by its safetensors name."""

    shape: tuple[int, ...]
    """Shape of the piece."""

    start: int
    """First byte in the file."""

    stop: int
    """Byte past the last."""


class _EntryDocument(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    def __post_init__(self) -> None:
        if self.dtype not in BY_SAFETENSORS:
            raise ValueError(f"dtype {self.dtype[:80]!r}; expected one of safetensors")


def entries_of(header: bytes, where: str) -> Sequence[HeaderEntry]:
    """Return the pieces in a header; the inverse of `header_of`, with every field checked.

    Args:
        header: All bytes before the data, including the length.
        where: The pack, for messages.
    Raises:
        CorruptError: The header is not one that Holdfast writes.
    """
    if len(header) < 8 or struct.unpack("<Q", header[:8])[0] != len(header) - 8:
        raise CorruptError(
            f"{where}: the first 8 bytes are {header[:8].hex()}; expected {len(header) - 8}, the "
            "length of the header. Read another copy"
        )
    document = convert(loads(header[8:]), dict[str, object], f"{where}: the header")
    document.pop("__metadata__", None)
    entries = convert(document, dict[str, _EntryDocument], f"{where}: the header")
    return [
        HeaderEntry(fqn, entry.dtype, entry.shape, *(len(header) + offset for offset in entry.data_offsets))
        for fqn, entry in entries.items()
    ]


def entry_of(piece: Piece) -> HeaderEntry:
    """Return the entry that a piece of an index has in the header of its pack."""
    if piece.coding is None:
        dtype, shape = header_entry(piece.tensor.dtype, piece.region, apart=is_apart(piece.pack))
    else:
        dtype, shape = "U8", (piece.stored_bytes,)
    return HeaderEntry(piece.tensor.fqn, dtype, shape, piece.offset, piece.offset + piece.stored_bytes)


def is_apart(pack: str) -> bool:
    """Return whether the entries of a pack, of this or another step, declare bytes, not elements of a dtype."""
    return f"/{OPAQUE_FOLDER}" in f"/{pack}" or f"/{CODED_FOLDER}" in f"/{pack}"


@dataclass(frozen=True, slots=True)
class StatedPiece:
    """One piece of a pack, with the tensor and region that the header states."""

    tensor: TensorSpec
    """Its tensor."""

    region: Region
    """Its region of the tensor."""

    start: int
    """First stored byte in the pack."""

    stop: int
    """Byte past the last."""

    coding: Coding | None = None
    """How its chunks are stored; None: as they are. The pair is named only."""

    chunk_bytes: int = 0
    """Raw bytes of each chunk but the last, in a coded pack; 0 in any other, whose header does not state it."""


def stated_pieces(header: bytes, pack: str, where: str) -> Sequence[StatedPiece]:
    """Return the pieces that the header of a pack states, by offset.

    Args:
        header: All bytes before the data, including the length.
        pack: Name of the pack, or its path from the root of a run.
        where: The pack, for messages.
    Raises:
        CorruptError: The bytes are not the header of a pack, or the header has an impossible value.
        InvalidError: A codec is of a newer version of the format.
    """
    entries = entries_of(header, where)
    document: Any = loads(header[8:])
    metadata = document.get("__metadata__")
    if is_coded_pack_name(pack):
        pieces = _coded_pieces(metadata, entries, where)
    else:
        pieces = _plain_pieces(metadata, entries, where, is_opaque=is_apart(pack))
    return sorted(pieces, key=lambda piece: (piece.start, piece.stop))


def _plain_pieces(metadata: Any, entries: Sequence[HeaderEntry], where: str, *, is_opaque: bool) -> list[StatedPiece]:
    try:
        shapes = _member(metadata, "holdfast.global_shapes", where)
        notes = _member(metadata, "holdfast.pieces" if is_opaque else "DCP_SHARDING_INFO", where)
        pieces = []
        for entry in entries:
            note = notes[entry.fqn]
            if is_opaque:
                dtype, region = note["dtype"], _region_of(note)
            else:
                start = tuple(note["saved_offsets"])
                dtype = BY_SAFETENSORS[entry.dtype].name
                region = Box(start, tuple(at + length for at, length in zip(start, entry.shape, strict=True)))
            tensor = TensorSpec(entry.fqn, dtype, tuple(shapes[entry.fqn]))
            if region.numel * DTYPES[dtype].itemsize != entry.stop - entry.start:
                raise CorruptError(
                    f"{where}: {entry.fqn} has {entry.stop - entry.start} bytes; expected the size of {region}. Read "
                    "another copy"
                )
            pieces.append(StatedPiece(tensor, region, entry.start, entry.stop))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidError) as error:
        raise _lacks_regions(where, error) from error
    return pieces


def _coded_pieces(metadata: Any, entries: Sequence[HeaderEntry], where: str) -> list[StatedPiece]:
    try:
        shapes = convert(_member(metadata, "holdfast.global_shapes", where), dict[str, tuple[int, ...]], where)
        notes = convert(_member(metadata, "holdfast.pieces", where), dict[str, CodedNote], where)
        chunk_bytes = chunk_bytes_in(metadata["holdfast.chunk_bytes"])
        stated = [(entry, notes[entry.fqn], shapes[entry.fqn]) for entry in entries]
        unknown = [note.dtype for _, note, _ in stated if note.dtype not in DTYPES]
        if unknown:
            raise ValueError(f"dtype {unknown[0][:80]!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _lacks_regions(where, error) from error
    return [
        StatedPiece(
            tensor=TensorSpec(entry.fqn, note.dtype, shape),
            region=region,
            start=entry.start,
            stop=entry.stop,
            coding=coding,
            chunk_bytes=chunk_bytes,
        )
        for entry, note, shape in stated
        for region, coding in [coded_piece(note, entry.fqn, shape, entry.stop - entry.start, chunk_bytes, where)]
    ]


def _member(metadata: Any, name: str, where: str) -> Any:
    """Return the document in a member of the metadata, which is JSON in JSON."""
    text = metadata[name].encode()
    try:
        return loads(text)
    except CorruptError as error:
        raise CorruptError(f"{where}: {name}: {error}") from error


def _lacks_regions(where: str, error: Exception) -> CorruptError:
    return CorruptError(f"{where}: the header lacks the regions of its pieces: {error}. Read another copy")


def _region_of(note: Mapping[str, Any]) -> Region:
    if "flat" in note:
        return FlatRange(*note["flat"])
    starts, stops = note["box"]
    return Box(tuple(starts), tuple(stops))
