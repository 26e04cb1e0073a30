"""Every rank derives what it holds as torch cuts it, element by element."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.base.geometry.placement import (
    boxes_at,
    coordinate_of,
    held_boxes,
    held_boxes_in_shard_order,
    replica_ranks,
)
from holdfast.base.geometry.tensor import MeshLayout, Placement
from tests.property.held import layouts, meshes
from tests.property.states import SHAPES, examples

_TorchPlacement = Replicate | Shard | _StridedShard


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[MeshLayout, tuple[int, ...]]:
    shape = draw(SHAPES)
    return draw(layouts(draw(st.integers(1, 16)), len(shape))), shape


class _Mesh:
    """What torch asks of a mesh here."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def size(self, dim: int) -> int:
        return self._shape[dim]


def in_torch(placement: Placement) -> _TorchPlacement:
    if placement.dim is None:
        return Replicate()
    return Shard(placement.dim) if placement.split == 1 else _StridedShard(placement.dim, split_factor=placement.split)


def local_tensors(layout: MeshLayout, shape: tuple[int, ...]) -> dict[tuple[int, ...], torch.Tensor]:
    """Return by coordinate what torch's own placements cut out of a tensor of row-major element numbers."""
    locals_: dict[tuple[int, ...], torch.Tensor] = {(): torch.arange(math.prod(shape)).reshape(shape)}
    for ranks, each in zip(layout.mesh_shape, layout.placements, strict=True):
        placement = in_torch(each)
        cut = {}
        for coordinate, local in locals_.items():
            if isinstance(placement, Replicate):
                parts = [local] * ranks
            else:
                parts, _ = placement._split_tensor(local, ranks, with_padding=False, contiguous=False)
            cut |= {(*coordinate, at): part for at, part in enumerate(parts)}
        locals_ = cut
    return locals_


@settings(max_examples=examples(400), deadline=None)
@given(laid_out())
def test_held_boxes_are_what_torch_cuts(case: tuple[MeshLayout, tuple[int, ...]]) -> None:
    layout, shape = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    found = local_tensors(layout, shape)
    assert sorted(found) == list(product(*map(range, layout.mesh_shape)))
    for coordinate, local in found.items():
        ours = np.full(tuple(local.shape), -1)
        held = held_boxes(layout, shape, coordinate)
        for box, where in held:
            assert box.shape == where.shape
            target = ours[(*where.relative_to((0,) * len(shape)), ...)]
            assert (target == -1).all(), "two boxes lie on one place of the local tensor"
            target[...] = whole[box.relative_to((0,) * len(shape))]
        assert ours.tobytes() == local.numpy().tobytes(), coordinate
        assert boxes_at(layout, shape, coordinate) == tuple(box for box, _ in held)
        assert all(box.numel for box in boxes_at(layout, shape, coordinate)) or not math.prod(shape)


@st.composite
def ordered(draw: st.DrawFn) -> tuple[MeshLayout, tuple[int, ...], dict[int, list[int]]]:
    """A tensor cut over mesh dimensions in any order, and the placements with which torch states the outcome."""
    shape = draw(SHAPES.filter(len))
    mesh_shape, ranks = draw(meshes(16))
    dims = [draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh_shape]
    order = {
        dim: draw(st.permutations([at for at, each in enumerate(dims) if each == dim])) for dim in set(dims) - {None}
    }
    split = [
        math.prod(mesh_shape[other] for other in order[dim][: order[dim].index(at)] if other > at)
        if dim is not None
        else 1
        for at, dim in enumerate(dims)
    ]
    return MeshLayout(mesh_shape, ranks, tuple(map(Placement, dims, split))), shape, order


@settings(max_examples=examples(400), deadline=None)
@given(ordered())
def test_in_shard_order_every_cut_is_a_plain_one(
    case: tuple[MeshLayout, tuple[int, ...], dict[int, list[int]]],
) -> None:
    layout, shape, order = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in product(*map(range, layout.mesh_shape)):
        local = whole
        for dim, mesh_dims in order.items():
            for at in mesh_dims:
                parts, _ = Shard(dim)._split_tensor(local, layout.mesh_shape[at], with_padding=False, contiguous=False)
                local = parts[coordinate[at]]
        held = held_boxes_in_shard_order(layout, shape, coordinate)
        found = [whole[box.relative_to((0,) * len(shape))] for box, _ in held]
        if local.numel():
            assert len(found) == 1, "plain cuts leave one box"
            assert torch.equal(found[0], local)
            assert held[0][1].start == (0,) * len(shape)
        else:
            assert not any(each.numel() for each in found)


@settings(max_examples=examples(120), deadline=None)
@given(laid_out())
def test_a_split_that_no_order_explains_is_meant_as_stated(case: tuple[MeshLayout, tuple[int, ...]]) -> None:
    layout, shape = case
    mesh = _Mesh(layout.mesh_shape)
    stated = tuple(in_torch(each) for each in layout.placements)
    order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(stated, mesh)  # type: ignore[arg-type]
    for coordinate in product(*map(range, layout.mesh_shape)):
        boxes = held_boxes_in_shard_order(layout, shape, coordinate)
        if order is None or not any(each.split > 1 for each in layout.placements):
            assert boxes == held_boxes(layout, shape, coordinate)
        else:
            assert len(boxes) <= 1, "plain cuts leave one box"


@settings(max_examples=examples(400), deadline=None)
@given(laid_out())
def test_first_box_and_local_shape_are_what_torch_computes(case: tuple[MeshLayout, tuple[int, ...]]) -> None:
    layout, shape = case
    placements = [in_torch(each) for each in layout.placements]
    for coordinate in product(*map(range, layout.mesh_shape)):
        local, offset = _compute_local_shape_and_global_offset(shape, layout.mesh_shape, list(coordinate), placements)
        held = held_boxes(layout, shape, coordinate)
        if held:
            assert tuple(max(where.stop[dim] for _, where in held) for dim in range(len(shape))) == tuple(local)
        if math.prod(local):
            assert held[0][0].start == tuple(offset)
        else:
            # Where torch says nothing is held, there is no box, or those of an empty tensor.
            assert not held or not math.prod(shape)


@settings(max_examples=examples(120), deadline=None)
@given(laid_out())
def test_every_replica_group_is_the_ranks_with_the_same_boxes(case: tuple[MeshLayout, tuple[int, ...]]) -> None:
    layout, shape = case
    coordinates = {rank: coordinate_of(layout, rank) for rank in layout.mesh_ranks}
    assert sorted(coordinates.values()) == list(product(*map(range, layout.mesh_shape)))
    count = np.zeros(shape, dtype=np.int64)
    for rank, coordinate in coordinates.items():
        group = replica_ranks(layout, coordinate)
        assert rank in group
        assert list(group) == sorted(set(group))
        boxes = boxes_at(layout, shape, coordinate)
        assert all(boxes_at(layout, shape, coordinates[other]) == boxes for other in group)
        assert all(replica_ranks(layout, coordinates[other]) == group for other in group)
        if rank == group[0]:
            for box in boxes:
                count[box.relative_to((0,) * len(shape))] += 1
    assert (count == 1).all()


def test_an_empty_tensor_has_a_holder() -> None:
    layout = MeshLayout((2, 2), (0, 1, 2, 3), (Placement(0), Placement(0)))
    boxes = [boxes_at(layout, (0, 3), coordinate) for coordinate in product(range(2), range(2))]
    assert [len(each) for each in boxes] == [1, 0, 0, 0]


def test_a_strided_split_leaves_a_rank_several_boxes_in_their_order() -> None:
    layout = MeshLayout((4,), (0, 1, 2, 3), (Placement(0, 2),))
    # torch's own example: nine rows, cut in 5 and 4, each over four ranks.
    held = [boxes_at(layout, (9,), (at,)) for at in range(4)]
    rows = [[row for box in boxes for row in range(box.start[0], box.stop[0])] for boxes in held]
    assert rows == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]
    assert [len(boxes) for boxes in held] == [2, 2, 2, 1]
