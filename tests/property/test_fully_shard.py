"""What `fully_shard` leaves on each rank, uneven lengths over tensor parallelism included, is told apart or refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.backends.torch.local_shards import Ranks, shards_of
from holdfast.base.geometry.box import Box
from holdfast.errors import InvalidError


@contextmanager
def rank_of_many(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a group whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class OneParameter(torch.nn.Module):
    def __init__(self, tensor: DTensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(tensor)


def tensor_parallel(rows: int, data_ranks: int, *model_ranks: int) -> DTensor:
    """Rows that number themselves, split over model ranks, then by `fully_shard` over data ranks."""
    # torch keeps meshes for the life of a process, equal ones once, each with the coordinate of whoever made it first.
    names = tuple(f"{name}{dist.get_rank()}" for name in ("data", "expert", "tensor")[: 1 + len(model_ranks)])
    mesh = init_device_mesh("cpu", (data_ranks, *model_ranks), mesh_dim_names=names)
    whole = torch.arange(float(rows)).reshape(rows, 1)
    split = distribute_tensor(whole, mesh[names[1:]], [Shard(0)] * len(model_ranks), src_data_rank=None)
    model = OneParameter(split)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(model, mesh=mesh[names[0]])
    weight = model.weight
    assert isinstance(weight, DTensor)
    assert any(isinstance(each, _StridedShard) for each in weight.placements)
    return weight


def rows_of(tensor: DTensor, rank: int) -> list[int]:
    """Which rows Holdfast takes a local tensor for, in the order in which they lie in it."""
    held = shards_of(tensor, None, "weight", Ranks(rank, dist.get_world_size(), lambda each: each))
    rows = []
    for part in held.parts:
        assert isinstance(part.region, Box)
        assert part.local.shape == part.region.shape
        rows += range(part.region.start[0], part.region.stop[0])
    return rows


@pytest.mark.parametrize(("rows", "data_ranks", "model_ranks"), [(8, 2, 2), (7, 3, 2), (9, 4, 2), (1, 2, 2), (5, 2, 3)])
def test_every_row_is_taken_for_what_it_is(rows: int, data_ranks: int, model_ranks: int) -> None:
    found = []
    for rank in range(data_ranks * model_ranks):
        with rank_of_many(rank, data_ranks * model_ranks):
            tensor = tensor_parallel(rows, data_ranks, model_ranks)
            own = rows_of(tensor, rank)
            assert own == [int(each) for each in tensor.to_local().reshape(-1)]
            found += own
    assert sorted(found) == list(range(rows))


@pytest.mark.parametrize(("rows", "ranks"), [(27, (3, 4)), (9, (2, 2, 3))])
def test_rows_that_could_be_others_are_refused_by_name(rows: int, ranks: tuple[int, ...]) -> None:
    world_size = torch.Size(ranks).numel()
    refused = 0
    for rank in range(world_size):
        with rank_of_many(rank, world_size):
            tensor = tensor_parallel(rows, *ranks)
            try:
                own = rows_of(tensor, rank)
            except InvalidError as error:
                assert str(error).startswith(f"weight: ({rows}, 1) does not divide evenly")
                refused += 1
            else:
                assert own == [int(each) for each in tensor.to_local().reshape(-1)]
    assert refused, "one rank that refuses refuses for all"


def test_what_is_distributed_as_stated_is_taken_as_stated() -> None:
    for rank, (data, model) in enumerate(product(range(3), range(2))):
        with rank_of_many(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2))
            placements = [_StridedShard(0, split_factor=2), Shard(0)]
            tensor = distribute_tensor(torch.arange(7.0).reshape(7, 1), mesh, placements, src_data_rank=None)
            assert tuple(tensor.device_mesh.get_coordinate() or ()) == (data, model)
            assert rows_of(tensor, rank) == [int(each) for each in tensor.to_local().reshape(-1)]
