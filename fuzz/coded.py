"""Fuzzes coded pieces: the bytes of indexes and of headers, and indexes whose numbers are nearly possible."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise

import msgspec

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import Coding, PackItem, PackPlan
from holdfast.core.format.codec_names import CODEC_BASES, needs_pair
from holdfast.core.format.index.columns import encode_column
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.index_checks import require_pairs
from holdfast.core.format.index.index_file import decode_index, encode_index
from holdfast.core.format.pack import coded_header_body, stated_pieces
from holdfast.errors import CheckpointError, CorruptError

PACK = "coded/r00000.safetensors"
_CHUNK = 4096
_LENGTHS = (0, 1, 2, 3, 2048, 4095, 4096, 4097, 8192, 1 << 32, (1 << 32) + 4096, (1 << 63) - 1)


def index(data: bytes) -> None:
    """An index file with coded pieces: decoding, encoding and decoding it again yields the same."""
    try:
        decoded = decode_index(data, "here")
    except CheckpointError as error:
        assert "here" in str(error) or "MessagePack" in str(error)
        return
    _require_sound(decoded)
    again = encode_index(decoded)
    assert encode_index(decode_index(again, "here")) == again


def document(data: bytes) -> None:
    """An index with drawn codecs, lengths and pairs, most of them possible."""
    draw = _drawn(data)
    whole = msgspec.msgpack.decode(index_seed())
    coding = whole["coding"]
    names = sorted(CODEC_BASES)[: next(draw) % 6]
    codecs = [next(draw) % (len(names) + 1) if next(draw) % 16 else next(draw) for _ in coding["chunk_codecs"]]
    lengths = [4096 if not codec and next(draw) % 16 else _LENGTHS[next(draw) % 12] for codec in codecs]
    pairs = [("w", "m", "z", "nothing")[next(draw) % 4] for _ in range(next(draw) % 3)]
    coding |= {
        "codecs": names,
        "chunk_codecs": bytes(codecs),
        "chunk_lengths": encode_column(lengths),
        "pairs": pairs,
        "piece_pairs": encode_column([next(draw) % (len(pairs) + 1) for _ in range(4)]),
    }
    if not next(draw) % 8:
        whole["piece_packs"] = encode_column([next(draw) % 3 for _ in range(5)])
    index(msgspec.msgpack.encode(whole))


def header(data: bytes) -> None:
    """The header of a coded pack, with its true length."""
    try:
        pieces = stated_pieces(struct.pack("<Q", len(data)) + data, PACK, "here")
    except CheckpointError as error:
        assert "here" in str(error) or "JSON" in str(error)
        return
    for piece in pieces:
        assert piece.coding is not None
        _require_coding(piece.coding, piece.region.numel * piece.tensor.itemsize, piece.chunk_bytes)
        assert piece.coding.starts[-1] == piece.stop - piece.start


def _require_sound(decoded: Index) -> None:
    for piece in decoded.all_pieces():
        if piece.coding is not None:
            _require_coding(piece.coding, piece.bytes, piece.chunk_bytes)
    try:
        require_pairs(decoded, "here")
    except CorruptError as error:
        assert "coded against" in str(error)
        return
    for piece in decoded.all_pieces():
        if piece.coding is not None and piece.coding.pair_fqn:
            pair = piece.coding.pair
            assert pair is not None and (pair.region, 2 * pair.bytes) == (piece.region, piece.bytes)
            assert pair.coding is None or not pair.coding.pair_fqn


def _require_coding(coding: Coding, raw_bytes: int, chunk_bytes: int) -> None:
    """Refuse what a decoder could not rely on."""
    assert len(coding.numbers) == len(coding.starts) - 1 == -(-raw_bytes // chunk_bytes)
    assert max(coding.numbers, default=0) <= len(coding.codecs)
    assert bool(coding.pair_fqn) == any(map(needs_pair, coding.codecs))
    for at, (start, stop) in enumerate(pairwise(coding.starts)):
        raw = min(chunk_bytes, raw_bytes - at * chunk_bytes)
        assert stop - start == raw if not coding.numbers[at] else 1 <= stop - start < raw <= 4096 * (stop - start)


def _drawn(data: bytes) -> Iterator[int]:
    yield from data
    while True:
        yield 0


def _coding(codecs: tuple[str, ...], numbers: list[int], lengths: list[int], pair: str = "") -> Coding:
    return Coding(codecs, bytes(numbers), (0, *accumulate(lengths)), pair)


_WEIGHT = TensorSpec("w", "bfloat16", (8192,))
_MASTER = TensorSpec("m", "float32", (8192,))
_CODINGS = (
    _coding(("zstd",), [1, 0], [100, 4096]),
    _coding(("planes", "residual"), [2, 2, 1, 2], [1, 2048, 4095, 7], "w"),
)


def index_seed() -> bytes:
    """Return an index of a weight, its master, and a plain tensor."""
    builder = IndexBuilder(_CHUNK)
    for rank, start in enumerate((0, 4096)):
        region = FlatRange(start, start + 4096)
        pack = f"coded/r{rank:05d}.safetensors"
        builder.add(_WEIGHT, region, pack, 4096, bytes(32), _CODINGS[0])
        builder.add(_MASTER, region, pack, 8292, bytes(64), _CODINGS[1])
    builder.add(TensorSpec("z", "int8", (4097,)), Box((0,), (4097,)), "r00000.safetensors", 4096, bytes(32))
    return encode_index(builder.index())


def header_seed() -> bytes:
    """Return the JSON of the header of a coded pack."""
    region = FlatRange(0, 4096)
    plan = PackPlan(PACK, (PackItem(_WEIGHT, region, 0, 0), PackItem(_MASTER, region, 8192, 1)))
    return coded_header_body(plan, _CHUNK).with_pairs(["w"]).header({"step": "7"}, _CODINGS)[8:].rstrip()
