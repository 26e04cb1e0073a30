"""The element types, against safetensors and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.errors import InvalidError
from holdfast.geometry.dtype import BY_SAFETENSORS, DTYPES, DType, dtype_named


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda each: each.name)
def test_widths_agree_with_numpy_and_torch(dtype: DType) -> None:
    assert np.dtype(dtype.numpy).itemsize == dtype.itemsize
    assert getattr(torch, dtype.name).itemsize == dtype.itemsize
    of_torch = getattr(torch, dtype.name)
    assert dtype.floating == (of_torch.is_floating_point or of_torch.is_complex)


def test_names_are_unique() -> None:
    assert len(DTYPES) == 20
    assert len(BY_SAFETENSORS) == 18
    assert {dtype.name for dtype in DTYPES.values() if not dtype.safetensors} == {"complex32", "complex128"}


def test_an_unknown_dtype_is_refused_by_name() -> None:
    assert dtype_named("float32", "w") is DTYPES["float32"]
    with pytest.raises(InvalidError, match="w: dtype float8_e8m0fnu"):
        dtype_named("float8_e8m0fnu", "w")
