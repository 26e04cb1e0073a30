"""Sums find a changed element, and are the same on every layout."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.backends.torch.local_shards import LocalPart
from holdfast.backends.torch.redo.sums import SLICES, slices_of, sum_of
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region

SHAPE = (37, 11, 53)
MASK = (1 << 64) - 1


def part(tensor: torch.Tensor, region: Region) -> LocalPart:
    if isinstance(region, FlatRange):
        return LocalPart(region, tensor.flatten()[region.start : region.stop])
    return LocalPart(region, tensor[tuple(map(slice, region.start, region.stop))])


def by_definition(tensor: torch.Tensor) -> int:
    """Return the sum, word by word, in Python's numbers."""

    def mixed(number: int) -> int:
        mixed = (number + 1) * 0x9E3779B97F4A7C15 & MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
        return mixed ^ mixed >> 31

    width = min(tensor.itemsize, 4)
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]
    terms = (
        word * (mixed(number // 4096 + 4096) | 1) * (mixed(number % 4096) >> 32 | 1)
        for number, word in enumerate(words)
    )
    return sum(terms) & MASK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex128])
def test_sums_over_pieces_add_up_to_that_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.randn(SHAPE, dtype=torch.float64).mul(50).to(dtype)
    whole = sum_of([part(tensor, Box.whole(SHAPE))], SHAPE)
    assert whole == by_definition(tensor)
    numel = math.prod(SHAPE)
    for regions in (
        [Box((0, 0, 0), (9, 11, 53)), Box((9, 0, 0), (37, 11, 53))],
        [Box((0, 0, 0), (37, 4, 53)), Box((0, 4, 0), (37, 11, 53))],
        [Box((0, 0, 0), (37, 11, 20)), Box((0, 0, 20), (37, 11, 53))],
        [FlatRange(0, 5000), FlatRange(5000, 5001), FlatRange(5001, numel)],
    ):
        assert sum(sum_of([part(tensor, region)], SHAPE) for region in regions) & MASK == whole
    assert sum_of([part(tensor.transpose(0, 1).contiguous().transpose(0, 1), Box.whole(SHAPE))], SHAPE) == whole


def test_a_flipped_bit_differs() -> None:
    tensor = torch.randn(SHAPE)
    before = sum_of([part(tensor, Box.whole(SHAPE))], SHAPE)
    for bit in range(0, 32, 5):
        tensor.view(torch.int32)[20, 3, 7] ^= 1 << bit
        assert sum_of([part(tensor, Box.whole(SHAPE))], SHAPE) != before
        tensor.view(torch.int32)[20, 3, 7] ^= 1 << bit
    assert sum_of([part(tensor, Box.whole(SHAPE))], SHAPE) == before


def test_each_name_is_due_once_in_slices_of_nearly_equal_bytes() -> None:
    sizes = {f"layer.{number:03}": 100 + number % 7 for number in range(1000)}
    slices = slices_of(sizes)
    assert len(slices) == SLICES
    assert sorted(name for each in slices for name in each) == sorted(sizes)
    loads = [sum(sizes[name] for name in each) for each in slices]
    assert max(loads) < 1.2 * min(loads)
    assert sorted(name for each in slices_of({"a": 0, "b": 4, "c": 8}) for name in each) == ["a", "b", "c"]
