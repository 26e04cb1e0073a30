"""What an index says of coded pieces that no writer says is refused by name, in memory that the file justifies."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import Coding
from holdfast.core.format.index.columns import encode_column
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.index_checks import require_pairs
from holdfast.core.format.index.index_file import decode_index, decode_unhashed, encode_index
from holdfast.core.format.part import RankPart, decode_part, encode_part
from holdfast.errors import CheckpointError, CorruptError, InvalidError
from tests.unit.core.format.coded import ATTEMPT, CHUNK, coding_of
from tests.unit.core.format.documents import little_memory

Document = dict[str, Any]
BIG = 1 << 20
"""Chunks of the large index."""


def sample() -> bytes:
    """Return an index of a weight and its master in coded packs, and of a plain tensor."""
    builder = IndexBuilder(CHUNK)
    weight, master = TensorSpec("w", "bfloat16", (8192,)), TensorSpec("m", "float32", (8192,))
    for rank, start in enumerate((0, 4096)):
        pack, region = f"coded/r{rank:05d}.safetensors", FlatRange(start, start + 4096)
        builder.add(weight, region, pack, 4096, bytes(32), coding_of(8192, [100, 4096], ["zstd", ""]))
        coding = coding_of(16384, [1, 2048, 4095, 7], ["zstd", "residual", "planes", "residual"], "w")
        builder.add(master, region, pack, 8292, bytes(64), coding)
    builder.add(TensorSpec("z", "int8", (4097,)), Box((0,), (4097,)), "r00000.safetensors", 4096, bytes(32))
    return encode_index(builder.index())


def changed(change: Callable[[Document], object]) -> bytes:
    document = msgspec.msgpack.decode(sample())
    change(document)
    return msgspec.msgpack.encode(document)


def put(name: str, value: object) -> Callable[[Document], object]:
    return lambda document: document["coding"].update({name: value})


def number(name: str, at: int, value: int) -> Callable[[Document], object]:
    """Change one number of a column."""

    def change(document: Document) -> None:
        width, data = document["coding"][name]
        numbers = np.frombuffer(data, f"<u{width}").astype(np.uint64)
        numbers[at] = value
        document["coding"][name] = [8, numbers.tobytes()]

    return change


def codec(at: int, value: int) -> Callable[[Document], object]:
    def change(document: Document) -> None:
        codecs = bytearray(document["coding"]["chunk_codecs"])
        codecs[at] = value
        document["coding"]["chunk_codecs"] = bytes(codecs)

    return change


# Tensors are m, w, z. The 8 chunks of m come first: 1 2048 4095 7, twice; codecs are planes, residual, zstd.
IMPOSSIBLE: dict[str, Callable[[Document], object]] = {
    "no coding": lambda document: document.pop("coding"),
    "a coding of nil": lambda document: document.update(coding=None),
    "a coding of numbers": lambda document: document.update(coding=[1, 2]),
    "a coding without codecs": lambda document: document["coding"].pop("codecs"),
    "a coding without pairs": lambda document: document["coding"].pop("piece_pairs"),
    "codings of plain packs": lambda document: document.update(
        packs=[["own", f"r{n:05d}.safetensors"] for n in range(3)]
    ),
    "a plain piece in a coded pack": lambda document: document.update(piece_packs=encode_column([0, 1, 0, 1, 0])),
    "a coded piece in a plain pack": lambda document: document.update(piece_packs=encode_column([0, 1, 0, 2, 2])),
    "a codec twice": put("codecs", ["planes", "planes", "zstd"]),
    "a codec without a name": put("codecs", ["planes", "residual", ""]),
    "a codec too few": put("codecs", ["planes", "residual"]),
    "256 codecs": put("codecs", ["planes"] * 256),
    "codecs of text": put("codecs", "planes"),
    "no codec of chunks": put("chunk_codecs", b""),
    "a codec of a chunk too few": lambda document: put("chunk_codecs", document["coding"]["chunk_codecs"][:-1])(
        document
    ),
    "a codec of a chunk too many": lambda document: put("chunk_codecs", document["coding"]["chunk_codecs"] + b"\0")(
        document
    ),
    "codecs of chunks as a list": put("chunk_codecs", [3, 2, 1, 2]),
    "a codec that is not listed": codec(0, 4),
    "the last codec of a byte": codec(0, 255),
    "a coded chunk said to be raw": codec(0, 0),
    "a raw chunk said to be coded": codec(9, 3),
    "a pair for nothing": lambda document: [codec(at, 3)(document) for at in (1, 3, 5, 7)],
    "a chunk of no stored bytes": number("chunk_lengths", 0, 0),
    "a coded chunk as long as raw": number("chunk_lengths", 2, 4096),
    "a raw chunk that is shorter": number("chunk_lengths", 9, 4095),
    "a raw chunk that is longer": number("chunk_lengths", 9, 4097),
    "a chunk of exabytes": number("chunk_lengths", 2, 1 << 60),
    "a chunk whose length wraps around 32 bits": number("chunk_lengths", 2, (1 << 32) + 4095),
    "a raw chunk whose length wraps around 32 bits": number("chunk_lengths", 9, (1 << 32) + 4096),
    "a chunk whose length wraps around 63 bits": number("chunk_lengths", 2, (1 << 63) - 1),
    "a chunk beyond 63 bits": number("chunk_lengths", 2, (1 << 64) - 1),
    "lengths of width 3": put("chunk_lengths", [3, bytes(36)]),
    "no lengths": put("chunk_lengths", [1, b""]),
    "a length too many": put("chunk_lengths", encode_column([1] * 13)),
    "a pair without a name": put("pairs", [""]),
    "a pair twice": put("pairs", ["w", "w"]),
    "no pairs": put("pairs", []),
    "a pair that is not listed": number("piece_pairs", 0, 2),
    "the largest pair": number("piece_pairs", 0, (1 << 63) - 1),
    "no pair where one is needed": number("piece_pairs", 1, 0),
    "a pair of what needs none": number("piece_pairs", 2, 1),
    "pairs of too few pieces": put("piece_pairs", encode_column([1, 1, 0])),
    "pairs of all pieces": put("piece_pairs", encode_column([1, 1, 0, 0, 0])),
    "pairs of numbers": put("pairs", [7]),
}  # fmt: skip


def test_the_sample_is_sound_as_the_table_says() -> None:
    index = decode_index(sample(), "here")
    require_pairs(index, "here")
    document = msgspec.msgpack.decode(sample())["coding"]
    assert document["codecs"] == ["planes", "residual", "zstd"] and document["pairs"] == ["w"]
    assert document["chunk_codecs"] == bytes([3, 2, 1, 2] * 2 + [3, 0] * 2)
    assert np.frombuffer(document["chunk_lengths"][1], "<u2").tolist() == [1, 2048, 4095, 7] * 2 + [100, 4096] * 2


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_coding_is_corrupt(name: str) -> None:
    data = changed(IMPOSSIBLE[name])
    assert data != sample()
    with little_memory(), pytest.raises(CorruptError, match="here"):
        decode_index(data, "here")


def test_one_stored_byte_for_more_than_4096_raw_ones_is_corrupt() -> None:
    def of(stored: int) -> bytes:
        builder = IndexBuilder(3 * CHUNK)
        coding = Coding(("zstd",), b"\1", (0, stored), "")
        spec = TensorSpec("w", "int8", (3 * CHUNK,))
        builder.add(spec, Box((0,), (3 * CHUNK,)), "coded/r00000.safetensors", 4096, bytes(16), coding)
        return encode_index(builder.index())

    assert decode_index(of(3), "here").bytes_by_pack == {"coded/r00000.safetensors": 3}
    with pytest.raises(CorruptError, match="here: w"):
        decode_index(of(2), "here")


def test_a_codec_of_a_newer_version_is_not_taken_for_damage() -> None:
    data = changed(put("codecs", ["planes", "residual", "wavelets"]))
    with pytest.raises(InvalidError, match=r"here.*wavelets.*1\.5.*newer Holdfast"):
        decode_index(data, "here")
    part = msgspec.msgpack.decode(encode_part(RankPart(3, ATTEMPT, decode_index(sample(), "here"), (), None, {}, ())))
    part["index"]["coding"]["codecs"][0] = "wavelets"
    with pytest.raises(InvalidError, match="wavelets"):
        decode_part(msgspec.msgpack.encode(part), "here")


def test_an_index_of_another_systems_files_has_no_codings() -> None:
    """There a file may have the name of a coded pack by chance."""
    spec = TensorSpec("w", "int8", (4,))
    builder = IndexBuilder(CHUNK)
    builder.add(spec, Box((0,), (4,)), "coded/r00000.safetensors", 0, b"")
    data = encode_index(builder.index())
    assert decode_unhashed(data, "here").pieces.coding is None
    document = msgspec.msgpack.decode(data)
    document["coding"] = msgspec.msgpack.decode(sample())["coding"]
    with pytest.raises(CorruptError, match="codings of no piece"):
        decode_unhashed(msgspec.msgpack.encode(document), "here")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_never_another_error(data: st.DataObject) -> None:
    raw = bytearray(sample())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        index = decode_index(bytes(raw), "here")
        for piece in index.all_pieces():
            assert piece.coding is None or len(piece.coding.numbers) == len(piece.digests) // 16
        require_pairs(index, "here")
    except CheckpointError as error:
        assert isinstance(error, CorruptError | InvalidError) and "here" in str(error)


def test_memory_is_in_proportion_to_the_file() -> None:
    """An index of many chunks is its file, its columns, and a few numbers for each chunk while they are checked."""
    builder = IndexBuilder(CHUNK)
    coding = Coding(("planes",), b"\1" * BIG, tuple(range(0, 2 * BIG + 1, 2)), "")
    spec = TensorSpec("w", "bfloat16", (BIG, CHUNK // 2))
    builder.add(spec, Box.whole(spec.global_shape), "coded/r00000.safetensors", 4096, bytes(16 * BIG), coding)
    data = encode_index(builder.index())
    wrong = msgspec.msgpack.decode(data)
    wrong["coding"]["chunk_codecs"] = wrong["coding"]["chunk_codecs"][:-1] + b"\0"
    for each, is_sound in ((data, True), (msgspec.msgpack.encode(wrong), False)):
        tracemalloc.start()
        try:
            decode_index(each, "here")
        except CorruptError:
            assert not is_sound
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 4 * len(data), f"{peak} bytes for a file of {len(data)}"
