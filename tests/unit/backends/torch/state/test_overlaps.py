"""Targets that overlap in memory: filled if the checkpoint has equal values for what they share, else refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.backends.torch.state import overlaps
from holdfast.base.ports.framework import Wanted
from holdfast.errors import InvalidError
from holdfast.training.coordination.job import Job
from holdfast.training.loading import load
from holdfast.training.loading.fill_alone import fill_alone
from holdfast.training.loading.resolve import Resolved

State = dict[str, object]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def halves() -> dict[str, Tensor]:
    flat = torch.full((15,), 7.0)
    return {"x": flat[:10], "y": flat[5:]}


def of_two_dtypes() -> dict[str, Tensor]:
    flat = torch.zeros(4)
    return {"x": flat, "y": flat.view(torch.int16)[2:5]}


def of_two_storages() -> dict[str, Tensor]:
    array = torch.zeros(20).numpy()
    return {"x": torch.from_numpy(array[:12]), "y": torch.from_numpy(array[11:])}


def rows_and_columns() -> dict[str, Tensor]:
    whole = torch.zeros(6, 6)
    return {"x": whole[:, 2], "y": whole[4, 1:]}


def a_matrix_and_its_transpose() -> dict[str, Tensor]:
    whole = torch.zeros(3, 3)
    return {"x": whole, "y": whole.t()}


def among_many() -> dict[str, Tensor]:
    flat = torch.zeros(1000)
    parts = {f"part{number:02}": flat[10 * number : 10 * number + 10] for number in range(100)}
    return {**parts, "x": torch.zeros(5), "part41": flat[405:415], "y": torch.zeros(0)}


PAIRS: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "halves": (halves, r"y: shares a part of its memory with x,"),
    "of two dtypes": (of_two_dtypes, r"y: shares a part of its memory with x,"),
    "of two storages": (of_two_storages, r"y: shares a part of its memory with x,"),
    "a row and a column": (rows_and_columns, r"y: shares a part of its memory with x,"),
    "a matrix and its transpose": (a_matrix_and_its_transpose, r"y: shares a part of its memory with x,"),
    "among many": (among_many, r"part41: shares a part of its memory with part40,"),
    "strides of one": (lambda: {"t": torch.zeros(8).as_strided((4, 3), (1, 1))}, r"t: .*\[4, 3\] has strides \[1, 1\]"),
    "unfolded": (lambda: {"t": torch.zeros(3, 9).unfold(1, 4, 2)}, r"t: the target \[3, 3, 4\] has strides"),
    "a window of windows": (lambda: {"t": torch.zeros(40).unfold(0, 8, 3)[::2, 1:]}, r"t: .*\[6, 7\] has strides"),
}
"""Targets, and what is said if they are filled with other values in each element."""


def distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes; no two elements of them are equal."""
    first, made = 1, {}
    for name, tensor in state.items():
        made[name] = torch.arange(first, first + tensor.numel()).to(tensor.dtype).reshape(tensor.shape)
        first += tensor.numel()
    return made


@pytest.mark.parametrize("kind", PAIRS)
def test_values_that_differ_are_refused_by_name_and_nothing_changes(tmp_path: Path, kind: str) -> None:
    make, said = PAIRS[kind]
    target = make()
    before = {name: each.clone() for name, each in target.items()}
    holdfast.save(tmp_path / "c", distinct(target), process_group=False)
    with pytest.raises(InvalidError, match=said):
        holdfast.load(tmp_path / "c", target, process_group=False)
    assert all(torch.equal(target[name], each) for name, each in before.items())


@pytest.mark.parametrize("kind", PAIRS)
def test_what_was_saved_from_such_tensors_is_loaded_into_such(tmp_path: Path, kind: str) -> None:
    """Its values agree, whatever they are: the state had one value at each address."""
    make, _ = PAIRS[kind]
    state, target = make(), make()
    for number, each in enumerate(state.values()):
        each.random_(generator=torch.Generator().manual_seed(number))
    expected = {name: each.clone() for name, each in state.items()}
    holdfast.save(tmp_path / "c", state, process_group=False)
    holdfast.load(tmp_path / "c", target, process_group=False)
    assert all(torch.equal(target[name], each) for name, each in expected.items())
    target = make()
    renamed = {f"new_{name}": each for name, each in target.items()}
    rename = {name: f"new_{name}" for name in target}
    holdfast.load(tmp_path / "c", renamed, process_group=False, rename=rename)
    assert all(torch.equal(target[name], each) for name, each in expected.items())


APART: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "every other": lambda flat: {"x": flat[::2], "y": flat[1::2]},
    "columns": lambda flat: dict(zip("xyz", flat.view(6, 10).split((3, 3, 4), dim=1), strict=True)),
    "every other column": lambda flat: {"x": flat.view(6, 10)[:, ::2], "y": flat.view(6, 10)[:, 1::2].t()},
    "neighbours": lambda flat: {"x": flat[:30], "y": flat[30:], "z": flat[30:30]},
    "windows without overlap": lambda flat: {"x": flat.unfold(0, 4, 4)},
    "strides that pass each other": lambda flat: {"x": flat.as_strided((3, 2), (2, 3))},
    "of other dtypes": lambda flat: {"x": flat[:4].view(torch.int64), "y": flat.view(torch.int16)[8:]},
}


@pytest.mark.parametrize("kind", APART)
def test_targets_that_lie_between_each_other_are_filled(tmp_path: Path, kind: str) -> None:
    target = APART[kind](torch.zeros(60))
    saved = distinct(target)
    holdfast.save(tmp_path / "c", saved, process_group=False)
    holdfast.load(tmp_path / "c", target, process_group=False)
    assert all(torch.equal(target[name], each) for name, each in saved.items())


def test_conjugated_and_negated_views_are_compared_by_what_they_show(tmp_path: Path) -> None:
    def made() -> dict[str, Tensor]:
        whole = torch.zeros(5, dtype=torch.complex64)
        return {"z": whole, "conjugate": whole.conj()[1:], "imaginary": whole.conj().imag}

    target = made()
    z = torch.complex(torch.arange(5.0), torch.arange(5.0, 10.0))
    right = {"z": z, "conjugate": z.conj()[1:].resolve_conj(), "imaginary": -z.imag}
    holdfast.save(tmp_path / "right", right, process_group=False)
    holdfast.load(tmp_path / "right", target, process_group=False)
    assert all(torch.equal(target[name], each) for name, each in right.items())
    for name in ("conjugate", "imaginary"):
        holdfast.save(tmp_path / name, {**right, name: -right[name]}, process_group=False)
        with pytest.raises(InvalidError, match=rf"{name}: shares a part of its memory with z"):
            holdfast.load(tmp_path / name, made(), process_group=False)


class Ring(torch.nn.Module):
    """A ring buffer with a window of it, and parameters that are views of one flat buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        ring, flat = torch.zeros(12, dtype=dtype), torch.zeros(20, dtype=dtype)
        self.register_buffer("ring", ring)
        self.register_buffer("window", ring[4:9])
        self.weight, self.bias = torch.nn.Parameter(flat[:15].view(3, 5)), torch.nn.Parameter(flat[15:])


@pytest.mark.parametrize("cast", (False, True))
def test_buffers_parameters_and_moments(tmp_path: Path, cast: bool) -> None:
    def made(dtype: torch.dtype = torch.float32) -> tuple[Ring, torch.optim.Optimizer]:
        ring = Ring(dtype)
        optimizer = torch.optim.SGD(ring.parameters(), momentum=0.9)
        momentum = torch.zeros(25)
        optimizer.state[ring.weight]["momentum_buffer"] = momentum[:15].view(3, 5)
        optimizer.state[ring.bias]["momentum_buffer"] = momentum[12:17]
        return ring, optimizer

    ring, optimizer = made(torch.float64 if cast else torch.float32)
    shared = optimizer.state[ring.bias]["momentum_buffer"]
    with torch.no_grad():
        ring.ring.copy_(torch.arange(12.0))
        ring.weight.fill_(2.0)
        shared.copy_(torch.arange(5.0))
    state = {"ring": ring, "optimizer": optimizer}
    holdfast.save(tmp_path / "a", state, process_group=False)
    other, moments = made()
    holdfast.load(tmp_path / "a", {"ring": other, "optimizer": moments}, process_group=False, cast=cast)
    assert other.window.tolist() == [4, 5, 6, 7, 8] and bool((other.weight == 2).all())
    assert moments.state[other.bias]["momentum_buffer"].tolist() == [0, 1, 2, 3, 4]
    optimizer.state[ring.bias]["momentum_buffer"] = torch.full((5,), 9.0)
    holdfast.save(tmp_path / "b", state, process_group=False)
    with pytest.raises(
        InvalidError, match=r"optimizer\.state\.bias\.momentum_buffer: shares .* optimizer\.state\.weight"
    ):
        holdfast.load(tmp_path / "b", {"ring": other, "optimizer": moments}, process_group=False, cast=cast)
    holdfast.load(
        tmp_path / "b", {"ring": other, "optimizer": moments}, process_group=False, cast=cast, skip="*weight.mom*"
    )
    assert moments.state[other.bias]["momentum_buffer"].tolist() == [9.0] * 5


@pytest.mark.parametrize(("together_bytes", "calls"), ((4000, 1), (1200, 2), (1, 22)))
def test_what_is_compared_is_read_once_many_targets_in_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together_bytes: int, calls: int
) -> None:
    flat = torch.zeros(300)
    parts = holdfast.Sharded([flat[200:260], flat[240:300]], (100,), [(0,), (40,)])
    views = {f"view{number:02}": flat[10 * number : 10 * number + 5] for number in range(20)}
    whole = torch.arange(300.0)
    saved = {"flat": whole, "parts": whole[200:], **{f"view{n:02}": whole[10 * n : 10 * n + 5] for n in range(20)}}
    holdfast.save(tmp_path / "c", saved, process_group=False)
    filled: list[list[str]] = []

    def fill(job: Job, resolved: Resolved, wanted: Sequence[Wanted]) -> None:
        filled.append([each.fqn for each in wanted])
        fill_alone(job, resolved, wanted)

    monkeypatch.setattr(load, "fill_alone", fill)
    monkeypatch.setattr(overlaps, "_TOGETHER_BYTES", together_bytes)
    holdfast.load(tmp_path / "c", {"flat": flat, "parts": parts, **views}, process_group=False)
    assert torch.equal(flat, whole)
    assert len(filled) == calls
    assert sorted(chain.from_iterable(filled)) == sorted(saved)


@pytest.mark.usefixtures("group")
def test_local_tensors_of_dtensors(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def sharded(local: Tensor) -> DTensor:
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    flat = torch.zeros(10, 2)
    saved: State = {"x": sharded(torch.ones(6, 2)), "y": torch.zeros(7, 2)}
    holdfast.save(tmp_path / "c", saved)
    with pytest.raises(InvalidError, match="y: shares a part of its memory with x"):
        holdfast.load(tmp_path / "c", {"x": sharded(flat[:6]), "y": flat[3:]})
    assert not flat.any()
    saved["y"] = torch.cat((torch.ones(3, 2), torch.zeros(4, 2)))
    holdfast.save(tmp_path / "d", saved)
    holdfast.load(tmp_path / "d", {"x": sharded(flat[:6]), "y": sharded(flat[3:])})
    assert flat[:, 1].tolist() == [1.0] * 6 + [0.0] * 4
    parts = holdfast.Sharded([flat[:6], flat[4:]], (10, 2), [(0, 0), (4, 0)])
    whole = torch.arange(20.0).view(10, 2)
    holdfast.save(tmp_path / "halo", {"w": whole})
    holdfast.load(tmp_path / "halo", {"w": parts})
    assert torch.equal(flat, whole)


def test_a_part_that_is_left_as_it_is_is_no_difference(tmp_path: Path) -> None:
    """With `partial`, the first row alone is filled, and what is shared lies in another."""
    flat = torch.zeros(4, 3)
    holdfast.save(tmp_path / "c", {"x": torch.ones(1, 3), "y": torch.full((3,), 0.0)}, process_group=False)
    holdfast.load(tmp_path / "c", {"x": flat, "y": flat[2]}, process_group=False, partial="x")
    assert flat.tolist() == [[1.0] * 3, *[[0.0] * 3] * 3]
