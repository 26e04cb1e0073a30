"""Every rank derives the same boxes as DTensor itself."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from holdfast.spec.placement import box_at, coordinate_of, replica_ranks
from holdfast.spec.tensor import Layout, Placement
from tests.property.states import SHAPES, layouts


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    shape = draw(SHAPES)
    return draw(layouts(draw(st.integers(1, 12)), len(shape))), shape


@settings(max_examples=1500, deadline=None)
@given(laid_out())
def test_box_at_is_what_torch_computes(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    placements = [Replicate() if each.dim is None else Shard(each.dim) for each in layout.placements]
    for coordinate in product(*map(range, layout.mesh_shape)):
        local, offset = _compute_local_shape_and_global_offset(shape, layout.mesh_shape, list(coordinate), placements)
        box = box_at(layout, shape, coordinate)
        if math.prod(local):
            assert box is not None
            assert (box.shape, box.start) == (tuple(local), tuple(offset))
        else:
            # Where torch says nothing is held, there is no box, or the one empty box of an empty tensor.
            assert box is None or box.shape == tuple(local)
            assert box is None or not math.prod(shape)


@settings(max_examples=500, deadline=None)
@given(laid_out())
def test_every_replica_group_is_the_ranks_with_one_box(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    coordinates = {rank: coordinate_of(layout, rank) for rank in layout.mesh_ranks}
    assert sorted(coordinates.values()) == list(product(*map(range, layout.mesh_shape)))
    count = np.zeros(shape, dtype=np.int64)
    for rank, coordinate in coordinates.items():
        group = replica_ranks(layout, coordinate)
        assert rank in group
        assert list(group) == sorted(set(group))
        box = box_at(layout, shape, coordinate)
        assert all(box_at(layout, shape, coordinates[other]) == box for other in group)
        assert all(replica_ranks(layout, coordinates[other]) == group for other in group)
        if box is not None and rank == group[0]:
            count[box.relative_to((0,) * len(shape))] += 1
    assert (count == 1).all()


def test_an_empty_tensor_has_a_holder() -> None:
    layout = Layout((2, 2), (0, 1, 2, 3), (Placement(0), Placement(0)))
    boxes = [box_at(layout, (0, 3), coordinate) for coordinate in product(range(2), range(2))]
    assert [box is not None for box in boxes] == [True, False, False, False]
