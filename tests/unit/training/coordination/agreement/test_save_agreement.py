"""The opening of a save, over threads: who disagrees is refused everywhere, who is silent is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.tensor import Role
from holdfast.base.ports.comm import KeyValueStore
from holdfast.base.types.reports import SaveReport
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError
from tests.doubles.faults import FaultPoint, Faults, FaultyKeyValueStore, FaultyStore, raise_error
from tests.doubles.framework import GlobalTensor
from tests.unit.ranks import HASTY, PATIENT, World, fresh_store, plain, saved, sharded


def require_all(outcomes: list[object], kind: type[CheckpointError], *said: str) -> None:
    assert [type(each) for each in outcomes] == [kind] * len(outcomes), outcomes
    for each in outcomes:
        for words in said:
            assert words in str(each), str(each)


def require_reports(outcomes: list[object]) -> list[SaveReport]:
    assert all(isinstance(each, SaveReport) for each in outcomes), outcomes
    return [each for each in outcomes if isinstance(each, SaveReport)]


def test_skewed_steps_are_refused_on_every_rank_naming_ranks_and_steps() -> None:
    world = World(3)

    def part(rank: int, run: CheckpointManager) -> object:
        refused = saved(run, 11 if rank == 1 else 10, {"w": sharded(3)})
        return refused, saved(run, 12, {"w": sharded(3)})

    outcomes = world.play(part)
    require_all([each[0] for each in outcomes], InvalidError, "step 10 on ranks [0, 2]", "step 11 on ranks [1]")
    require_reports([each[1] for each in outcomes])
    assert world.committed() == [12]


def test_the_refusal_of_a_call_is_raised_at_once_not_kept_in_the_handle() -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        with pytest.raises(InvalidError):
            run.save(10 + rank, {"w": sharded(2)})
        return None

    assert World(2).play(part) == [None, None]


def test_different_paths_are_refused_on_every_rank() -> None:
    world = World(3, stores={2: fresh_store()})
    outcomes = world.play(lambda rank, run: saved(run, 1, {"w": sharded(3)}))
    require_all(outcomes, InvalidError, "ranks [2]", "another path")
    assert world.files() == []


@pytest.mark.parametrize("silent", (0, 1, 3))
def test_a_rank_that_never_calls_is_named_and_the_next_save_works(silent: int) -> None:
    world = World(4, settings=HASTY)
    failed = threading.Barrier(4, timeout=20.0)

    def part(rank: int, run: CheckpointManager) -> object:
        first = None if rank == silent else saved(run, 1, {"w": sharded(4)})
        failed.wait()
        return first, saved(run, 2, {"w": sharded(4)}), saved(run, 3, {"w": sharded(4)})

    outcomes = world.play(part)
    require_all([each[0] for rank, each in enumerate(outcomes) if rank != silent], UnavailableError)
    for rank, each in enumerate(outcomes):
        if rank != silent:
            assert f"rank {silent}" in str(each[0]) or f"ranks [{silent}]" in str(each[0]), str(each[0])
    require_reports([each[1] for each in outcomes])
    require_reports([each[2] for each in outcomes])
    assert world.committed() == [2, 3]


def test_who_never_called_is_named_even_if_rank_0_itself_came_late() -> None:
    """The others lose patience before rank 0 does: they must not blame it."""
    world = World(3, settings=HASTY)

    def part(rank: int, run: CheckpointManager) -> object:
        if rank == 2:
            return None
        # Within the patience of rank 1 and its grace, but so late that rank 0's own ends after them.
        time.sleep(2.5 if rank == 0 else 0.0)
        return saved(run, 1, {"w": sharded(3)})

    outcomes = world.play(part)
    require_all(outcomes[:2], UnavailableError, "ranks [2]")


def test_ranks_that_missed_many_saves_find_their_place_again() -> None:
    world = World(2, settings=HASTY)
    done = threading.Barrier(2, timeout=30.0)

    def part(rank: int, run: CheckpointManager) -> object:
        alone = [saved(run, step, {"w": sharded(2)}) for step in range(4)] if rank == 0 else []
        done.wait()
        return alone, saved(run, 10, {"w": sharded(2)})

    outcomes = world.play(part)
    require_all(outcomes[0][0], UnavailableError, "ranks [1]")
    require_reports([each[1] for each in outcomes])
    assert world.committed() == [10]


@pytest.mark.parametrize("role", (Role.PARAMETER, Role.OPTIMIZER))
def test_plain_tensors_that_must_agree_and_differ_are_refused_naming_fqn_and_ranks(role: Role) -> None:
    world = World(3)

    def part(rank: int, run: CheckpointManager) -> object:
        state = {"same": plain(1.0, role=role), "half": plain(2.0 if rank == 1 else 3.0, role=role)}
        return saved(run, 1, state)

    outcomes = world.play(part)
    require_all(outcomes, InvalidError, "half", "ranks [0] ≠ ranks [1]", "DTensor", "skip=")
    assert not any("same" in str(each) for each in outcomes)
    assert world.files() == []


def test_plain_parameters_that_come_apart_later_are_refused_then() -> None:
    """Hand-written tensor-parallel halves are equal while they are zeros."""
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"half": plain(0.0)}), saved(run, 2, {"half": plain(float(rank))})

    outcomes = world.play(part)
    require_reports([each[0] for each in outcomes])
    require_all([each[1] for each in outcomes], InvalidError, "half")
    assert world.committed() == [1]


def test_plain_parameters_of_different_shapes_are_refused() -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"half": plain(0.0, count=10 + rank)})

    require_all(World(2).play(part), InvalidError, "half", "[10]", "[11]")


def test_a_name_that_is_a_buffer_here_and_a_parameter_there_is_refused() -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"w": plain(0.0, role=Role.BUFFER if rank else Role.PARAMETER), "v": plain(1.0)})

    require_all(World(2).play(part), InvalidError, "w")


def test_buffers_that_differ_come_from_the_lowest_rank_and_are_listed() -> None:
    world = World(3)

    def part(rank: int, run: CheckpointManager) -> object:
        state = {
            "mean": plain(float(rank), role=Role.BUFFER),
            "count": plain(5.0, role=Role.BUFFER),
            "rng": rank,
            "lr": 0.5,
        }
        report = saved(run, 1, state)
        into = {"mean": plain(-1.0, role=Role.BUFFER), "count": plain(-1.0, role=Role.BUFFER), "rng": -1, "lr": -1.0}
        run.load(into, 1)
        return report, into

    outcomes = world.play(part)
    for report in require_reports([each[0] for each in outcomes]):
        assert report.divergent == ("mean", "rng")
    for _, into in outcomes:
        assert into["rng"] == 0
        assert into["lr"] == 0.5
        assert (into["mean"].array == 0.0).all()
        assert (into["count"].array == 5.0).all()
    assert {piece.pack for piece in world.pieces(1)["mean"]} == {"r00000.safetensors"}


def test_ranks_that_hold_different_names_save_their_union() -> None:
    """As the stages of a pipeline do; what two stages share is written once."""
    world = World(4)

    def part(rank: int, run: CheckpointManager) -> object:
        stage = (0, 1) if rank < 2 else (2, 3)
        state: dict[str, object] = {
            f"stage{stage[0]}.w": sharded(0, ranks=stage),
            f"stage{stage[0]}.norm": plain(float(stage[0])),
            "tied": plain(9.0, count=3000),
            f"value{stage[0]}": stage[0],
        }
        report = saved(run, 1, state)
        into = {
            "stage0.w": sharded(4),
            "stage2.w": sharded(4),
            "tied": plain(0.0, count=3000),
            "value0": 1,
            "value2": 1,
        }
        for name in ("stage0.w", "stage2.w"):
            into[name].array[:] = -1.0  # type: ignore[attr-defined]
        run.load(into, 1, strict=False)
        return report, into

    outcomes = world.play(part)
    reports = require_reports([each[0] for each in outcomes])
    assert set(world.pieces(1)) == {"stage0.w", "stage2.w", "stage0.norm", "stage2.norm", "tied"}
    assert len(world.pieces(1)["tied"]) == 1
    assert sum(report.bytes for report in reports) == 2 * 16 * 12 + 2 * 400 + 12000
    for rank, (_, into) in enumerate(outcomes):
        assert (into["value0"], into["value2"]) == (0, 2)
        for name in ("stage0.w", "stage2.w"):
            (box,) = into[name].regions_on(rank)
            assert (into[name].array[box.relative_to((0, 0))] == sharded(4).array[box.relative_to((0, 0))]).all()


def test_plain_parameters_shared_by_two_classes_must_agree_too() -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {f"stage{rank}": plain(1.0), "tied": plain(float(rank))})

    require_all(World(2).play(part), InvalidError, "tied", "ranks [0] ≠ ranks [1]")


def test_a_sharded_name_on_two_disjoint_meshes_of_one_shape_is_stored_once() -> None:
    world = World(4)

    def part(rank: int, run: CheckpointManager) -> object:
        mesh = (0, 1) if rank < 2 else (2, 3)
        return saved(run, 1, {"w": sharded(0, ranks=mesh)})

    outcomes = world.play(part)
    require_reports(outcomes)
    assert sum(piece.bytes for piece in world.pieces(1)["w"]) == 16 * 3 * 4


def test_a_sharded_name_of_which_a_rank_is_missing_is_refused_before_the_first_byte() -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"w": sharded(0, ranks=(0, 1))} if rank == 0 else {"other": plain(1.0)})

    require_all(world.play(part), InvalidError, "w (ranks [0] hold it on mesh [2]", "ranks [1] do not hold it)")
    assert world.files() == []


@pytest.mark.parametrize("failing", (0, 2))
def test_what_one_rank_cannot_save_is_refused_on_all(failing: int) -> None:
    world = World(3)

    def part(rank: int, run: CheckpointManager) -> object:
        state: dict[str, object] = {"w": sharded(3)}
        if rank == failing:
            state["bad"] = InvalidError("bad: of a type that cannot be saved")
        return saved(run, 1, state), saved(run, 2, {"w": sharded(3)})

    outcomes = world.play(part)
    require_all([each[0] for each in outcomes], InvalidError, "bad: of a type that cannot be saved")
    for rank, each in enumerate(outcomes):
        assert rank == failing or f"rank {failing}" in str(each[0]) or failing == 0, str(each[0])
    require_reports([each[1] for each in outcomes])


def test_a_value_outside_the_closed_set_is_refused_on_all_ranks() -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"w": sharded(2), "v": object() if rank else 1})

    require_all(World(2).play(part), InvalidError, "v", "object")


@pytest.mark.parametrize("failing", (0, 1))
def test_a_state_that_fails_in_its_own_code_is_refused_on_all(failing: int) -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        state: dict[str, object] = {"w": sharded(2)}
        if rank == failing:
            state["bad"] = RuntimeError("state_dict broke")
        return saved(run, 1, state), saved(run, 2, {"w": sharded(2)})

    outcomes = World(2).play(part)
    require_all([each[0] for each in outcomes], InvalidError, "RuntimeError: state_dict broke")
    require_reports([each[1] for each in outcomes])


def test_a_name_that_is_no_text_is_refused_on_all_ranks() -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"\ud800" if rank else "w": plain(1.0)})

    require_all(World(2, settings=PATIENT).play(part), InvalidError)


def test_saving_onto_a_checkpoint_is_a_conflict_on_every_rank_and_touches_nothing() -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> object:
        first = saved(run, 1, {"w": sharded(2)})
        return first, saved(run, 1, {"w": sharded(2)})

    outcomes = world.play(part)
    require_reports([each[0] for each in outcomes])
    require_all([each[1] for each in outcomes], ConflictError, "already there")
    folders = {name.split("/")[1] for name in world.files() if name.startswith("step-")} - {"reports"}
    assert len(folders) == 2


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_the_board_does_not_grow_with_the_number_of_saves(world_size: int) -> None:
    boards: list[Callable[[], list[str]]] = []
    counts: list[int] = []
    here = threading.Barrier(world_size, timeout=30.0)

    def keep(key_value_store: object) -> object:
        boards.append(key_value_store.keys)  # type: ignore[attr-defined]
        return key_value_store

    world = World(world_size, boards={0: keep})  # type: ignore[dict-item]

    def part(rank: int, run: CheckpointManager) -> object:
        found = []
        for step in range(12):
            found.append(saved(run, step, {"w": sharded(world_size), "b": plain(float(rank), role=Role.BUFFER)}))
            here.wait()
            if rank == 0:
                counts.append(len(boards[0]()))
            here.wait()
        return found

    for found in world.play(part):
        require_reports(found)  # type: ignore[arg-type]
    assert max(counts[6:]) <= max(counts[:6]) + world_size, counts


def test_the_keys_of_failed_saves_go_with_the_next_commit() -> None:
    """Rank 0 aborts each second save before it votes; one of its calls that delete keys fails too."""
    boards: list[Callable[[], list[str]]] = []
    counts: list[int] = []
    here = threading.Barrier(2, timeout=30.0)
    failing = threading.Event()

    def fail(operation: FaultPoint) -> None:
        if failing.is_set():
            raise UnavailableError("no space")

    def hold(operation: FaultPoint) -> None:
        while failing.is_set() and not any(key.endswith("/result") for key in boards[0]() if key not in known):
            time.sleep(0.001)

    known: set[str] = set()
    store = fresh_store()
    broken = FaultyStore(store, Faults(fail, names=("upload.write",), lasting=True))
    slow = FaultyStore(store, Faults(hold, names=("upload.write",), lasting=True))
    deleting = Faults(raise_error(UnavailableError), at=8, names=("delete",))

    def view(key_value_store: KeyValueStore) -> KeyValueStore:
        boards.append(key_value_store.keys)  # type: ignore[attr-defined]
        return FaultyKeyValueStore(key_value_store, deleting)

    world = World(2, store=store, stores={0: broken, 1: slow}, boards={0: view})

    def part(rank: int, run: CheckpointManager) -> None:
        for step in range(24):
            here.wait()
            known.update(boards[0]())
            if rank == 0:
                failing.set() if step % 2 else failing.clear()
            here.wait()
            outcome = saved(run, step, {"w": sharded(2)})
            assert isinstance(outcome, UnavailableError) == bool(step % 2), outcome
            here.wait()
            if rank == 0 and not step % 2:
                counts.append(len(boards[0]()))

    world.play(part)
    assert deleting.met
    assert max(counts[9:]) <= max(counts[3:6]) + 2, counts


def test_a_job_of_one_rank_needs_nobody() -> None:
    world = World(1)
    tensor = GlobalTensor("int64", np.arange(10))
    require_reports(world.play(lambda rank, run: saved(run, 1, {"w": tensor, "v": {1, 2}})))
    assert world.committed() == [1]


def test_the_same_step_tried_again_is_joined_by_a_rank_that_skipped_it() -> None:
    """Who skipped a save must not take the retry, which has the same step, for the save it missed."""
    world = World(3, settings=HASTY)
    retrying = threading.Event()

    def part(rank: int, run: CheckpointManager) -> object:
        if rank == 2:
            assert retrying.wait(20.0)
            return saved(run, 1, {"w": sharded(3)})
        first = saved(run, 1, {"w": sharded(3)})
        assert isinstance(first, UnavailableError), first
        opened = threading.Timer(0.3, retrying.set)
        opened.start()
        return saved(run, 1, {"w": sharded(3)})

    require_reports(world.play(part))
    assert world.committed() == [1]
