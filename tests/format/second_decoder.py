"""Reads checkpoints of format 1.5 as a stranger would: from `docs/format.md` alone, with numpy and zstd, no Holdfast.

It proves that the page says enough. It checks no digests, because xxHash is in neither of the two.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Numbers = np.ndarray[Any, np.dtype[Any]]

ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}


# ---------------------------------------------------------------------------------------------------- the checkpoint


@dataclass(frozen=True)
class StoredPiece:
    """One piece of a tensor."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    is_flat: bool
    start: tuple[int, ...]
    stop: tuple[int, ...]
    pack: Path
    offset: int
    chunk_bytes: int
    codecs: tuple[str, ...] | None
    """Codec of each chunk, empty where it is stored raw; None for a piece that is not coded."""
    lengths: tuple[int, ...]
    """Stored bytes of each chunk of a coded piece."""
    pair: str

    @property
    def numel(self) -> int:
        return prod(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def raw_bytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def region(self) -> tuple[object, ...]:
        return self.fqn, self.is_flat, self.start, self.stop


class Checkpoint:
    """A checkpoint in a folder: a step of a run, or one saved by path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        assert self.manifest["holdfast"]["kind"] == "checkpoint"
        assert self.manifest["holdfast"]["format"][0] == 1 and self.manifest["holdfast"]["format"][1] <= 5
        self.attempt = folder / self.manifest["attempt"]

    @cached_property
    def pieces(self) -> list[StoredPiece]:
        """Every piece that the index files list."""
        indexes = [unpacked((self.attempt / name).read_bytes()) for name, *_ in self.manifest["indexes"]]
        return [piece for index in indexes for piece in self._pieces_in(index)]

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """Return element type, shape and row-major bytes of every tensor with a piece."""
        found: dict[str, tuple[str, tuple[int, ...], Numbers]] = {}
        for piece in self.pieces:
            empty = np.zeros((*piece.shape, ITEMSIZE[piece.dtype]), np.uint8)
            *_, whole = found.setdefault(piece.fqn, (piece.dtype, piece.shape, empty))
            elements = np.frombuffer(self.raw(piece), np.uint8).reshape(-1, ITEMSIZE[piece.dtype])
            if piece.is_flat:
                whole.reshape(-1, ITEMSIZE[piece.dtype])[piece.start[0] : piece.stop[0]] = elements
            else:
                box = tuple(slice(start, stop) for start, stop in zip(piece.start, piece.stop, strict=True))
                whole[box] = elements.reshape(whole[box].shape)
        return {fqn: (dtype, shape, whole.tobytes()) for fqn, (dtype, shape, whole) in found.items()}

    def raw(self, piece: StoredPiece) -> bytes:
        """Return the raw bytes of a piece."""
        return raw_of(piece, None if not piece.pair else self.raw(self._pair_of(piece)), self._pair_dtype(piece))

    def _pair_of(self, piece: StoredPiece) -> StoredPiece:
        return self._by_region[(piece.pair, *piece.region[1:])]

    def _pair_dtype(self, piece: StoredPiece) -> str:
        return self._pair_of(piece).dtype if piece.pair else ""

    @cached_property
    def _by_region(self) -> dict[tuple[object, ...], StoredPiece]:
        return {piece.region: piece for piece in self.pieces}

    def path_of(self, name: str) -> Path:
        """Return where a pack of this or another step is."""
        return self._folder.parent / name if name.startswith("step-") else self.attempt / name

    def _pieces_in(self, index: dict[str, Any]) -> list[StoredPiece]:
        dtypes = [index["dtypes"][number] for number in column(index["dtype_numbers"])]
        shapes, lengths = [], column(index["shapes"])
        for ndim in column(index["ndims"]):
            shapes.append(tuple(lengths[:ndim]))
            lengths = lengths[ndim:]
        tensors, packs, offsets, starts, stops = (
            column(index[f"piece_{name}"]) for name in ("tensors", "packs", "offsets", "starts", "stops")
        )
        kinds = [0] * len(tensors) if index["piece_kinds"] is None else column(index["piece_kinds"])
        coding = index.get("coding")
        numbers = list(coding["chunk_codecs"]) if coding else []
        stored, pairs = (column(coding[name]) if coding else [] for name in ("chunk_lengths", "piece_pairs"))
        pieces = []
        for number, pack, offset, kind in zip(tensors, packs, offsets, kinds, strict=True):
            dtype, shape = dtypes[number], shapes[number]
            width = 1 if kind else len(shape)
            start, starts, stop, stops = tuple(starts[:width]), starts[width:], tuple(stops[:width]), stops[width:]
            numel = prod(b - a for a, b in zip(start, stop, strict=True))
            chunks = -(-numel * ITEMSIZE[dtype] // index["chunk_bytes"])
            name = index["packs"][pack][1]
            codecs, sizes, pair = None, (), 0
            if "/coded/" in f"/{name}":
                codecs = tuple(coding["codecs"][each - 1] if each else "" for each in numbers[:chunks])
                sizes, numbers, stored = tuple(stored[:chunks]), numbers[chunks:], stored[chunks:]
                pair, pairs = pairs[0], pairs[1:]
            pieces.append(
                StoredPiece(
                    index["fqns"][number],
                    dtype,
                    shape,
                    bool(kind),
                    start,
                    stop,
                    self.path_of(name),
                    offset,
                    index["chunk_bytes"],
                    codecs,
                    sizes,
                    coding["pairs"][pair - 1] if pair else "",
                )
            )
        assert not numbers and not stored and not pairs
        return pieces


def stated_pieces(path: Path) -> list[StoredPiece]:
    """Return the pieces that the header of a coded pack states, without any index."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 4096 == 0
    document = json.loads(data[8 : 8 + length])
    metadata = document.pop("__metadata__")
    shapes, notes = json.loads(metadata["holdfast.global_shapes"]), json.loads(metadata["holdfast.pieces"])
    chunk_bytes = int(metadata["holdfast.chunk_bytes"])
    pieces = []
    for fqn, entry in document.items():
        note = notes[fqn]
        start, stop = note["flat"] if "flat" in note else note["box"]
        assert entry["dtype"] == "U8" and entry["shape"] == [entry["data_offsets"][1] - entry["data_offsets"][0]]
        assert sum(note["lengths"]) == entry["shape"][0]
        codecs = tuple(note["codecs"][number - 1] if number else "" for number in note["chunks"])
        corners = ((start,), (stop,)) if "flat" in note else (tuple(start), tuple(stop))
        pieces.append(
            StoredPiece(
                fqn,
                note["dtype"],
                tuple(shapes[fqn]),
                "flat" in note,
                *corners,
                path,
                8 + length + entry["data_offsets"][0],
                chunk_bytes,
                codecs,
                tuple(note["lengths"]),
                note.get("pair", ""),
            )
        )
    return pieces


def raw_of(piece: StoredPiece, pair: bytes | None, pair_dtype: str) -> bytes:
    """Return the raw bytes of a piece, given those of its pair."""
    stored = piece.pack.read_bytes()[piece.offset :]
    if piece.codecs is None:
        return stored[: piece.raw_bytes]
    raw, at = b"", 0
    for number, (codec, count) in enumerate(zip(piece.codecs, piece.lengths, strict=True)):
        start = number * piece.chunk_bytes
        raw_bytes = min(piece.chunk_bytes, piece.raw_bytes - start)
        # Half of chunk n // 2 of the pair: the same elements, which have half the bytes.
        base = None if pair is None else pair[start // 2 : start // 2 + raw_bytes // 2]
        raw += decoded(codec, stored[at : at + count], raw_bytes, piece.dtype, base, pair_dtype)
        at += count
    assert len(raw) == piece.raw_bytes
    return raw


# --------------------------------------------------------------------------------------------------------- the codecs


def decoded(
    codec: str, stored: bytes, raw_bytes: int, dtype: str, base: bytes | None = None, base_dtype: str = ""
) -> bytes:
    """Return the raw bytes of a stored chunk; without a codec it is stored raw."""
    if not codec:
        assert len(stored) == raw_bytes
        return stored
    assert -(-raw_bytes // 4096) <= len(stored) < raw_bytes
    if codec == "residual":
        assert base is not None
        return _residual(stored, raw_bytes, base, base_dtype)
    return _DECODERS[codec](stored, raw_bytes, ITEMSIZE[dtype])


def _sections(stored: bytes, count: int, raw_bytes: int) -> list[bytes]:
    lengths = struct.unpack_from(f"<{count}I", stored)
    sections, at = [], 4 * count
    for length in lengths:
        sections.append(stored[at : at + length])
        assert len(sections[-1]) == length
        at += length
    assert stored[at:] == bytes(max(-(-raw_bytes // 4096) - at, 0))
    return sections


def _frame(section: bytes, count: int) -> bytes:
    assert zstd.get_frame_info(section).decompressed_size == count
    assert zstd.get_frame_size(section) == len(section)
    return zstd.decompress(section)


def _plane(section: bytes, count: int) -> Numbers:
    assert len(section) <= count
    return np.frombuffer(section if len(section) == count else _frame(section, count), np.uint8)


def _low_bytes(section: bytes, count: int, width: int) -> Numbers:
    """Return the low bytes of each element, shape (count, width), the lowest first."""
    if len(section) == count * width:
        return np.frombuffer(section, np.uint8).reshape(count, width)
    lengths = struct.unpack_from(f"<{width}I", section)
    planes, at = [], 4 * width
    for length in lengths:
        planes.append(_plane(section[at : at + length], count))
        at += length
    assert at == len(section)
    return np.stack(planes, axis=1)


def _planes(stored: bytes, raw_bytes: int, itemsize: int) -> bytes:
    count = raw_bytes // itemsize
    upper, middle, packed, *low = _sections(stored, 3 + (itemsize > 2), raw_bytes)
    assert not (middle and packed) and (middle or packed)
    middles = _plane(middle, count) if middle else _unpacked_middle(packed, count)
    rotated = _plane(upper, count).astype(np.uint16) << 8 | middles
    high = rotated >> 1 | (rotated & 1) << 15
    elements = np.empty((count, itemsize), np.uint8)
    elements[:, -2], elements[:, -1] = high & 255, high >> 8
    if low:
        elements[:, :-2] = _low_bytes(low[0], count, itemsize - 2)
    return elements.tobytes()


def _unpacked_middle(section: bytes, count: int) -> Numbers:
    run = -(-count // 8)
    assert len(section) == 7 * run
    runs = np.frombuffer(section, np.uint8).reshape(7, run)
    last = np.zeros(run, np.uint8)
    for number in range(7):
        last += (runs[number] & 1) << (number + 1)
    return np.concatenate([*(runs & 254), last])[:count]


def _residual(stored: bytes, raw_bytes: int, base: bytes, base_dtype: str) -> bytes:
    count, dropped = raw_bytes // 4, {"bfloat16": 16, "float16": 13}[base_dtype]
    section, places, uppers = _sections(stored, 3, raw_bytes)
    low = _low_bytes(section, count, 2).copy().view("<u2").reshape(-1).astype(np.int64)
    assert (low < 1 << dropped).all()
    pair = np.frombuffer(base, "<u2").astype(np.int64)
    assert len(pair) == count
    if base_dtype == "float16":
        magnitude = pair % (1 << 15)
        pair = np.where(magnitude == 0, 0, magnitude + 112 * 1024) + (pair >> 15 << 18)
    upper = (pair - (low > 1 << (dropped - 1))) % (1 << (32 - dropped))
    at = np.frombuffer(places, "<u4")
    assert len(places) == len(uppers) and (at < count).all() and (np.diff(at.astype(np.int64)) > 0).all()
    upper[at] = np.frombuffer(uppers, "<u4")
    return (upper << dropped | low).astype("<u4").tobytes()


def _dictionary(stored: bytes, raw_bytes: int, itemsize: int) -> bytes:
    count = raw_bytes // itemsize
    table_section, index_section, exponent_section, sign_section = _sections(stored, 4, raw_bytes)
    table = np.frombuffer(table_section, "<u4")
    assert 1 <= len(table) <= 256 and (table < 1 << 23).all() and len(set(table.tolist())) == len(table)
    index, exponents = _plane(index_section, count), _plane(exponent_section, count)
    if len(table) <= 128:
        assert not sign_section
        signs, index = index & 1, index >> 1
    else:
        assert len(sign_section) == -(-count // 8)
        signs = np.unpackbits(np.frombuffer(sign_section, np.uint8), bitorder="little")[:count]
    assert (index < len(table)).all()
    return (signs.astype(np.uint32) << 31 | exponents.astype(np.uint32) << 23 | table[index]).astype("<u4").tobytes()


def _sparse(stored: bytes, raw_bytes: int, itemsize: int) -> bytes:
    count = raw_bytes // itemsize
    bitmap, values = _sections(stored, 2, raw_bytes)
    bits = np.unpackbits(_plane(bitmap, -(-count // 8)), bitorder="little")
    assert not bits[count:].any()
    elements = np.zeros((count, itemsize), np.uint8)
    elements[bits[:count] == 1] = np.frombuffer(values, np.uint8).reshape(-1, itemsize)
    return elements.tobytes()


def _zstd(stored: bytes, raw_bytes: int, itemsize: int) -> bytes:
    (frame,) = _sections(stored, 1, raw_bytes)
    return _frame(frame, raw_bytes)


_DECODERS = {"planes": _planes, "dictionary": _dictionary, "sparse": _sparse, "zstd": _zstd}


# ----------------------------------------------------------------------------------------------------------- msgpack


def column(packed: tuple[int, bytes]) -> list[int]:
    """Return the numbers of a column."""
    width, data = packed
    return [int(number) for number in np.frombuffer(data, f"<u{width}")]


def unpacked(data: bytes) -> Any:
    """Return the value in msgpack: what the format uses of it."""
    value, at = _value(data, 0)
    assert at == len(data)
    return value


def _value(data: bytes, at: int) -> tuple[Any, int]:
    tag, at = data[at], at + 1
    if tag < 0x80:
        return tag, at
    if tag < 0xC0:
        lengths = (tag & 0x0F, "map") if tag < 0x90 else (tag & 0x0F, "array") if tag < 0xA0 else (tag & 0x1F, "text")
        return _filled(data, at, *lengths)
    if tag == 0xC0:
        return None, at
    if tag in (0xC2, 0xC3):
        return tag == 0xC3, at
    if 0xCC <= tag <= 0xCF:
        width = 1 << (tag - 0xCC)
        return int.from_bytes(data[at : at + width], "big"), at + width
    kinds = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
    kind = "bytes" if tag < 0xC7 else "text" if tag < 0xDC else "array" if tag < 0xDE else "map"
    width = kinds[tag]
    return _filled(data, at + width, int.from_bytes(data[at : at + width], "big"), kind)


def _filled(data: bytes, at: int, count: int, kind: str) -> tuple[Any, int]:
    if kind in ("text", "bytes"):
        return data[at : at + count].decode() if kind == "text" else data[at : at + count], at + count
    values = []
    for _ in range(count * (2 if kind == "map" else 1)):
        value, at = _value(data, at)
        values.append(value)
    return dict(zip(values[::2], values[1::2], strict=True)) if kind == "map" else values, at
