"""The element types, against safetensors and torch."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch

from holdfast.base.geometry.dtype import BY_SAFETENSORS, DTYPES, DType, as_safetensors, dtype_named, of_safetensors
from holdfast.errors import InvalidError


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda each: each.name)
def test_widths_agree_with_numpy_and_torch(dtype: DType) -> None:
    assert np.dtype(dtype.numpy).itemsize == dtype.itemsize
    assert getattr(torch, dtype.name).itemsize == dtype.itemsize
    of_torch = getattr(torch, dtype.name)
    assert dtype.floating == (of_torch.is_floating_point or of_torch.is_complex)


def test_names_are_unique() -> None:
    assert len(DTYPES) == 22
    assert len(BY_SAFETENSORS) == 19
    lacked = {dtype.name for dtype in DTYPES.values() if not dtype.safetensors}
    assert lacked == {"complex32", "complex128", "float4_e2m1fn_x2"}


@pytest.mark.parametrize("shape", [(2, 4), (0,), (3, 0), (1,), (5, 1, 7)])
def test_safetensors_counts_the_numbers_of_pairs_one_by_one(shape: tuple[int, ...]) -> None:
    name, counted = as_safetensors("float4_e2m1fn_x2", shape)
    assert (name, prod(counted)) == ("F4", 2 * prod(shape))
    assert of_safetensors(name, counted) == (DTYPES["float4_e2m1fn_x2"], shape)


def test_pairs_without_a_last_dimension_have_no_form_in_safetensors() -> None:
    assert as_safetensors("float4_e2m1fn_x2", ()) == ("", ())
    assert of_safetensors("F4", (4, 3)) is of_safetensors("F4", ()) is of_safetensors("F6_E2M3", (4,)) is None
    assert as_safetensors("float8_e8m0fnu", (3,)) == ("F8_E8M0", (3,))
    assert of_safetensors("F8_E8M0", ()) == (DTYPES["float8_e8m0fnu"], ())


def test_an_unknown_dtype_is_refused_by_name() -> None:
    assert dtype_named("float32", "w") is DTYPES["float32"]
    with pytest.raises(InvalidError, match="w: dtype bits8 cannot"):
        dtype_named("bits8", "w")
