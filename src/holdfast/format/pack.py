"""The header of a pack: plain safetensors, padded so that data starts on a page."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.errors import CorruptError, InvalidError
from holdfast.format.digest import hex_digest_of
from holdfast.format.sealed_json import convert
from holdfast.format.values.json_text import loads
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import BY_SAFETENSORS, DTYPES
from holdfast.geometry.region import FlatRange, Region
from holdfast.settings import PAGE_BYTES
from holdfast.types.plan import PackItem, PackPlan

HEADER_BYTES_MAX = 100_000_000
"""The largest header stock safetensors opens."""


@dataclass(frozen=True, slots=True)
class HeaderBody:
    """What the header of a pack says whenever its pieces are written."""

    pack: str
    """Name of the pack."""

    pieces: int
    """Pieces in it."""

    metadata: bytes
    """Members of `__metadata__` as JSON, without provenance."""

    entries: bytes
    """The members after `__metadata__` as JSON, each led by a comma."""

    def header(self, provenance: Mapping[str, str]) -> bytes:
        """Return the bytes before the data: length, JSON, and spaces up to a whole number of pages.

        Args:
            provenance: Step, attempt and rank, as text.
        Raises:
            InvalidError: The header would be larger than stock safetensors opens.
        """
        own = msgspec.json.encode({f"holdfast.{name}": text for name, text in provenance.items()})[1:-1]
        members = b",".join(filter(None, (self.metadata, own)))
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
    """Return what the header of a pack says besides its provenance.

    `DCP_SHARDING_INFO` is what PyTorch's `HuggingFaceStorageReader` needs to reshard the pack.
    """
    shapes = {item.tensor.fqn: list(item.tensor.global_shape) for item in pack.items}
    metadata = {"format": "pt", "holdfast.global_shapes": _compact(shapes)}
    if pack.apart:
        metadata["holdfast.pieces"] = _compact({item.tensor.fqn: _piece_note(item) for item in pack.items})
    else:
        offsets = {item.tensor.fqn: {"saved_offsets": _start(item.region)} for item in pack.items}
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
    """Return the dtype and shape a header states for a piece: its own, or bytes for one that lies apart."""
    if apart or not isinstance(region, Box):
        return "U8", (region.numel * DTYPES[dtype].itemsize,)
    return DTYPES[dtype].safetensors, region.shape


def _piece_note(item: PackItem) -> dict[str, object]:
    """Return what the header of a pack apart must add, so that an index can be rebuilt from it."""
    region = item.region
    kind = "flat" if isinstance(region, FlatRange) else "box"
    return {"dtype": item.tensor.dtype, kind: [region.start, region.stop]}


def _start(region: Region) -> list[int]:
    assert isinstance(region, Box), "flat ranges lie apart"
    return list(region.start)


def _compact(document: object) -> str:
    return msgspec.json.encode(document).decode()


def pack_digest(header: bytes, chunk_digests: bytes) -> str:
    """Return the digest of a pack: xxh3-128 over its header and its chunks' digests, in file order."""
    return hex_digest_of(header, chunk_digests)


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One piece as a pack's own header states it."""

    fqn: str
    """Key of the entry."""

    dtype: str
    """Element type by its name in safetensors."""

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
            raise ValueError(f"dtype {self.dtype[:80]!r} is unknown")


def entries_of(header: bytes, where: str) -> Sequence[HeaderEntry]:
    """Return what a header lists; the inverse of `header_of`, for a reader that trusts nothing.

    Args:
        header: All bytes before the data, the length included.
        where: The pack, for messages.
    Raises:
        CorruptError: The header is not that of a safetensors file we could have written.
    """
    if len(header) < 8 or struct.unpack("<Q", header[:8])[0] != len(header) - 8:
        raise CorruptError(f"{where}: its first 8 bytes say {header[:8].hex()}; expected {len(header) - 8}, its length")
    document = convert(loads(header[8:]), dict[str, object], f"{where}: the header")
    document.pop("__metadata__", None)
    entries = convert(document, dict[str, _EntryDocument], f"{where}: the header")
    return [
        HeaderEntry(fqn, entry.dtype, entry.shape, *(len(header) + offset for offset in entry.data_offsets))
        for fqn, entry in entries.items()
    ]
