"""The shipped codec suite on every codec, and any bits through each."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._face.wiring import codecs
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.codec import Codec
from tests.contract.codec_suite import Chunk, CodecSuite, rounded


class _Named(CodecSuite):
    name: ClassVar[str]

    @pytest.fixture
    def codec(self) -> Codec:
        return codecs()[self.name]


class TestPlanes(_Named):
    name = "planes"


class TestResidual(_Named):
    name = "residual"


class TestDictionary(_Named):
    name = "dictionary"


class TestSparse(_Named):
    name = "sparse"


class TestZstd(_Named):
    name = "zstd"


def test_each_codec_has_one_name() -> None:
    assert list(codecs()) == [codec.name for codec in codecs().values()]
    assert set(codecs()) == {cls.name for cls in _Named.__subclasses__()}


_BITS = {
    1: [0, 1, 0x38, 0x7F, 0x80, 0xFF],
    2: [0, 1, 0x3C00, 0x3F80, 0x7C00, 0x7C01, 0x7F80, 0x7F81, 0x7FFF, 0x8000, 0x8001, 0xFC00, 0xFF80, 0xFFFF],
    4: [
        0, 1, 0x007FFFFF, 0x00800000, 0x33000001, 0x38800000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F801000,
        0x477FE000, 0x477FF000, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x80000000,
        0x80000001, 0xBF808000, 0xFF800000, 0xFF800001, 0xFFFFFFFF,
    ],
    8: [0, 1, 0x3FF0000000000000, 0x7FF0000000000000, 0x7FF0000000000001, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF],
}  # fmt: skip
"""Bits on the edges: zeros, subnormals, ties, overflow, infinities, NaNs with payloads."""


@st.composite
def chunks(draw: st.DrawFn) -> tuple[Codec, Chunk]:
    """A codec, and a chunk of some elements at the edges in a run that it shortens, or any bits."""
    codec = codecs()[draw(st.sampled_from(sorted(codecs())))]
    dtype, base_dtype = draw(st.sampled_from(CodecSuite.types_of(codec)))
    width = min(DTYPES[dtype].itemsize, 8)
    elements = st.sampled_from(_BITS[width]) | st.integers(0, (1 << 8 * width) - 1)
    few = np.array(draw(st.lists(elements, min_size=1, max_size=12)), f"u{width}")
    count = draw(st.sampled_from([1, 2, 63, 1024, 1025, 4099])) * (DTYPES[dtype].itemsize // width)
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    drawn = np.where(generator.random(count) < share, generator.choice(few, count), few[0]).astype(few.dtype)
    raw = drawn.tobytes()
    if not base_dtype:
        return codec, Chunk("drawn", dtype, "", raw, None)
    is_pair = draw(st.booleans())
    return codec, Chunk("drawn", dtype, base_dtype, raw, rounded(raw, base_dtype) if is_pair else raw[: len(raw) // 2])


@settings(max_examples=150, deadline=None)
@given(chunks())
def test_any_bits_come_back_from_any_codec(drawn: tuple[Codec, Chunk]) -> None:
    codec, chunk = drawn
    coder = codec.coder(chunk.dtype, chunk.base_dtype)
    form = chunk.encoded(coder)
    if form is not None:
        assert len(form) < len(chunk.raw) <= 4096 * len(form)
        assert chunk.decoded(coder, form) == chunk.raw
