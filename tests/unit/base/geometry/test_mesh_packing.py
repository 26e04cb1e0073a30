"""Meshes as a few numbers: none is lost, and what one `init_device_mesh` makes is one line."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.geometry.mesh_packing import packed, unpacked
from holdfast.base.geometry.tensor import Mesh


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(40)).map(lambda each: each[: math.prod(shape)]))
    return Mesh(shape, tuple(sorted(ranks) if draw(st.booleans()) else ranks[: math.prod(shape)]))


@given(st.lists(meshes().filter(lambda mesh: len(mesh.ranks) == math.prod(mesh.shape)), max_size=4))
def test_meshes_come_back(wanted: list[Mesh]) -> None:
    distinct = list(dict.fromkeys(wanted))
    assert sorted(unpacked(packed(distinct)), key=repr) == sorted(distinct, key=repr)


@pytest.mark.parametrize("dim", range(3))
def test_the_submeshes_of_one_mesh_take_a_few_numbers(dim: int) -> None:
    world = np.arange(16 * 128 * 8).reshape(16, 128, 8)
    rows = np.moveaxis(world, dim, -1).reshape(-1, world.shape[dim])
    wanted = [Mesh((world.shape[dim],), tuple(row.tolist())) for row in rows]
    packs = packed(wanted)
    assert len(packs) == 1
    assert len(packs[0].offsets) == 1
    assert len(packs[0].firsts) <= 16
    assert sorted(unpacked(packs), key=repr) == sorted(wanted, key=repr)


def test_shapes_of_one_number_of_offsets_are_told_apart() -> None:
    wanted = [Mesh((2, 2, 1, 1), (0, 1, 2, 3)), Mesh((2, 2, 1, 1), (0, 3, 1, 2)), Mesh((1, 2), (5, 1))]
    assert sorted(unpacked(packed(wanted)), key=repr) == sorted(wanted, key=repr)
