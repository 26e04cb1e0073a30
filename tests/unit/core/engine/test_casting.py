"""Casts and widening, held against torch over every bit pattern where there are few, and random ones where many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.base.geometry.dtype import DTYPES, PAIRS
from holdfast.core.engine.casting import CAST_TO, cast, common_type, widened
from holdfast.errors import InvalidError

NUMBERS = [each for name, each in DTYPES.items() if each.floating and not name.startswith("complex") and name != PAIRS]
NARROW = [each for each in NUMBERS if each.itemsize <= 2]
FLOATING = [each.name for each in NUMBERS]


def patterns(dtype: str) -> np.ndarray:
    """Every bit pattern of a narrow type; of a wide one random patterns, ties and edges."""
    itemsize = DTYPES[dtype].itemsize
    if itemsize <= 2:
        return np.arange(1 << 8 * itemsize).astype(f"u{itemsize}").view(DTYPES[dtype].numpy)
    chance = np.random.default_rng(5)
    bits = chance.integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    bits[: 1 << 16] = bits[: 1 << 16] & 0xFFFF0000 | 0x8000  # Halfway between two neighbours of bfloat16.
    bits[1 << 16 : 1 << 17] &= 0xFFFFE000  # Exact in float16's fraction, and halfway points of it.
    single = bits.view(np.float32)
    if dtype == "float32":
        return single
    with np.errstate(invalid="ignore"):
        return np.concatenate([single.astype(np.float64), chance.standard_normal(1 << 16)])


def as_torch(stored: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(stored.copy()).view(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", [each.name for each in NARROW])
def test_every_narrow_element_is_the_number_torch_takes_it_for(dtype: str) -> None:
    stored = patterns(dtype)
    np.testing.assert_array_equal(widened(stored, dtype), as_torch(stored, dtype).to(torch.float32).numpy())


def test_complex_halves_are_widened_in_their_shape() -> None:
    stored = torch.tensor([[1 + 2j, -0.5j], [3.0, 65504.0]], dtype=torch.complex32)
    found = widened(stored.view(torch.int32).numpy().view(np.uint32), "complex32")
    np.testing.assert_array_equal(found, stored.to(torch.complex64).numpy())


@pytest.mark.parametrize("target", CAST_TO)
@pytest.mark.parametrize("source", FLOATING)
def test_a_cast_rounds_as_torch_does(source: str, target: str) -> None:
    stored = patterns(source)
    expected = as_torch(stored, source).to(getattr(torch, target))
    found = as_torch(cast(stored, source, target), target)
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    width = getattr(torch, f"int{8 * DTYPES[target].itemsize}")
    assert torch.equal(found.view(width)[~nan], expected.view(width)[~nan])


@pytest.mark.parametrize(
    ("source", "target"), [("int32", "float32"), ("complex64", "float32"), ("float32", "int8"), (PAIRS, "float32")]
)
def test_what_is_no_floating_type_is_not_cast(source: str, target: str) -> None:
    with pytest.raises(InvalidError, match=f"cannot cast {source} to {target}"):
        cast(np.zeros(2, DTYPES[source].numpy), source, target)


@pytest.mark.parametrize("other", ["uint8", "float32", "float8_e8m0fnu"])
def test_pairs_have_no_type_in_common_with_numbers(other: str) -> None:
    assert common_type(PAIRS, other) is common_type(other, PAIRS) is None
