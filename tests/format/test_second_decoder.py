"""What Holdfast stores is decoded by the second decoder, which was written from the page alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._face.wiring import codecs
from tests.contract.codec_suite import joined_parts
from tests.format import second_decoder

CODECS = codecs()
TYPES = {
    "planes": ["float16", "bfloat16", "float32", "float64"],
    "residual": ["float32"],
    "dictionary": ["float32"],
    "sparse": ["int8", "bfloat16", "float32", "complex128"],
    "zstd": ["uint8", "int64", "float8_e5m2"],
}


def numbers(kind: str, count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return numbers as training has them, or any bits."""
    chance = np.random.default_rng(seed)
    normal = (0.02 * chance.standard_normal(count)).astype(np.float32)
    if kind == "bits":
        return chance.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    if kind == "positive":
        return np.square(normal)
    if kind == "few":
        return (chance.integers(-90, 90, count) * np.float32(0.003)).astype(np.float32)
    if kind == "sparse":
        return np.where(chance.random(count) < 0.05, normal, np.float32(0))
    if kind == "odd":
        return np.where(chance.random(count) < 0.1, np.float32(np.nan), normal * np.float32(10.0**-38))
    return normal if kind == "normal" else np.zeros(count, np.float32)


def raw_bytes_of(kind: str, dtype: str, count: int, seed: int) -> bytes:
    values = numbers(kind, count, seed)
    itemsize = second_decoder.ITEMSIZE[dtype]
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if dtype in ("float16", "float32", "float64"):
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(dtype).tobytes()
    whole = np.repeat(values.view(np.uint8), 4)[: count * itemsize].tobytes()
    return whole.ljust(count * itemsize, b"\0")


def base_of(raw: bytes, dtype: str) -> bytes:
    """Return the cast of float32 to 16 bits, rounded to nearest."""
    values = np.frombuffer(raw, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([(codec, dtype) for codec, dtypes in TYPES.items() for dtype in dtypes]),
    st.sampled_from(["normal", "positive", "few", "sparse", "odd", "bits", "zeros"]),
    st.integers(1, 6000),
    st.integers(0, 1 << 30),
    st.sampled_from(["bfloat16", "float16"]),
)
def test_every_codec_is_decoded(case: tuple[str, str], kind: str, count: int, seed: int, base_dtype: str) -> None:
    codec, dtype = case
    raw = raw_bytes_of(kind, dtype, count, seed)
    base = base_of(raw, base_dtype) if codec == "residual" else None
    base_dtype = base_dtype if base is not None else ""
    coder = CODECS[codec].coder(dtype, base_dtype)
    parts = coder.encode(memoryview(raw), None if base is None else memoryview(base))
    if parts is None:
        return
    assert second_decoder.decoded(codec, joined_parts(parts), len(raw), dtype, base, base_dtype) == raw


@pytest.mark.parametrize("codec", TYPES)
def test_no_codec_is_left_out_by_chance(codec: str) -> None:
    """The property above says nothing about a codec that never gains."""
    kind = {"planes": "positive", "residual": "odd", "dictionary": "few", "sparse": "sparse", "zstd": "zeros"}[codec]
    for dtype in TYPES[codec]:
        raw = raw_bytes_of(kind, dtype, 4096, 3)
        base = base_of(raw, "bfloat16") if codec == "residual" else None
        coder = CODECS[codec].coder(dtype, "bfloat16" if base is not None else "")
        parts = coder.encode(memoryview(raw), None if base is None else memoryview(base))
        assert parts is not None, dtype
        assert second_decoder.decoded(codec, joined_parts(parts), len(raw), dtype, base, "bfloat16") == raw


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(0, (1 << 64) - 1) | st.binary(max_size=300) | st.text(max_size=300),
        lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner, max_size=20),
        max_leaves=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_its_msgpack_is_that_of_others(value: object) -> None:
    assert second_decoder.unpacked(msgspec.msgpack.encode(value)) == value


def test_it_needs_numpy_and_zstd_only() -> None:
    code = (
        "import sys\n"
        "sys.modules['holdfast'] = sys.modules['torch'] = sys.modules['msgspec'] = sys.modules['xxhash'] = None\n"
        "import runpy\n"
        f"runpy.run_path({str(Path(second_decoder.__file__))!r}, run_name='second_decoder')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
