"""Many tiny tensors at once: taken together, and each given back bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast.backends.torch.local_shards import Ranks, shards_of
from holdfast.backends.torch.ties import Ties
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError
from holdfast.settings import MIB, Settings

SHAPES = ((4,), (), (2, 3), (1,), (0,), (3, 0), (5, 1, 2), (1024,), (1025,))


def random_bits(name: str, shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
    dtype = getattr(torch, name)
    numel = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=chance).bool()
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=chance)
    return bits.view(dtype).reshape(shape)


def every_kind(name: str, chance: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for shape in SHAPES:
        yield f"{list(shape)}", random_bits(name, shape, chance)
    yield "every other", random_bits(name, (8,), chance)[::2]
    yield "transposed", random_bits(name, (3, 4), chance).t()
    yield "row of another", random_bits(name, (3, 4), chance)[1]
    if DTYPES[name].floating and not name.startswith("complex"):
        yield "parameter", torch.nn.Parameter(random_bits(name, (4,), chance))
    if name in ("complex64", "complex128"):
        yield "conjugated", random_bits(name, (4,), chance).conj()
        yield "negated", random_bits(name, (4,), chance).conj().imag


def bits(tensor: Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("staging", ("awaited", "copy", "lazy"))
def test_every_kind_beside_every_other(tmp_path: Path, staging: Literal["awaited", "copy", "lazy"]) -> None:
    chance = torch.Generator().manual_seed(8)
    state = {f"{kind}.{name}": tensor for name in DTYPES for kind, tensor in every_kind(name, chance)}
    # By bytes: torch cannot set a single pair of 4-bit numbers.
    target = {
        name: torch.zeros(tensor.nbytes, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)
        for name, tensor in state.items()
    }
    if staging == "awaited":
        holdfast.save(tmp_path / "c", state)
    else:
        holdfast.async_save(tmp_path / "c", state, settings=Settings(staging=staging)).wait()
    holdfast.load(tmp_path / "c", target)
    assert {name: bits(tensor) for name, tensor in target.items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }


def test_every_kind_is_filled_and_nothing_beside_it(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(9)
    state = {f"{kind}.{name}": tensor for name in DTYPES for kind, tensor in every_kind(name, chance)}
    target = {f"{kind}.{name}": tensor for name in DTYPES for kind, tensor in every_kind(name, chance)}
    wholes = {name: torch.full((6,), 7, dtype=torch.int32) for name in ("first", "second")}
    state |= {name: torch.arange(2, dtype=torch.int32) for name in wholes}
    target |= {name: whole[2:4] for name, whole in wholes.items()}
    holdfast.save(tmp_path / "c", state)
    holdfast.load(tmp_path / "c", target)
    assert {name: bits(tensor) for name, tensor in target.items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }
    assert all(whole.tolist() == [7, 7, 0, 1, 7, 7] for whole in wholes.values())


def test_tiny_tensors_are_cast_and_filled_wherever_they_are_held_twice(tmp_path: Path) -> None:
    state = {"cast": torch.arange(4.0), "twice": torch.arange(4.0)}
    halves = [torch.zeros(3), torch.zeros(3)]
    target = {"cast": torch.zeros(4, dtype=torch.float64), "twice": Sharded(halves, (4,), [(0,), (1,)])}
    holdfast.save(tmp_path / "c", state)
    holdfast.load(tmp_path / "c", target, cast=True)
    assert target["cast"].tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert [half.tolist() for half in halves] == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize("kind", ("freed", "a view of what was freed", "zeros that were never made"))
def test_what_has_no_memory_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    bare = torch.zeros(4) if kind == "freed" else torch.zeros(10)[6:]
    if kind != "zeros that were never made":
        bare.untyped_storage().resize_(0)
    else:
        bare = torch._efficientzerotensor((4,))
    with pytest.raises(InvalidError, match=r"bare: has the shape .* and no memory"):
        holdfast.save(tmp_path / "c", {"bare": bare})
    holdfast.save(tmp_path / "c", {"bare": torch.ones(4)})
    with pytest.raises(InvalidError, match=r"bare: has the shape .* and no memory"):
        holdfast.load(tmp_path / "c", {"bare": bare})


def test_what_was_made_for_inference_is_saved_and_filled(tmp_path: Path) -> None:
    with torch.inference_mode():
        state, target = {"a": torch.arange(4.0), "b": torch.ones(())}, {"a": torch.zeros(4), "b": torch.zeros(())}
    holdfast.save(tmp_path / "c", state)
    holdfast.load(tmp_path / "c", target)
    assert torch.equal(target["a"], state["a"])
    assert torch.equal(target["b"], state["b"])


def test_what_begins_at_one_address_is_tied_only_if_it_is_the_same_elements() -> None:
    whole = torch.arange(4).to(torch.complex64)
    shown = {
        "whole": whole,
        "head": whole[:2],
        "square": whole.view(2, 2),
        "every other": whole[::2],
        "conjugated": whole.conj(),
        "numbers": torch.view_as_real(whole),
    }
    ties, ranks = Ties(), Ranks(0, 1, lambda rank: rank)

    def first(name: str, tensor: Tensor) -> str:
        return ties.first_name(name, tensor, shards_of(tensor, None, name, ranks), (tensor,))

    assert {name: first(name, tensor) for name, tensor in shown.items()} == {name: name for name in shown}
    again = {"whole": whole, "head": whole[:2], "square": whole.view(2, 2), "conjugated": whole.conj()}
    assert {name: first(f"later {name}", tensor) for name, tensor in again.items()} == {name: name for name in again}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_layout_worked_out_once_is_that_of_its_mesh_placements_and_shape_only() -> None:
    line, grid = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))
    tensors = [
        DTensor.from_local(torch.zeros(shape), mesh, placements)
        for shape in ((4,), (4, 2), (2, 4))
        for mesh, placements in (
            (line, (Shard(0),)),
            (line, (_StridedShard(0, split_factor=2),)),
            (line, (Replicate(),)),
            (line, (Shard(len(shape) - 1),)),
            (grid, (Shard(0), Replicate())),
            (grid, (Replicate(), Shard(0))),
        )
    ]
    shared = Ranks(0, 1, lambda rank: rank)
    for tensor in tensors * 2:
        held, alone = (shards_of(tensor, None, "t", ranks) for ranks in (shared, Ranks(0, 1, lambda rank: rank)))
        assert held.layout == alone.layout
        assert held.layout is not None
        assert held.layout.mesh_shape == tensor.device_mesh.shape
        assert [part.region for part in held.parts] == [part.region for part in alone.parts]
        assert held.parts[0].local.data_ptr() == tensor._local_tensor.data_ptr()
    assert len({shards_of(tensor, None, "t", shared).layout for tensor in tensors}) == 6


class Watching:
    """Part of a state that notes whether the collector may run while it is saved and loaded."""

    def __init__(self) -> None:
        self.enabled: list[bool] = []

    def state_dict(self) -> dict[str, object]:
        return {"noted": len(self.enabled)}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.enabled.append(gc.isenabled())


@pytest.mark.parametrize(("numel", "enabled"), ((4, False), (5 * MIB, True)), ids=("tiny", "large"))
def test_the_collector_stays_out_while_little_data_moves(tmp_path: Path, numel: int, enabled: bool) -> None:
    watching = Watching()
    state = {"w": torch.ones(numel), "watching": watching}
    holdfast.save(tmp_path / "c", state)
    assert gc.isenabled()
    holdfast.load(tmp_path / "c", state)
    assert gc.isenabled()
    assert watching.enabled == [enabled]


@pytest.mark.parametrize("last", (object(), torch.ones(4, device="meta")), ids=("value", "meta"))
def test_the_collector_comes_back_when_a_save_is_refused(tmp_path: Path, last: object) -> None:
    with pytest.raises(InvalidError):
        holdfast.save(tmp_path / "c", {"w": torch.ones(4), "last": last})
    assert gc.isenabled()
