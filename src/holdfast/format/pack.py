"""Encodes and decodes the header of a pack: a safetensors header, padded so that data starts at a page boundary."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.errors import CorruptError, InvalidError
from holdfast.format.digest import hex_digest_of
from holdfast.format.sealed_json import convert
from holdfast.format.values.json_text import loads
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import BY_SAFETENSORS, DTYPES
from holdfast.geometry.region import FlatRange, Region, corners
from holdfast.geometry.tensor import TensorSpec
from holdfast.settings import PAGE_BYTES
from holdfast.types.plan import OPAQUE_FOLDER, PackItem, PackPlan

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
        origin = msgspec.json.encode({f"holdfast.{name}": text for name, text in provenance.items()})[1:-1]
        members = b",".join(filter(None, (self.metadata, origin)))
        text = b'{"__metadata__":{%b}%b}' % (members, self.entries)
        padded = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
        if padded > HEADER_BYTES_MAX:
            raise InvalidError(
                f"pack {self.pack}: header of {padded} bytes for {self.pieces} pieces; expected at most "
                f"{HEADER_BYTES_MAX}. Give its tensors shorter names"
            )
        return struct.pack("<Q", padded) + text.ljust(padded)


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
    written = msgspec.json.encode(entries)[1:-1]
    return HeaderBody(
        pack.name, len(pack.items), msgspec.json.encode(metadata)[1:-1], b"," + written if written else b""
    )


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


@dataclass(frozen=True, slots=True)
class StatedPiece:
    """One piece of a pack, with the tensor and region that the header states."""

    tensor: TensorSpec
    """Its tensor."""

    region: Region
    """Its region of the tensor."""

    start: int
    """First byte in the pack."""

    stop: int
    """Byte past the last."""


def stated_pieces(header: bytes, pack: str, where: str) -> Sequence[StatedPiece]:
    """Return the pieces that the header of a pack states, by offset.

    Args:
        header: All bytes before the data, including the length.
        pack: Name of the pack, or its path from the root of a run.
        where: The pack, for messages.
    Raises:
        CorruptError: The bytes are not the header of a pack, or the header has an impossible value.
    """
    is_opaque = f"/{OPAQUE_FOLDER}" in f"/{pack}"
    try:
        document: Any = loads(header[8:])
        metadata = document["__metadata__"]
        shapes: Any = loads(metadata["holdfast.global_shapes"].encode())
        notes: Any = loads(metadata["holdfast.pieces" if is_opaque else "DCP_SHARDING_INFO"].encode())
        pieces = []
        for entry in entries_of(header, where):
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
        raise CorruptError(
            f"{where}: the header lacks the regions of its pieces: {error}. Read another copy"
        ) from error
    return sorted(pieces, key=lambda piece: (piece.start, piece.stop))


def _region_of(note: Mapping[str, Any]) -> Region:
    if "flat" in note:
        return FlatRange(*note["flat"])
    starts, stops = note["box"]
    return Box(tuple(starts), tuple(stops))
