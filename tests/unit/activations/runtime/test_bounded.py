"""Bounded packs: no element is off by more than the bound, and none is clipped without a word."""

from __future__ import annotations

import os

import pytest
import torch

from holdfast.activations.runtime.bounded import pack_codes
from holdfast.activations.runtime.dense import PackedTensor
from tests.unit.activations.runtime.hostile_tensors import bytes_of, hostile_tensor

BOUNDS = {8: (0.02, 0.001, 1.0), 4: (0.25, 0.02, 1.0)}

HOSTILE = int(os.environ.get("HOSTILE_TENSORS", 10_000))
"""Tensors of the long test."""


def worst_of(tensor: torch.Tensor, packed: PackedTensor, error_bound: float) -> float:
    """Return the largest error of an element, as a share of the bound, by a reference in float64.

    Elements that are not finite have their bits, and the tensor has its layout.
    """
    restored = packed.unpack()
    assert (restored.shape, restored.stride()) == (tensor.shape, tensor.stride())
    assert (restored.dtype, restored.device) == (tensor.dtype, tensor.device)
    is_finite = tensor.isfinite()
    assert bytes_of(restored[~is_finite]) == bytes_of(tensor[~is_finite])
    wanted, found = tensor[is_finite].double(), restored[is_finite].double()
    if not len(wanted):
        return 0.0
    scale = float(wanted.abs().max()) or 1.0
    limit = error_bound * scale * float((wanted / scale).square().mean().sqrt())
    error = float((found - wanted).abs().max())
    assert error <= limit
    return error / limit if limit else 0.0


def check_bounded(seeds: range) -> None:
    worst, packs, overflows = 0.0, 0, 0
    for seed in seeds:
        name, tensor = hostile_tensor(seed)
        for bits, bounds in BOUNDS.items():
            bound = bounds[seed % 3]
            packed = pack_codes(tensor, bits, error_bound=bound)
            assert packed is not None, name
            share = worst_of(tensor, packed, bound)
            assert share < 1, f"{name}, q{bits}, bound {bound}"
            worst, packs = max(worst, share), packs + 1
            if seed % 4 == 0:
                # Room for one outlier less.
                room = packed.device_bytes - (4 + tensor.element_size()) * (len(packed.parts[2]) > 0)
                is_full = pack_codes(tensor, bits, error_bound=bound, device_bytes_max=room) is None
                assert is_full == (len(packed.parts[2]) > 0), name
                overflows += is_full
    print(f"worst error ÷ bound {worst:.5f} of {packs} packs; {overflows} overflows")
    assert 0.99 < worst < 1
    assert overflows > packs / 40


def test_no_element_of_a_hostile_tensor_misses_the_bound() -> None:
    check_bounded(range(1_000))


@pytest.mark.long
def test_no_element_of_many_hostile_tensors_misses_the_bound() -> None:
    check_bounded(range(1_000, 1_000 + HOSTILE))


def with_outlier_channels(rows: int = 1_000) -> torch.Tensor:
    """Return activations of width 1,024; some channels are 20 times as large as the rest."""
    values = torch.randn(rows, 1_024, generator=torch.Generator().manual_seed(3))
    values[:, ::341] *= 20
    return values


@pytest.mark.parametrize(("bits", "bound", "ratio"), [(8, 0.02, 3.5), (4, 0.25, 6.5)])
def test_outlier_channels_cost_little(bits: int, bound: float, ratio: float) -> None:
    tensor = with_outlier_channels()
    packed = pack_codes(tensor, bits, error_bound=bound)
    assert packed is not None
    share = worst_of(tensor, packed, bound)
    found = tensor.nbytes / packed.device_bytes
    outliers = len(packed.parts[2]) / tensor.numel()
    print(f"q{bits}: {found:.2f} times smaller, {outliers:.3%} outliers, worst error ÷ bound {share:.5f}")
    assert found >= ratio
    assert len(packed.parts[2]) > 0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_large_tensor_of_several_blocks_keeps_the_bound(bits: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(1_200_001, generator=torch.Generator().manual_seed(bits)).to(dtype)
    tensor[1_200_000] = torch.nan
    tensor[600_000] = -torch.inf
    tensor[-300:-200] *= 50
    bound = BOUNDS[bits][0]
    packed = pack_codes(tensor, bits, error_bound=bound)
    assert packed is not None
    assert worst_of(tensor, packed, bound) < 1
    assert len(packed.parts[2]) < 0.01 * tensor.numel()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_of_the_whole_tensor_is_bounded_too(bits: int) -> None:
    tensor, bound = with_outlier_channels(100), BOUNDS[bits][0]
    packed = pack_codes(tensor, bits, error_bound=bound)
    assert packed is not None
    assert (packed.unpack() - tensor).norm() <= bound * tensor.norm()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_one_value_that_is_not_finite_spoils_no_neighbour(bits: int, value: float) -> None:
    tensor = torch.randn(1_024, generator=torch.Generator().manual_seed(5))
    tensor[300] = value
    packed = pack_codes(tensor, bits, error_bound=1.0)
    assert packed is not None
    assert 300 in packed.parts[2].tolist()
    assert len(packed.parts[2]) <= 2
    assert worst_of(tensor, packed, 1.0) < 1


def test_a_tensor_with_more_outliers_than_the_plan_saw_overflows() -> None:
    tensor = with_outlier_channels(64)
    packed = pack_codes(tensor, 8, error_bound=0.02)
    assert packed is not None
    reserved = packed.reserved_bytes
    assert reserved - packed.device_bytes == 8 * (len(packed.parts[2]) // 2 + 64)
    assert pack_codes(tensor, 8, error_bound=0.02, device_bytes_max=reserved) is not None
    tensor.view(-1)[: len(packed.parts[2]) + 65] = torch.nan
    assert pack_codes(tensor, 8, error_bound=0.02, device_bytes_max=reserved) is None
    assert pack_codes(torch.zeros(1_000), 8, error_bound=0.02, device_bytes_max=1_000) is None


def test_the_default_type_changes_no_pack() -> None:
    tensor = with_outlier_channels(16)
    torch.set_default_dtype(torch.float64)
    try:
        packed = pack_codes(tensor, 8, error_bound=0.02)
    finally:
        torch.set_default_dtype(torch.float32)
    assert packed is not None
    assert worst_of(tensor, packed, 0.02) < 1


def test_a_pack_is_a_pure_function_and_does_not_draw() -> None:
    tensor = with_outlier_channels(64)
    state = torch.get_rng_state()
    one, other = (pack_codes(tensor, 4, error_bound=0.25) for _ in range(2))
    assert one is not None
    assert other is not None
    assert all(map(torch.equal, one.parts, other.parts))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64], ids=str)
def test_other_types_are_not_coded(dtype: torch.dtype) -> None:
    assert pack_codes(torch.ones(1_000).to(dtype), 8, error_bound=0.02) is None
