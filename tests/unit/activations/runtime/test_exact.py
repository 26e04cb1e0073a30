"""Exact packs return every bit, size and stride, or None."""

from __future__ import annotations

import pytest
import torch

from holdfast.activations.runtime.exact import pack_bits, pack_narrow, pack_pieces
from holdfast.activations.runtime.packings import EXACT_ACTIONS, pack, packings_of
from tests.unit.activations.runtime.hostile_tensors import hostile_tensor, same

ANY = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64, torch.complex64, torch.float8_e4m3fn)


def check_exact(seeds: range) -> None:
    packed_by = dict.fromkeys(EXACT_ACTIONS, 0)
    for seed in seeds:
        name, tensor = hostile_tensor(seed, torch.float64 if seed % 7 == 0 else None)
        for action in EXACT_ACTIONS:
            packed = pack(tensor, action)
            if packed is not None:
                packed_by[action] += 1
                assert same(packed.unpack(), tensor), (name, action)
                assert same(packed.unpack(), tensor), f"{name} {action}: the second time"
                assert packed.device_bytes <= packed.reserved_bytes
    print(f"packed exactly, of {len(seeds)}: {packed_by}")
    assert min(packed_by.values()) > len(seeds) / 20


def test_hostile_tensors_return_bit_for_bit() -> None:
    check_exact(range(1_000))


@pytest.mark.long
def test_many_hostile_tensors_return_bit_for_bit() -> None:
    check_exact(range(1_000, 11_000))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 255, 256, 257, 600_001])
@pytest.mark.parametrize("dtype", [*ANY, torch.float32, torch.bfloat16], ids=str)
def test_two_values_take_a_bit_an_element(count: int, dtype: torch.dtype) -> None:
    mask = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.1
    # The first element of the large tensor that differs is in the last block.
    mask[: count - 9 if count > 1_000 else 0] = True
    tensor = mask.to(dtype)
    packed = pack_bits(tensor)
    assert packed is not None
    assert same(packed.unpack(), tensor)
    assert packed.device_bytes == -(-count // 8) + 2 * tensor.element_size()


@pytest.mark.parametrize("values", [(0.0, -0.0), (float("nan"), 0.0), (float("inf"), float("-inf")), (1e-42, 3e38)])
def test_two_values_are_told_apart_by_their_bits(values: tuple[float, float]) -> None:
    tensor = torch.tensor(values).repeat(100)
    packed = pack_bits(tensor)
    assert packed is not None
    assert same(packed.unpack(), tensor)


@pytest.mark.parametrize("place", [1, 17, 599_999])
def test_a_third_value_anywhere_overflows(place: int) -> None:
    tensor = torch.zeros(600_000)
    tensor[::2] = 1
    tensor[place] = -0.0
    assert pack_bits(tensor) is None
    assert pack_bits(torch.zeros(8, dtype=torch.complex128)) is None


@pytest.mark.parametrize("place", [0, 1, 599_999])
def test_one_element_that_bfloat16_cannot_hold_overflows(place: int) -> None:
    tensor = torch.randn(600_000).bfloat16().float()
    tensor.view(torch.int32)[5] = 0x7FA50000  # NaN with a payload
    tensor.view(torch.int32)[6] = -0x00010000
    packed = pack_narrow(tensor)
    assert packed is not None
    assert same(packed.unpack(), tensor)
    assert 2 * packed.device_bytes == tensor.nbytes
    tensor.view(torch.int32)[place] ^= 1
    assert pack_narrow(tensor) is None
    assert pack_narrow(tensor.double()) is None


@pytest.mark.parametrize("count", [1, 262_144, 262_145, 600_001])
def test_codecs_code_pieces_of_a_mebibyte(count: int) -> None:
    tensor = torch.randn(count)
    tensor[: count // 2] = 0
    for codec in ("planes", "sparse"):
        packed = pack_pieces(tensor, codec)
        assert packed is not None
        assert len(packed.parts) == -(-tensor.nbytes // (1 << 20))
        assert same(packed.unpack(), tensor)
        assert packed.device_bytes <= tensor.nbytes


def test_a_piece_of_noise_is_stored_raw() -> None:
    noise = torch.randint(-(2**31), 2**31, (300_000,), generator=torch.Generator().manual_seed(1)).int()
    packed = pack_pieces(noise.view(torch.float32), "planes")
    assert packed is not None
    assert packed.device_bytes == noise.nbytes
    assert same(packed.unpack().view(torch.int32), noise)


@pytest.mark.parametrize("codec", ["planes", "sparse"])
def test_more_bytes_than_reserved_overflow(codec: str) -> None:
    tensor = torch.relu(torch.randn(600_000) - 1.5)
    packed = pack_pieces(tensor, codec)
    assert packed is not None
    assert pack_pieces(tensor, codec, device_bytes_max=packed.device_bytes) is not None
    assert pack_pieces(tensor, codec, device_bytes_max=packed.device_bytes - 1) is None
    assert pack_pieces(torch.randn(600_000), codec, device_bytes_max=packed.reserved_bytes) is None


def test_tensors_that_are_not_dense_are_not_packed() -> None:
    """They are kept, or recomputed where a plan expected a pack."""
    base = torch.zeros(64, 64)
    views = {
        "gaps": base[:, ::2],
        "rows": base[::2],
        "expanded": base[:1].expand(8, 64),
        "overlapping": base.as_strided((8, 8), (4, 1)),
        "conjugate": torch.zeros(4, dtype=torch.complex64).conj(),
        "sparse": base.to_sparse(),
        "meta": base.to("meta"),
        "parameter": torch.nn.Parameter(base),
    }
    for name, view in views.items():
        for action in (*EXACT_ACTIONS, "q8", "q4"):
            assert pack(view, action, error_bound=0.1) is None, (name, action)


def test_a_pack_is_made_of_any_slice_and_leaves_the_graph_alone() -> None:
    leaf = torch.zeros(4, 64, requires_grad=True)
    row = (leaf * 1)[2]
    packed = pack_bits(row)
    assert packed is not None
    restored = packed.unpack()
    assert not restored.requires_grad
    assert not restored._is_view()
    assert same(restored, row.detach())


def test_a_pack_takes_no_more_than_its_plan_reserved() -> None:
    tensor = torch.zeros(4_096)
    for action in (*EXACT_ACTIONS, "q8", "q4"):
        packed = pack(tensor, action, error_bound=0.1)
        assert packed is not None
        for bytes_max, fits in ((packed.device_bytes, True), (packed.device_bytes - 1, False)):
            again = pack(tensor, action, error_bound=0.1, device_bytes_max=bytes_max)
            assert (again is not None) == fits, action


class _Ticks:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic_seconds(self) -> float:
        self.seconds += 1
        return self.seconds

    unix_seconds = thread_seconds = monotonic_seconds

    def sleep(self, seconds: float) -> None:
        raise AssertionError

    def random_bytes(self, count: int) -> bytes:
        raise AssertionError


@pytest.mark.parametrize(
    ("tensor", "bound", "actions"),
    [
        (torch.rand(100_000) < 0.5, 0.1, ["bits"]),
        (torch.randn(100_000).bfloat16().float(), 0.0, ["narrow", "planes"]),
        (torch.randn(100_000), 0.0, ["planes"]),
        (torch.randn(100_000), 0.1, ["planes", "q8", "q4"]),
        (torch.relu(torch.randn(100_000) - 1.5), 0.0, ["sparse", "planes"]),
        (torch.full((100_000,), torch.nan).copysign(torch.randn(100_000)), 0.1, ["bits", "narrow", "planes"]),
        (torch.randint(9, (100_000,)).double(), 0.1, ["planes"]),
        (torch.randn(4), 0.1, []),
        (torch.zeros(100, 100)[:, ::2], 0.1, []),
    ],
    ids=["mask", "narrow", "normal", "normal, bounded", "relu", "nan", "float64", "small", "gaps"],
)
def test_a_tensor_offers_the_packings_that_make_it_smaller(
    tensor: torch.Tensor, bound: float, actions: list[str]
) -> None:
    offered = packings_of(tensor, error_bound=bound, clock=_Ticks())
    assert [packing.action for packing in offered] == actions
    for packing in offered:
        assert packing.device_bytes <= 0.9 * tensor.nbytes
        assert packing.seconds == 2
        assert packing.is_lossy == packing.action.startswith("q")
        assert pack(tensor, packing.action, error_bound=bound, device_bytes_max=packing.device_bytes) is not None
