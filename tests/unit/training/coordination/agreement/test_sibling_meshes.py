"""One name on several meshes, over threads: siblings are replicas, anything else is refused before the first byte."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.tensor import MeshLayout, Placement, Role
from holdfast.base.types.health import Health
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.names import rank_of_pack
from holdfast.errors import InvalidError
from tests.doubles.framework import GlobalTensor
from tests.unit.ranks import PATIENT, World, plain, saved

R, S0, S1 = Placement(None), Placement(0), Placement(1)
State = dict[str, object]


def tensor(
    layout: MeshLayout | None, *, value: float = 0.0, shape: tuple[int, ...] = (64, 64), dtype: str = "float32"
) -> GlobalTensor:
    array = (np.arange(np.prod(shape)) + value).astype(dtype).reshape(shape)
    return GlobalTensor(dtype, array, layout)


def state_tensor(layout: MeshLayout) -> GlobalTensor:
    return replace(tensor(layout), role=Role.OPTIMIZER)


def on(shape: tuple[int, ...], placements: Sequence[Placement], *meshes: tuple[int, ...]) -> Mapping[int, MeshLayout]:
    """The layout of each rank, on the one of the meshes that it is on."""
    return {rank: MeshLayout(shape, mesh, tuple(placements)) for mesh in meshes for rank in mesh}


def written(world: World, step: int, fqn: str) -> dict[int, int]:
    """Bytes of a tensor that each rank wrote."""
    found: Counter[int] = Counter()
    for piece in world.pieces(step)[fqn]:
        found[rank_of_pack(piece.pack)] += piece.bytes
    return dict(found)


def save_everywhere(world: World, states: Sequence[State], step: int = 1) -> list[object]:
    return world.play(lambda rank, run: saved(run, step, states[rank]))


def require_saved(outcomes: Sequence[object]) -> None:
    assert all(isinstance(each, SaveReport) for each in outcomes), outcomes


def require_refused(world: World, states: Sequence[State], *said: str) -> None:
    outcomes = save_everywhere(world, states)
    assert [type(each) for each in outcomes] == [InvalidError] * len(states), outcomes
    for each in outcomes:
        assert all(words in str(each) for words in said), str(each)
    assert world.files() == []


SIBLINGS = {
    "shards over dp, once for each of tp": on((2,), [S0], (0, 2), (1, 3)),
    "tensor parallel with data parallelism by hand": on((2,), [S0], (0, 1), (2, 3)),
    "siblings in different orders of ranks": on((2,), [S0], (0, 2), (3, 1)),
    "replicas on siblings": on((2,), [R], (0, 1), (2, 3)),
    "meshes of one rank": on((1,), [S0], (0,), (1,), (2,), (3,)),
    "a mesh of no pattern": on((3,), [S0], (0, 4, 1), (2, 3, 5)),
    "hybrid shards": on((2, 2), [R, S0], (0, 2, 4, 6), (1, 3, 5, 7)),
    "three dimensions": on((2, 2), [S1, S0], (0, 1, 4, 5), (2, 3, 6, 7)),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_store_every_byte_once_and_share_the_writing(name: str) -> None:
    layouts = SIBLINGS[name]
    world = World(len(layouts))
    require_saved(save_everywhere(world, [{"w": tensor(layouts[rank])} for rank in range(world.world_size)]))
    found = written(world, 1, "w")
    assert sum(found.values()) == 64 * 64 * 4
    assert max(found.values()) - min(found.values()) <= 4 * 64 * 2, found
    assert len(found) == world.world_size

    def part(rank: int, run: CheckpointManager) -> object:
        target = tensor(MeshLayout((world.world_size,), tuple(range(world.world_size)), (S0,)), value=9.0)
        run.load({"w": target}, 1)
        (box,) = target.regions_on(rank)
        return np.array_equal(target.array[box.relative_to((0, 0))], tensor(None).array[box.relative_to((0, 0))])

    assert world.play(part) == [True] * world.world_size


def test_siblings_beside_one_mesh_of_all_ranks_and_plain_tensors() -> None:
    """A model under tensor parallelism, of which a norm is on mesh["dp"] only."""
    whole, norm = MeshLayout((2, 2), (0, 1, 2, 3), (S0, S1)), on((2,), [S0], (0, 2), (1, 3))
    world = World(4)
    states = [
        {"up": tensor(whole), "norm": tensor(norm[rank], value=3.0), "step": plain(1.0, role=Role.OPTIMIZER)}
        for rank in range(4)
    ]
    require_saved(save_everywhere(world, states))
    assert sum(written(world, 1, "up").values()) == sum(written(world, 1, "norm").values()) == 64 * 64 * 4
    assert sum(written(world, 1, "step").values()) == 400


def test_an_unchanged_layout_with_siblings_is_planned_once() -> None:
    layouts = on((2,), [S0], (0, 2), (1, 3))

    def part(rank: int, run: CheckpointManager) -> object:
        reports = [saved(run, step, {"w": tensor(layouts[rank], value=step)}) for step in range(3)]
        return [isinstance(each, SaveReport) and each.planned for each in reports]

    assert World(4).play(part) == [[True, False, False]] * 4


def test_the_siblings_of_a_name_may_be_in_classes_of_their_own() -> None:
    """Two pipeline stages tie the embedding: each has it on the stage's mesh, beside layers of its own."""
    stage = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    world = World(4)
    states = [
        {
            name: tensor(MeshLayout((2,), stage[rank], (S0,)), value=float(len(name)))
            for name in ("embed", *(f"layers.{stage[rank][0]}.{n}" for n in range(rank // 2 + 2)))
        }
        for rank in range(4)
    ]
    require_saved(save_everywhere(world, states))
    assert written(world, 1, "embed") == dict.fromkeys(range(4), 4096)
    assert written(world, 1, "layers.2.0") == {2: 8192, 3: 8192}
    assert len(world.pieces(1)) == 6


def test_one_rank_with_a_tensor_of_its_own_changes_nothing_for_siblings() -> None:
    layouts = on((2,), [S0], (0, 2), (1, 3))
    world = World(4)
    states = [{"w": tensor(layouts[rank])} | ({"mine": plain(1.0)} if rank == 0 else {}) for rank in range(4)]
    require_saved(save_everywhere(world, states))
    assert written(world, 1, "w") == dict.fromkeys(range(4), 4096)


def test_siblings_that_differ_are_refused_by_name() -> None:
    layouts = on((2,), [S0], (0, 2), (1, 3))
    states = [
        {"same": tensor(layouts[rank]), "norm": tensor(layouts[rank], value=float(rank % 2))} for rank in range(4)
    ]
    said = "norm (mesh [2] of ranks [0, 2] ≠ mesh [2] of ranks [1, 3])", "name of its own", "replicas='lowest'"
    require_refused(World(4), states, *said, "broadcast")


def test_one_rank_of_many_that_differs_is_found() -> None:
    layouts = on((2,), [S0], (0, 1), (2, 3), (4, 5), (6, 7))
    states: list[State] = [{"w": tensor(layouts[rank], value=float(rank == 5))} for rank in range(8)]
    require_refused(World(8), states, "w (mesh [2] of ranks [0, 1] ≠ mesh [2] of ranks [4, 5])")


def test_siblings_that_drift_are_saved_from_the_lowest_mesh_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    """One mesh writes all of them: a parameter and its moments must come from one replica."""
    caplog.set_level(logging.WARNING)
    layouts = on((2,), [S0], (3, 2), (5, 4), (1, 0))
    world = World(6, replace(PATIENT, replicas="lowest"))

    def state(rank: int, step: int) -> State:
        drift = float(rank in (2, 3) and step == 2) + float(rank // 2 * (step == 3))
        same = {"moment": tensor(layouts[rank], value=3.0), "v": plain(9.0)}
        return {**same, **{f"w{number}": tensor(layouts[rank], value=drift + number) for number in range(3)}}

    def part(rank: int, run: CheckpointManager) -> object:
        reports = [saved(run, step, state(rank, step)) for step in (1, 2, 3, 4)]
        into = state(rank, 2)
        run.load(into, 3)
        return reports, into

    names = ("w0", "w1", "w2")
    for rank, (reports, into) in enumerate(world.play(part)):  # type: ignore[misc]
        require_saved(reports)
        assert [report.divergent for report in reports] == [(), names, names, ()]
        assert [bool(report.unhealthy) for report in reports] == [False, True, True, False]
        assert [report.planned for report in reports] == [True, True, False, False]
        for name in (*names, "moment"):
            (box,) = into[name].regions_on(rank)
            part_of = box.relative_to((0, 0))
            lowest = state(0, 3)[name]
            assert (into[name].array[part_of] == lowest.array[part_of]).all(), name  # type: ignore[attr-defined]
    for name in (*names, "moment"):
        assert written(world, 3, name).keys() == {0, 1} and sum(written(world, 3, name).values()) == 64 * 64 * 4
    assert written(world, 3, "v").keys() == {0}
    for step in (1, 4):
        assert {rank for name in (*names, "moment") for rank in written(world, step, name)} == {*range(6)}
    assert [world.manifest(step).health for step in (1, 4)] == [None, None]
    assert world.manifest(2).health == Health(divergent=dict.fromkeys(names, (3,)))
    assert world.manifest(3).health == Health(divergent=dict.fromkeys(names, (1, 3, 5)), undecided=names)
    (text,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert text.startswith("save of step 2: 3 replicated tensors differ between ranks: w0, w1, w2. With")
    assert "replicas='lowest' those of the mesh with the lowest rank are saved" in text and "unhealthy" in text


def test_siblings_are_saved_from_one_mesh_if_plain_replicas_drift() -> None:
    layouts = on((2,), [S0], (0, 2), (1, 3))
    world = World(4, replace(PATIENT, replicas="lowest"))
    states: list[State] = [{"w": tensor(layouts[rank]), "v": plain(float(rank))} for rank in range(4)]
    require_saved(save_everywhere(world, states))
    assert written(world, 1, "w") == dict.fromkeys((0, 2), 8192) and written(world, 1, "v").keys() == {0}
    assert world.manifest(1).health == Health(divergent={"v": (0, 1, 2, 3)}, undecided=("v",))


def test_replicas_on_one_mesh_are_trusted_as_before() -> None:
    """Their placements say that they are equal; `compare_replicas` hashes them whole."""
    layout = MeshLayout((2,), (0, 1), (R,))
    require_saved(save_everywhere(World(2), [{"w": tensor(layout, value=float(rank))} for rank in range(2)]))


@pytest.mark.parametrize("extra", (False, True))
def test_stages_that_reuse_a_name_are_refused_once_training_has_made_them_differ(extra: bool) -> None:
    """The step before stays whole."""
    layouts = on((2,), [S0], (0, 1), (2, 3))
    world = World(4)

    def part(rank: int, run: CheckpointManager) -> object:
        head = {"head": tensor(layouts[rank])} if extra and rank > 1 else {}
        first = saved(run, 1, {"layers.0": tensor(layouts[rank])} | head)
        return first, saved(run, 2, {"layers.0": tensor(layouts[rank], value=float(rank // 2))} | head)

    outcomes = world.play(part)
    require_saved([each[0] for each in outcomes])
    for _, refusal in outcomes:
        assert isinstance(refusal, InvalidError)
        assert "layers.0 (mesh [2] of ranks [0, 1] ≠ mesh [2] of ranks [2, 3])" in str(refusal)
        assert "two pipeline stages that reuse a name" in str(refusal)
    assert world.committed() == [1]
    assert sum(written(world, 1, "layers.0").values()) == 64 * 64 * 4


UNRELATED: dict[str, tuple[list[GlobalTensor | None], tuple[str, ...]]] = {
    "meshes that overlap": (
        [tensor(MeshLayout((2,), mesh, (S0,))) for mesh in ((0, 1), (0, 1), (1, 2))],
        ("ranks [2] hold it on a mesh that begins with rank 1; rank 1 holds it on mesh [2] of ranks [0, 1]", "overlap"),
    ),
    "orders of one mesh": (
        [tensor(MeshLayout((2,), mesh, (S0,))) for mesh in ((0, 1), (1, 0))],
        ("ranks [0] hold it on mesh [2] of ranks [0, 1]; rank 1 holds it on mesh [2] of ranks [1, 0]", "overlap"),
    ),
    "meshes of different sizes": (
        [tensor(MeshLayout((len(mesh),), mesh, (S0,))) for mesh in ((0, 1), (0, 1), (2,))],
        ("mesh [2] of ranks [0, 1] and mesh [1] of ranks [2] have different sizes",),
    ),
    "meshes of different shapes": (
        [tensor(MeshLayout(shape, mesh, (S0, R))) for shape, mesh in [((2, 1), (0, 1))] * 2 + [((1, 2), (2, 3))] * 2],
        ("mesh [2, 1] of ranks [0, 1] and mesh [1, 2] of ranks [2, 3] have different sizes",),
    ),
    "another shape": (
        [tensor(MeshLayout((1,), (rank,), (S0,)), shape=(4 + rank, 2)) for rank in range(2)],
        ("float32 [4, 2] [Shard(0)] on ranks [0] ≠ float32 [5, 2] [Shard(0)] on ranks [1]",),
    ),
    "another dtype": (
        [tensor(MeshLayout((1,), (rank,), (S0,)), dtype=("float32", "float64")[rank]) for rank in range(2)],
        ("float32 [64, 64] [Shard(0)] on ranks [0] ≠ float64",),
    ),
    "another placement": (
        [tensor(MeshLayout((1,), (rank,), ((S0, S1)[rank],))) for rank in range(2)],
        ("[Shard(0)] on ranks [0] ≠ float32 [64, 64] [Shard(1)] on ranks [1]",),
    ),
    "plain here and sharded there": (
        [tensor(None if rank else MeshLayout((1,), (0,), (S0,))) for rank in range(2)],
        ("w (a plain tensor on ranks [1], a DTensor on ranks [0])",),
    ),
    "a rank of the mesh without it": (
        [tensor(MeshLayout((3,), (0, 1, 2), (S0,))) if rank != 1 else None for rank in range(3)],
        ("ranks [0, 2] hold it on mesh [3] of ranks [0, 1, 2]; ranks [1] do not hold it",),
    ),
    "the first rank of the mesh without it": (
        [tensor(MeshLayout((2,), (0, 1), (S0,))) if rank else None for rank in range(2)],
        ("ranks [1] hold it on a mesh that begins with rank 0; ranks [0] do not hold it",),
    ),
}


@pytest.mark.parametrize("name", UNRELATED)
def test_anything_else_under_one_name_is_refused_before_the_first_byte(name: str) -> None:
    held, said = UNRELATED[name]
    states: list[State] = [{"v": plain(1.0)} | ({} if each is None else {"w": each}) for each in held]
    require_refused(World(len(held)), states, "w (", "name of its own", "mesh['dp']", *said)


@pytest.mark.parametrize(
    ("shape", "meshes", "stepped", "said"),
    [
        ((2,), [(0, 1)], (0,), "ranks [0] hold it on mesh [2] of ranks [0, 1]; ranks [1] do not hold it"),
        ((2,), [(0, 1)], (1,), "ranks [1] hold it on mesh [2] of ranks [0, 1]; ranks [0] do not hold it"),
        ((4,), [(0, 1, 2, 3)], (0, 3), "ranks [0, 3] hold it on mesh [4]"),
        ((2,), [(0, 1), (2, 3)], (0, 1, 2), "ranks [3] do not hold it"),
    ],
)
def test_state_of_a_parameter_that_some_ranks_have_not_stepped_says_so(
    shape: tuple[int, ...], meshes: Sequence[tuple[int, ...]], stepped: Sequence[int], said: str
) -> None:
    layouts = on(shape, [S0], *meshes)
    states: list[State] = [
        {"w": tensor(layout)} | ({"opt.state.w.m": state_tensor(layout)} if rank in stepped else {})
        for rank, layout in sorted(layouts.items())
    ]
    outcomes = save_everywhere(World(len(states)), states)
    for each in outcomes:
        assert isinstance(each, InvalidError)
        text = str(each)
        assert "opt.state.w.m (" in text and said in text and "a gradient of zeros" in text
        assert "mesh['dp']" not in text


def test_a_conflict_of_meshes_is_named_before_what_follows_from_it() -> None:
    # A module that one rank of the mesh lacks: so does its optimizer.
    layout = MeshLayout((2,), (0, 1), (S0,))
    states: list[State] = [{"v": plain(1.0)} for _ in range(2)]
    states[0] |= {"w": tensor(layout), "opt.state.w.m": state_tensor(layout)}
    require_refused(World(2), states, "w (ranks [0] hold it", "name of its own", "mesh['dp']")


def test_a_tensor_that_cannot_be_sampled_refuses_the_save_at_once_on_every_rank() -> None:
    """A rank that fails while the others wait for its samples must say so."""
    layouts = on((1,), [S0], (0,), (1,))
    broken = tensor(layouts[1])
    world = World(2)

    class Unreadable(np.ndarray):  # type: ignore[type-arg]
        def __getitem__(self, item: object) -> object:
            raise OSError("device lost")

    object.__setattr__(broken, "array", broken.array.view(Unreadable))
    outcomes = save_everywhere(world, [{"w": tensor(layouts[0])}, {"w": broken}])
    assert all(isinstance(each, Exception) and "device lost" in str(each) for each in outcomes), outcomes
    assert world.files() == []
