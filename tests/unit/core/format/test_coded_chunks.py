"""One stored chunk becomes its raw bytes: bounds first, half a chunk of the pair if needed, errors that say where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from holdfast.backends.codecs.planes import PlanesCodec
from holdfast.backends.codecs.residual import ResidualCodec
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.codec import Codec
from holdfast.base.types.plan import Coding, Piece
from holdfast.core.format.coded_chunks import base_number, decode_chunk
from holdfast.errors import CorruptError, InvalidError
from tests.contract.codec_suite import joined_parts
from tests.unit.core.format.coded import CHUNK, coding_of

CODECS: Mapping[str, Codec] = {"planes": PlanesCodec(), "residual": ResidualCodec()}
WEIGHT = TensorSpec("w", "bfloat16", (5000,))
MASTER = TensorSpec("m", "float32", (5000,))
RAW = np.random.default_rng(7).standard_normal(5000, dtype=np.float32)
BF16 = ((RAW.view(np.uint32) + 0x7FFF + (RAW.view(np.uint32) >> 16 & 1)) >> 16).astype(np.uint16)


def chunks(data: bytes) -> list[bytes]:
    return [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]


def coded() -> tuple[Piece, list[bytes], list[bytes]]:
    """Return a master with its pair, its stored chunks, and the raw chunks of the pair."""
    pair_chunks = chunks(BF16.tobytes())
    pair = Piece(WEIGHT, Box((0,), (5000,)), "r00000.safetensors", 4096, bytes(48), CHUNK)
    stored, codecs = [], []
    for number, raw in enumerate(chunks(RAW.tobytes())):
        if number == 1:
            coder, base, codec = CODECS["planes"].coder("float32"), None, "planes"
        else:
            coder, codec = CODECS["residual"].coder("float32", "bfloat16"), "residual"
            base = memoryview(BF16.tobytes())[number * CHUNK // 2 :][: len(raw) // 2]
        parts = coder.encode(memoryview(raw), base)
        assert parts is not None
        stored.append(joined_parts(parts))
        codecs.append(codec)
    stored[2], codecs[2] = chunks(RAW.tobytes())[2], ""
    coding = coding_of(20000, [len(each) for each in stored], codecs, "w")
    master = Piece(MASTER, pair.region, "coded/r00000.safetensors", 8192, bytes(80), CHUNK, replace(coding, pair=pair))
    return master, stored, pair_chunks


def decoded(piece: Piece, number: int, stored: bytes, pair_chunks: Sequence[bytes]) -> bytes:
    raw = memoryview(bytearray(len(chunks(RAW.tobytes())[number])))
    at = base_number(piece, number)
    base = None if at is None else memoryview(pair_chunks[at])
    decode_chunk(piece, number, memoryview(stored), base, raw, CODECS, "here/coded/r00000.safetensors")
    return bytes(raw)


def test_every_chunk_comes_back_with_its_half_of_the_pair() -> None:
    piece, stored, pair_chunks = coded()
    assert [base_number(piece, number) for number in range(5)] == [0, None, None, 1, 2]
    for number, raw in enumerate(chunks(RAW.tobytes())):
        assert decoded(piece, number, stored[number], pair_chunks) == raw, number


def test_an_error_names_tensor_chunk_and_range() -> None:
    piece, stored, pair_chunks = coded()
    start, stop = piece.stored_range(1)
    with pytest.raises(
        CorruptError, match=rf"here/coded/r00000.safetensors: m, chunk 1 at bytes {start}–{stop}: .*planes"
    ):
        decoded(piece, 1, bytes(len(stored[1])), pair_chunks)


def test_what_no_writer_stores_is_refused_before_it_is_decoded() -> None:
    piece, stored, pair_chunks = coded()
    for wrong in (stored[1][:-1], stored[1] + b"\0", b""):
        with pytest.raises(CorruptError, match="m, chunk 1"):
            decoded(piece, 1, wrong, pair_chunks)
    with pytest.raises(CorruptError, match="raw ones"):
        decode_chunk(piece, 2, memoryview(stored[2]), None, memoryview(bytearray(1)), CODECS, "here")
    with pytest.raises(CorruptError, match="needs bytes 0–2048"):
        decoded(piece, 0, stored[0], [each[:2047] for each in pair_chunks])
    assert piece.coding is not None and piece.coding.pair is not None
    lonely = replace(piece, coding=replace(piece.coding, pair=None))
    with pytest.raises(CorruptError, match="without the chunk of its pair"):
        decoded(lonely, 0, stored[0], pair_chunks)
    with pytest.raises(CorruptError, match="without the chunk of its pair"):
        decode_chunk(piece, 0, memoryview(stored[0]), None, memoryview(bytearray(CHUNK)), CODECS, "here")
    unlike = replace(piece.coding.pair, tensor=replace(WEIGHT, dtype="int16"))
    with pytest.raises(CorruptError, match="takes no float32"):
        decoded(replace(piece, coding=replace(piece.coding, pair=unlike)), 0, stored[0], pair_chunks)
    integers = replace(piece, tensor=replace(MASTER, dtype="int32"))
    with pytest.raises(CorruptError, match="takes no int32"):
        decoded(integers, 1, stored[1], pair_chunks)


def test_too_few_stored_bytes_are_refused() -> None:
    spec = TensorSpec("w", "int8", (CHUNK * 3,))
    for stored, refused in ((2, True), (3, False)):
        piece = Piece(spec, Box((0,), (CHUNK * 3,)), "coded/r0", 0, bytes(16), CHUNK * 3,
                      Coding(("planes",), b"\1", (0, stored), ""))  # fmt: skip
        with pytest.raises(CorruptError, match="at least one for 4096" if refused else "takes no int8"):
            raw = memoryview(bytearray(CHUNK * 3))
            decode_chunk(piece, 0, memoryview(bytes(stored)), None, raw, CODECS, "here")


def test_a_codec_of_a_newer_version_is_not_taken_for_damage() -> None:
    piece, stored, pair_chunks = coded()
    assert piece.coding is not None
    newer = replace(piece, coding=replace(piece.coding, codecs=("wavelets", "residual")))
    with pytest.raises(InvalidError, match=r"wavelets.*1\.5"):
        decoded(newer, 1, stored[1], pair_chunks)


@pytest.mark.parametrize("stored", [0, 1, CHUNK - 1])
def test_a_raw_chunk_of_another_length_is_refused(stored: int) -> None:
    spec = TensorSpec("w", "int8", (CHUNK,))
    piece = Piece(spec, Box((0,), (CHUNK,)), "coded/r0", 0, bytes(16), CHUNK, Coding((), b"\0", (0, stored), ""))
    raw = memoryview(bytearray(CHUNK))
    with pytest.raises(CorruptError, match=f"w, chunk 0 at .*: {stored} bytes of a raw chunk; expected {CHUNK}"):
        decode_chunk(piece, 0, memoryview(b"1" * stored), None, raw, CODECS, "here")
    assert not any(raw)
