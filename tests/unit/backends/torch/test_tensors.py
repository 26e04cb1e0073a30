"""Tensors of every kind: given back bit for bit, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast.backends.torch.local_shards import LocalPart, Ranks, shards_of
from holdfast.backends.torch.tensors import TorchSource, _copy_run, _gathered, _queue_run
from holdfast.backends.torch.tickets import Tickets
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError


def bits(tensor: Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def there_and_back(path: Path, tensor: Tensor, target: Tensor) -> None:
    holdfast.save(path, {"t": tensor})
    holdfast.load(path, {"t": target})
    assert target.dtype == tensor.dtype
    assert bits(target) == bits(tensor)


def random_bits(dtype: torch.dtype, count: int) -> Tensor:
    if dtype is torch.bool:
        return torch.arange(count) % 3 == 0
    size = torch.empty(0, dtype=dtype).element_size()
    random = torch.Generator().manual_seed(size)
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=random).view(dtype)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype(tmp_path: Path, name: str) -> None:
    tensor = random_bits(getattr(torch, name), 60)
    there_and_back(tmp_path / "c", tensor.reshape(3, 20), torch.zeros_like(tensor).reshape(3, 20))


@pytest.mark.parametrize("dtype", [torch.bits8, torch.uint4])
def test_a_dtype_that_cannot_be_stored_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(InvalidError, match=re.escape(f"inner.t: dtype {str(dtype).removeprefix('torch.')}")):
        holdfast.save(tmp_path / "c", {"inner": {"t": torch.empty(2, dtype=dtype)}})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1,), (1, 1, 1), (2, 3, 5, 7)])
def test_every_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    target = torch.full(shape, float("nan"))
    there_and_back(tmp_path / "c", tensor, target)


WHOLE = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(WHOLE.t(), id="transposed"),
        pytest.param(WHOLE[:, ::2], id="strided"),
        pytest.param(WHOLE[1:3, 2:5], id="inner box"),
        pytest.param(WHOLE[3], id="row of another"),
        pytest.param(torch.tensor([1.5]).expand(3, 4), id="expanded"),
        pytest.param(torch.tensor(2.5).expand(5), id="expanded from 0-d"),
        pytest.param(WHOLE.reshape(1, 4, 2, 3).to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(WHOLE.flip(0), id="flipped"),
    ],
)
def test_views_save_what_they_show_and_no_more(tmp_path: Path, tensor: Tensor) -> None:
    there_and_back(tmp_path / "c", tensor, torch.zeros(tensor.shape))
    info = holdfast.open_checkpoint(tmp_path / "c").tensors["t"]
    assert info.bytes == tensor.numel() * 4


@pytest.mark.parametrize("stride", [(6, 1), (1, 4), (12, 2)])
def test_a_target_may_lie_in_memory_in_any_order(tmp_path: Path, stride: tuple[int, int]) -> None:
    target = torch.empty_strided((4, 6), stride).fill_(-1.0)
    there_and_back(tmp_path / "c", WHOLE, target)


def test_complex_with_the_conjugate_bit(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    conjugated = tensor.conj()
    assert conjugated.is_conj()
    target = torch.zeros(2, dtype=torch.complex64)
    holdfast.save(tmp_path / "c", {"t": conjugated})
    holdfast.load(tmp_path / "c", {"t": target})
    assert target.tolist() == [1 - 2j, 3 + 4j]


def test_the_imaginary_part_of_a_conjugate_has_the_negative_bit(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj().imag
    assert tensor.is_neg()
    target = torch.zeros(2)
    holdfast.save(tmp_path / "c", {"t": tensor})
    holdfast.load(tmp_path / "c", {"t": target})
    assert target.tolist() == [-2.0, 4.0]


def test_a_conjugated_target_is_filled_with_what_it_is_to_show(tmp_path: Path) -> None:
    memory = torch.zeros(2, dtype=torch.complex64)
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    holdfast.save(tmp_path / "c", {"t": tensor})
    target = memory.conj()
    holdfast.load(tmp_path / "c", {"t": target})
    assert target.tolist() == tensor.tolist()


def test_a_negated_target_is_filled_with_what_it_is_to_show(tmp_path: Path) -> None:
    target = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert target.is_neg()
    holdfast.save(tmp_path / "c", {"t": torch.tensor([1.0, -2.0])})
    holdfast.load(tmp_path / "c", {"t": target})
    assert target.tolist() == [1.0, -2.0]


def test_a_tensor_and_its_conjugate_share_memory_and_are_not_tied(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    holdfast.save(tmp_path / "c", {"a": tensor, "b": tensor.conj()})
    a, b = torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64)
    holdfast.load(tmp_path / "c", {"a": a, "b": b})
    assert a.tolist() == [1 + 2j, 3 - 4j]
    assert b.tolist() == [1 - 2j, 3 + 4j]


def test_an_expanded_target_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"t": torch.tensor([1.0, 2.0, 3.0])})
    target = torch.zeros(1).expand(3)
    with pytest.raises(InvalidError, match=r"t: .*expanded"):
        holdfast.load(tmp_path / "c", {"t": target})
    assert target.tolist() == [0.0, 0.0, 0.0]


def test_nan_payloads_and_negative_zeros_keep_their_bits(tmp_path: Path) -> None:
    tensor = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, 0x7FA12345], dtype=torch.int32).view(torch.float32)
    there_and_back(tmp_path / "c", tensor, torch.zeros(4))


def test_gradients_are_neither_saved_nor_touched(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    before = {name: (each.grad, bits(each.grad)) for name, each in layer.named_parameters() if each.grad is not None}
    holdfast.save(tmp_path / "c", {"layer": layer})
    holdfast.load(tmp_path / "c", {"layer": layer})
    assert len(before) == 2
    for name, each in layer.named_parameters():
        assert each.grad is before[name][0]
        assert bits(each.grad) == before[name][1]
        assert each.requires_grad and each.is_leaf
    assert sorted(holdfast.open_checkpoint(tmp_path / "c").tensors) == ["layer.bias", "layer.weight"]


def test_a_tensor_inside_a_graph_is_saved_by_its_values(tmp_path: Path) -> None:
    leaf = torch.ones(3, requires_grad=True)
    result = leaf * 2
    there_and_back(tmp_path / "c", result, torch.zeros(3))
    result.sum().backward()
    assert leaf.grad is not None


def test_a_dtype_mismatch_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(3)})
    a, b = torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(InvalidError, match=r"b \(float32 saved, bfloat16 wanted\).*cast=True"):
        holdfast.load(tmp_path / "c", {"a": a, "b": b})
    assert a.tolist() == [0.0, 0.0]
    assert b.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_cast_converts_as_torch_does(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.00390625, -2.75, 300.0])
    target = torch.zeros(3, dtype=dtype)
    holdfast.save(tmp_path / "c", {"t": tensor})
    holdfast.load(tmp_path / "c", {"t": target}, cast=True)
    assert torch.equal(target, tensor.to(dtype))


def test_another_shape_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"t": torch.ones(2, 3)})
    with pytest.raises(InvalidError, match=r"t: .*\(3, 2\).*\(2, 3\)"):
        holdfast.load(tmp_path / "c", {"t": torch.ones(3, 2)})


def test_meta_tensors_are_refused_as_target_and_as_source(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"layer": torch.nn.Linear(3, 2)})
    with torch.device("meta"):
        layer = torch.nn.Linear(3, 2)
    with pytest.raises(InvalidError, match=r"layer\.weight.*meta.*materialise"):
        holdfast.load(tmp_path / "c", {"layer": layer})
    with pytest.raises(InvalidError, match=r"layer\.weight.*meta"):
        holdfast.save(tmp_path / "d", {"layer": layer})
    assert not (tmp_path / "d").exists()


class Wrapped(torch.Tensor):
    """A subclass that stands for another layout of memory, as quantised weights do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(function)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda: Wrapped(torch.ones(3)), "Wrapped", id="subclass"),
        pytest.param(lambda: torch.eye(3).to_sparse(), "sparse_coo", id="sparse"),
        pytest.param(lambda: torch.nn.parameter.UninitializedParameter(), "UninitializedParameter", id="lazy"),
    ],
)
def test_what_is_no_dense_array_is_refused_by_path_and_type(tmp_path: Path, make, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidError, match=rf"deep\.t: .*{said}"):
        holdfast.save(tmp_path / "c", {"fine": torch.ones(1), "deep": {"t": make()}})
    assert not (tmp_path / "c").exists()


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_nested_tensors_are_refused_by_name(tmp_path: Path) -> None:
    for number, tensor in enumerate(
        (
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        )
    ):
        with pytest.raises(InvalidError, match=r"deep\.t: "):
            holdfast.save(tmp_path / str(number), {"deep": {"t": tensor}})
        assert not (tmp_path / str(number)).exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "show", ["as it lies", "transposed", "every other", "one of a column", "conjugated", "negated"]
)
def test_runs_are_queued_as_they_are_copied(dtype: torch.dtype, show: str) -> None:
    """What a device is given to copy, here on the host: it comes out as what is copied there."""
    whole = random_bits(dtype, 6 * 10).reshape(6, 10)
    if show == "transposed":
        whole = whole.T
    elif show == "every other":
        whole = whole[:, ::2]
    elif show == "one of a column":
        whole = whole[3:4, 2]
    elif show == "conjugated":
        whole = whole.conj()
    elif show == "negated":
        whole = torch._neg_view(whole) if dtype.is_complex else whole
    size = whole.itemsize
    expected = bits(whole)
    count = whole.numel()
    for start, stop in [(0, count), (count // 3, count // 2), (count // 4, count - 1), (count - 1, count), (0, 0)]:
        for run in (_copy_run, _queue_run):
            buffer = memoryview(bytearray(b"?" * (whole.nbytes + 3)))
            run(whole, start * size, stop * size, buffer)
            assert bytes(buffer) == expected[start * size : stop * size].ljust(whole.nbytes + 3, b"?"), run


def test_samples_are_gathered_as_they_are_copied() -> None:
    """As a device is asked for them, here on the host."""
    whole = torch.nn.Parameter(random_bits(torch.float32, 1000).reshape(10, 100))
    runs = [(0, 8), (8, 12), (400, 800), (3996, 4000)]
    assert _gathered(whole, runs) == b"".join(bits(whole)[start:stop] for start, stop in runs)
    assert _gathered(whole[3:4, 2], [(0, 4)]) == bits(whole[3:4, 2])


@pytest.mark.parametrize("show", ("as it lies", "transposed", "every other"))
@pytest.mark.parametrize("dtype", (torch.uint8, torch.bfloat16, torch.float64, torch.complex128))
def test_samples_begin_where_they_are_asked_to_and_reach_every_element(dtype: torch.dtype, show: str) -> None:
    count, size = 400, dtype.itemsize
    whole = torch.arange(count).to(torch.uint8).repeat_interleave(size).reshape(count, size).view(dtype).view(20, 20)
    whole = {"as it lies": whole, "transposed": whole.T, "every other": whole[:, ::2]}[show]
    source, expected = TorchSource([LocalPart(Box.whole(tuple(whole.shape)), whole)], [whole]), bits(whole)
    seen = torch.zeros(whole.numel(), dtype=torch.bool)
    for shift in (number / 100 for number in range(100)):
        found = bytes(source.sample(5, 30, whole_bytes=whole.nbytes - 1, shift=shift))
        run = -(-30 // size) * size
        places = [int((number + shift) * (whole.nbytes + run) / 5) - run for number in range(5)]
        starts = [min(max(place, 0), whole.nbytes - run) // size * size for place in places]
        assert found == b"".join(expected[start : start + run] for start in starts)
        for start in starts:
            seen[start // size : (start + run) // size] = True
    assert bool(seen.all())
    for blocks, whole_bytes in ((5, whole.nbytes), (whole.nbytes // 30 + 1, 0)):
        assert bytes(source.sample(blocks, 30, whole_bytes=whole_bytes, shift=0.3)) == expected


def test_parts_on_several_devices_are_refused_by_name() -> None:
    here, elsewhere = torch.zeros(4), torch.zeros(4, device="meta")
    ranks = Ranks(0, 1, lambda rank: rank)
    for starts in ({"start": [(0,), (4,)]}, {"flat_start": [0, 4]}):
        declared = Sharded([here, elsewhere], (8,), **starts)  # type: ignore[arg-type]
        with pytest.raises(
            InvalidError, match=r"inner\.t: its parts .* devices \['cpu', 'meta'\]; expected one\. Move"
        ):
            shards_of(here, declared, "inner.t", ranks)
    nothing = Sharded([here, elsewhere[:0]], (8,), [(0,), (4,)])
    assert len(shards_of(here, nothing, "t", ranks).parts) == 1, "where nothing lies does not matter"


def test_tiny_tensors_of_other_accelerators_are_copied_one_by_one() -> None:
    """The device of meta tensors stands for them: torch cannot join what lies there in host memory either."""
    tensors = [torch.empty(4, device="meta") for _ in range(3)]
    sources = [TorchSource([LocalPart(Box.whole((4,)), each)], [each]) for each in tensors]
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        TorchSource.copy_together(sources, [Box.whole((4,))] * 3, memoryview(bytearray(48)))


class Copy:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.waits = error, 0

    def wait(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("fails", [0, 1, 2, None])
def test_every_copy_is_waited_for_whatever_the_others_say(fails: int | None) -> None:
    copies = [Copy(RuntimeError("refused") if number == fails else None) for number in range(3)]
    tickets, error = Tickets(), ValueError("no memory")
    for each in copies:
        tickets.add(each)
    if fails is None:
        tickets.wait()
        with pytest.raises(ValueError, match="no memory"):
            tickets.ended_by(error)
    else:
        with pytest.raises(RuntimeError, match="refused"):
            tickets.wait()
        unsure = tickets.ended_by(error)
        with pytest.raises(ValueError, match="no memory"):
            unsure.wait()
    assert [each.waits for each in copies] == [2, 2, 2]
