"""The element types, against safetensors and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.errors import InvalidError
from holdfast.spec.dtype import BY_SAFETENSORS, DTYPES, DType, dtype_named


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda each: each.name)
def test_widths_agree_with_numpy_and_torch(dtype: DType) -> None:
    assert np.dtype(dtype.numpy).itemsize == dtype.itemsize
    assert getattr(torch, dtype.name).itemsize == dtype.itemsize
    of_torch = getattr(torch, dtype.name)
    assert dtype.floating == (of_torch.is_floating_point or of_torch.is_complex)


def test_names_are_unique() -> None:
    assert len(BY_SAFETENSORS) == len(DTYPES) == 18


def test_an_unknown_dtype_is_refused_by_name() -> None:
    assert dtype_named("float32", "w") is DTYPES["float32"]
    with pytest.raises(InvalidError, match="w: dtype complex128"):
        dtype_named("complex128", "w")
