"""How much each codec gains on numbers such as training leaves behind, and when it leaves a chunk raw."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast._face.wiring import codecs
from holdfast.core.engine.casting import cast
from tests.contract.codec_suite import joined_parts

COUNT = 1 << 18


def weights() -> NDArray[np.float32]:
    return (np.random.default_rng(7).standard_normal(COUNT) * 0.02).astype(np.float32)


def stored_bytes(codec: str, numbers: NDArray[np.generic], dtype: str, pair: NDArray[np.generic] | None = None) -> int:
    """Bytes of the stored form, which gives the same numbers back; 0 for a chunk that stays raw."""
    raw = memoryview(numbers.tobytes())
    base_dtype = "" if pair is None else ("float16" if pair.dtype == np.float16 else "bfloat16")
    base = None if pair is None else memoryview(pair.tobytes())
    coder = codecs()[codec].coder(dtype, base_dtype)
    form = coder.encode(raw, base)
    if form is None:
        return 0
    back = memoryview(bytearray(len(raw)))
    coder.decode(memoryview(joined_parts(form)), base, back)
    assert back == raw
    return sum(map(len, form))


@pytest.mark.parametrize(
    ("dtype", "ratio"), [("bfloat16", 1.45), ("float16", 1.12), ("float32", 1.18), ("float64", 1.11)]
)
def test_planes_of_weights(dtype: str, ratio: float) -> None:
    numbers = cast(weights(), "float32", dtype) if dtype != "float64" else weights() * np.float64(1.1) + 1e-9 / 7
    assert 0 < stored_bytes("planes", numbers, dtype) < numbers.nbytes / ratio


def test_planes_of_numbers_without_a_sign() -> None:
    numbers = np.square(weights())
    assert stored_bytes("planes", numbers, "float32") < stored_bytes("planes", weights() * numbers, "float32")
    assert 0 < stored_bytes("planes", numbers[: COUNT - 3], "float32") < numbers.nbytes / 1.2


def test_planes_of_numbers_of_fewer_bits() -> None:
    numbers = (weights().view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert 0 < stored_bytes("planes", numbers, "float32") < numbers.nbytes / 2.8


@pytest.mark.parametrize(("base_dtype", "ratio"), [("bfloat16", 1.999), ("float16", 2.4)])
def test_masters_against_their_weights(base_dtype: str, ratio: float) -> None:
    numbers = weights()
    pair = cast(numbers, "float32", base_dtype)
    assert 0 < stored_bytes("residual", numbers, "float32", pair) < numbers.nbytes / ratio
    # Another rounding than to nearest: an exception for every other number would gain nothing.
    unrelated = pair[::-1].copy()
    assert stored_bytes("residual", numbers, "float32", unrelated) == 0


def test_masters_that_their_weights_do_not_determine() -> None:
    numbers = weights()
    bits = numbers.view(np.uint32)
    bits[::1000] = 0x3F818000  # a tie
    bits[1::1000] = 0x7F7FFFFF  # rounds to infinity
    bits[2::1000] = 0xFF812345  # a NaN with a payload
    bits[3::1000] = 0x00012345  # a subnormal
    for base_dtype in ("bfloat16", "float16"):
        pair = cast(numbers, "float32", base_dtype)
        assert 0 < stored_bytes("residual", numbers, "float32", pair) < numbers.nbytes / 1.9


def test_masters_that_were_not_trained_yet() -> None:
    pair = cast(weights(), "float32", "bfloat16")
    numbers = (pair.astype(np.uint32) << 16).view(np.float32)
    assert 0 < stored_bytes("residual", numbers, "float32", pair) < numbers.nbytes / 1000


def test_clipped_gradients() -> None:
    bf16 = (weights().view(np.uint32) & 0xFFFF0000).view(np.float32)
    clipped = bf16 * np.float32(0.37)
    assert 0 < stored_bytes("dictionary", clipped, "float32") < 1.40 * COUNT
    assert 0 < stored_bytes("dictionary", np.where(clipped < -0.04, 0, clipped), "float32") < 1.45 * COUNT
    twice = np.concatenate([clipped[: COUNT // 2], bf16[COUNT // 2 :] * np.float32(0.7)])
    assert 0 < stored_bytes("dictionary", twice, "float32") < 1.6 * COUNT
    assert stored_bytes("dictionary", weights(), "float32") == 0


def test_few_numbers_among_zeros() -> None:
    numbers = weights()
    numbers[np.random.default_rng(3).random(COUNT) > 0.01] = 0
    assert 0 < stored_bytes("sparse", numbers, "float32") < 0.06 * COUNT
    assert stored_bytes("sparse", weights(), "float32") == 0
    assert 0 < stored_bytes("sparse", numbers.astype(np.complex128), "complex128") < 0.2 * COUNT


def test_whole_numbers_and_random_bits() -> None:
    numbers = np.random.default_rng(3).integers(0, 1000, COUNT)
    assert 0 < stored_bytes("zstd", numbers, "int64") < numbers.nbytes / 3
    noise = np.frombuffer(np.random.default_rng(3).bytes(COUNT), np.uint8)
    assert stored_bytes("zstd", noise, "uint8") == 0
    assert stored_bytes("planes", noise.view(np.float32), "float32") == 0
