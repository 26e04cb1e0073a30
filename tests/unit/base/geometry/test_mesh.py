"""The language of described meshes, and what a rank of one holds."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.mesh import MESH_GRAMMAR, described_mesh
from holdfast.base.geometry.tensor import Placement
from holdfast.errors import InvalidError

R, S0, S1 = Placement(None), Placement(0), Placement(1)


@pytest.mark.parametrize(
    ("text", "shape", "placements"),
    [
        ("dp=4", (4,), (R,)),
        ("replicate=1", (1,), (R,)),
        ("fsdp=4", (4,), (S0,)),
        ("shard=3", (3,), (S0,)),
        ("dp=2,fsdp=4", (2, 4), (R, S0)),
        ("fsdp=2,tp=3", (2, 3), (Placement(0, 3), S0)),
        ("fsdp=2,tp=3:S1", (2, 3), (S0, S1)),
        ("fsdp=2:S0,tp=3", (2, 3), (S0, S0)),
        ("shard=2,tp=3", (2, 3), (S0, S0)),
        ("tp=3,fsdp=2", (3, 2), (S0, S0)),
        ("fsdp=2,dp=5,ep=3:S0,tp=4", (2, 5, 3, 4), (Placement(0, 12), R, S0, S0)),
        ("x_1=2:S11,y=2:R,z=2:S0/7", (2, 2, 2), (Placement(11), R, Placement(0, 7))),
    ],
)
def test_what_a_text_means(text: str, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    mesh = described_mesh(text)
    assert (mesh.shape, mesh.placements) == (shape, placements)
    assert ",".join(mesh.names) == ",".join(each.partition("=")[0] for each in text.split(","))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no mesh dimension"),
        ("4", "'4' is no"),
        ("dp", "'dp' is no"),
        ("dp=", "'dp=' is no"),
        ("dp=0", "'dp=0' is no"),
        ("dp=-1", "'dp=-1' is no"),
        ("dp=2.0", "'dp=2.0' is no"),
        ("dp=٢", "is no mesh dimension"),
        ("dp=2\n", "is no mesh dimension"),
        ("dp=2,", "'' is no"),
        ("dp=2, fsdp=2", "' fsdp=2' is no"),
        ("dp=2:S", "'dp=2:S' is no"),
        ("dp=2:S-1", "'dp=2:S-1' is no"),
        ("dp=2:S0/0", "'dp=2:S0/0' is no"),
        ("dp=2:R/2", "'dp=2:R/2' is no"),
        ("dp=2,dp=2", "dp is named twice"),
        ("pp=2", "write pp=2:R or pp=2:S0"),
        ("dp=300,fsdp=300", "2 dimensions, 90000 ranks"),
        (",".join(f"d{n}=1:R" for n in range(9)), "9 dimensions, 1 ranks"),
        ("\x1b[31m", "is no mesh dimension"),
    ],
)
def test_anything_else_is_refused_with_the_grammar(text: str, why: str) -> None:
    with pytest.raises(InvalidError) as refused:
        described_mesh(text)
    assert why in str(refused.value)
    assert MESH_GRAMMAR in str(refused.value)
    assert str(refused.value).isprintable()


def test_fully_shard_over_tensor_parallelism_gives_each_rank_a_part_of_its_own_column() -> None:
    mesh = described_mesh("fsdp=2,tp=2")
    assert [mesh.boxes_on(rank, (8, 3)) for rank in range(4)] == [
        (Box((0, 0), (2, 3)),),
        (Box((4, 0), (6, 3)),),
        (Box((2, 0), (4, 3)),),
        (Box((6, 0), (8, 3)),),
    ]


@pytest.mark.parametrize("text", ["dp=2,fsdp=3", "fsdp=2,tp=3", "fsdp=3,tp=2:S1", "a=2:S1,b=2:S0,c=2:R", "fsdp=5"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 7), (2, 0, 3), (12, 6)])
def test_together_the_ranks_hold_every_element_and_replicas_the_same(text: str, shape: tuple[int, ...]) -> None:
    mesh = described_mesh(text)
    held = np.zeros(shape, dtype=int)
    for rank in range(mesh.ranks):
        assert mesh.boxes_on(rank, shape) == mesh.boxes_on(mesh.twin_of(rank), shape)
        assert mesh.twin_of(rank) <= rank
        for box in mesh.boxes_on(rank, shape):
            held[box.relative_to((0,) * len(shape))] += 1
    copies = mesh.ranks
    for length, placement in zip(mesh.shape, mesh.placements, strict=True):
        if placement.dim is not None and placement.dim < len(shape):
            copies //= length
    assert (held == copies).all()
