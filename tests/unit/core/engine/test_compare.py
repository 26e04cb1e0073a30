"""Measures of two tensors, against the same reckoned the plain way, and the numbers that break plain ways."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.types.diff import Change
from holdfast.core.engine import compare as comparing
from holdfast.core.engine.casting import cast, common_type, widened
from holdfast.core.engine.compare import Measure, disagreement
from holdfast.core.engine.target import HostTarget


def held(stored: Any, dtype: str) -> HostTarget:
    array = np.asarray(stored, DTYPES[dtype].numpy)
    target = HostTarget(dtype, Box.whole(array.shape))
    target.array[...] = array
    return target


def measured(a: Any, b: Any, dtype: str, other: str = "") -> Change:
    common = common_type(dtype, other) if other else ""
    assert common is not None
    measure = Measure()
    measure.add([held(a, dtype)], [held(b, other or dtype)], common)
    return measure.change()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_measured_as_torch_would(dtype: str) -> None:
    chance = np.random.default_rng(3)
    count, itemsize = 3 * comparing.BLOCK_ELEMENTS // 2, DTYPES[dtype].itemsize
    raw = chance.integers(0, 256, (2, count * itemsize), dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    a, b = (each.view(DTYPES[dtype].numpy) for each in raw.copy())
    b[: count // 2] = a[: count // 2]
    found = measured(a, b, dtype)
    x, y = (torch.from_numpy(widened(each, dtype).copy()) for each in (a, b))
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    bits = (a.view(np.uint8) != b.view(np.uint8)).reshape(count, -1).any(axis=1)
    assert found.changed == bits.sum()
    x, y = x.to(wide), y.to(wide)
    finite = torch.isfinite(x) & torch.isfinite(y)
    assert found.unmeasured == int((torch.from_numpy(bits) & ~finite).sum())
    for number, each in enumerate((x, y)):
        assert found.nan[number] == int(each.isnan().sum())
        assert found.inf[number] == int((~each.isnan() & ~torch.isfinite(each)).sum())
        if itemsize < 8 or not DTYPES[dtype].floating:
            norm = torch.linalg.vector_norm(each[torch.isfinite(each)]).item()
            assert (found.norm_a, found.norm_b)[number] == pytest.approx(norm, rel=1e-12)
    assert found.max_absolute == pytest.approx((x - y).abs()[finite].max().item(), rel=1e-12)
    x, y = x[finite] / 4, y[finite] / 4  # The largest numbers of 64 bits lie further apart than the largest of them.
    distance, larger = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    assert found.max_relative == pytest.approx((distance / larger)[larger > 0].max().item(), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=40), st.integers(0, 40))
def test_a_measure_of_parts_is_that_of_the_whole(pairs: list[tuple[float, float]], cut: int) -> None:
    a, b = (np.array(each, np.float32) for each in zip(*pairs, strict=True))
    whole, first, second = measured(a, b, "float32"), Measure(), Measure()
    first.add([held(a[:cut], "float32")], [held(b[:cut], "float32")], "")
    second.add([held(a[cut:], "float32")], [held(b[cut:], "float32")], "")
    first.merge(second)
    found = first.change()
    for name in ("changed", "unmeasured", "max_absolute", "max_relative", "nan", "inf"):
        assert getattr(found, name) == getattr(whole, name)
    for name in ("norm_a", "norm_b", "norm_difference"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_whole_numbers_are_subtracted_exactly() -> None:
    found = measured([-(2**63), 5], [2**63 - 1, 5], "int64")
    assert found.max_absolute == 2**64 - 1
    assert found.changed == 1
    assert measured([2**64 - 1], [2**64 - 3], "uint64").max_absolute == 2
    assert measured([True, False], [False, False], "bool") == measured([1, 0], [0, 0], "uint8")


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_norms_neither_overflow_nor_vanish(scale: float) -> None:
    found = measured(np.array([3.0, 0.0]) * scale, np.array([0.0, 4.0]) * scale, "float64")
    assert found.norm_a == pytest.approx(3 * scale, rel=1e-15)
    assert found.norm_difference == pytest.approx(5 * scale, rel=1e-15)


def test_norms_of_parts_of_far_magnitudes_add_up() -> None:
    whole = Measure()
    for scale in (1e-250, 1e250, 1.0, 1e250):
        part = Measure()
        part.add([held([scale], "float64")], [held([0.0], "float64")], "")
        whole.merge(part)
    assert whole.change().norm_a == pytest.approx(math.sqrt(2) * 1e250)
    assert measured([1.7e308, 1.7e308], [0.0, 0.0], "float64").norm_a == math.inf


def test_what_is_no_number_is_counted_and_left_out() -> None:
    nan, inf = math.nan, math.inf
    found = measured([nan, nan, inf, inf, -inf, 1.0], [nan, 2.0, inf, 3.0, inf, 1.5], "float32")
    assert (found.changed, found.unmeasured) == (4, 3)
    assert (found.nan, found.inf) == ((2, 1), (3, 2))
    assert found.max_absolute == found.norm_difference == 0.5
    assert found.norm_a == 1.0


def test_zeros_and_nans_of_different_types_are_compared_by_value() -> None:
    found = measured([0.0, -0.0, math.nan, 1.0], [0x8000, 0x0000, 0xFFC1, 0x4000], "float32", "bfloat16")
    assert found.changed == 1
    assert measured([0, 1], [-0.0, 1.0], "int32", "float64").changed == 0


def test_a_zero_that_changed_its_sign_is_changed_by_nothing() -> None:
    found = measured([0.0, -0.0], [-0.0, -0.0], "float32")
    assert (found.changed, found.max_absolute, found.max_relative) == (1, 0, 0)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16", "float8_e4m3fn"])
def test_types_that_differ_are_compared_by_value(narrow: str) -> None:
    wide = np.linspace(-3, 3, 1001, dtype=np.float32)
    stored = torch.from_numpy(wide).to(getattr(torch, narrow))
    raw = stored.view(torch.uint8).numpy().view(DTYPES[narrow].numpy)
    exact = stored.to(torch.float32).numpy()
    assert measured(exact, raw, "float32", narrow).changed == 0
    found = measured(wide, raw, "float32", narrow)
    assert found.max_absolute == np.abs(wide.astype(np.float64) - exact).max()
    assert found.changed == (wide != exact).sum()


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ("bfloat16", "float64", "float64"),
        ("int32", "float32", "float64"),
        ("bool", "uint8", "uint8"),
        ("int64", "uint32", "int64"),
        ("int64", "uint64", None),
        ("int64", "float64", None),
        ("complex32", "float8_e5m2", "complex128"),
    ],
)
def test_the_type_that_holds_both_exactly(a: str, b: str, common: str | None) -> None:
    assert common_type(a, b) == common_type(b, a) == common


def test_a_disagreement_says_where_and_what() -> None:
    parts = [np.arange(6, dtype=np.int16).reshape(2, 3), np.arange(6, 10, dtype=np.int16)]
    other = [each.copy() for each in parts]
    other[0][1, 1] = -1
    other[1][2] = -2
    found = disagreement([held(each, "int16") for each in parts], [held(each, "int16") for each in other])
    assert found is not None
    assert (found.count, found.first, found.last, found.expected, found.found) == (2, 4, 8, "0400", "ffff")
    assert disagreement([held(parts[0], "int16")], [held(parts[0], "int16")]) is None


def test_a_cast_is_held_against_what_it_ought_to_be_in_every_bit_but_of_nan() -> None:
    master = np.array([1.00390625, math.nan, 3.0], np.float32)
    low = cast(master, "float32", "bfloat16")
    low[1] = 0xFFC1
    assert disagreement([held(master, "float32")], [held(low, "bfloat16")], cast_from="float32") is None
    low[0] += 1
    found = disagreement([held(master, "float32")], [held(low, "bfloat16")], cast_from="float32")
    assert found is not None
    assert (found.count, found.first) == (1, 0)
