"""Going back to an older step: saves are refused at once, nothing is removed, and a new root goes on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

import holdfast
from holdfast.checkpoint_manager import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.coordination.job import Job
from holdfast.errors import CorruptError, InvalidError, UnavailableError
from holdfast.policies import LatestN, Policies
from holdfast.repository.catalog import committed_steps, read_run_id
from holdfast.settings import Settings
from holdfast.stores.local import LocalStore
from holdfast.testing.comm import ThreadComm, outcomes_of_ranks
from holdfast.testing.faults import FaultPoint, Faults, FaultyStore
from holdfast.testing.framework import NumpyFramework
from holdfast.types.removal import Unreferenced
from tests.unit.ranks import PATIENT, World, fresh_store, plain, run_of, saved, sharded

SETTINGS = Settings(chunk_bytes=4096, window_bytes=8192, collect_grace_seconds=0.0)


def state_of(step: int) -> dict[str, object]:
    return {"weights": torch.full((3000,), float(step)), "step": step}


def manager_at(root: Path, every: int | None = None, keep_last: int | None = None) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        root, every=every, keep_last=keep_last, process_group=False, preemption=False, settings=SETTINGS
    )


def save_steps(root: Path, *steps: int) -> None:
    with manager_at(root) as manager:
        for step in steps:
            manager.save(step, state_of(step)).wait()


def step_path(root: Path, step: int) -> Path:
    return root / f"step-{step:012d}"


def test_a_save_after_going_back_raises_in_the_call(tmp_path: Path) -> None:
    save_steps(tmp_path, 100, 200, 300, 400, 500, 600)
    with manager_at(tmp_path, every=100) as manager:
        assert manager.load(state_of(0), step=200) == 200
        said = (
            r"step 200 was loaded, and 4 newer steps exist \(300, 400, 500 and 1 more\); "
            "going back .* is not yet supported"
        )
        # A free number, a taken one, one above all: each would make a second history in this root.
        for step in (250, 300, 700):
            with pytest.raises(InvalidError, match=said):
                manager.save(step, state_of(step))
        # Not only where a save is due: training would be lost until then.
        with pytest.raises(InvalidError, match=said):
            manager.maybe_save(201, state_of(201))
    with manager_at(tmp_path) as manager:
        assert manager.steps() == [100, 200, 300, 400, 500, 600]


def test_every_rank_raises_the_same_without_the_others() -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> list[str]:
        state = {"w": sharded(2), "p": plain(1.0)}
        for step in (1, 2, 3):
            saved(run, step, state)
        assert run.load(state, 1) == 1
        said = []
        # Each rank knows it since the load, so none waits for another.
        for step in (2,) if rank else (2, 4, 5):
            with pytest.raises(InvalidError) as refused:
                run.save(step, state)
            said.append(str(refused.value))
        return said

    first, second = world.play(part)
    assert len({*first, *second}) == 1 and "2 newer steps exist (2, 3)" in first[0]  # type: ignore[misc]
    assert world.committed() == [1, 2, 3]


def test_the_way_out_that_the_refusal_names_works(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_steps(old, 100, 200, 300)
    state = state_of(0)
    with manager_at(old) as manager:
        manager.load(state, step=100)
        with pytest.raises(InvalidError) as refused:
            manager.save(200, state)
    (path,) = re.findall(r'holdfast\.load\("([^"]+)", state\)', str(refused.value))
    state = state_of(0)
    with manager_at(new) as manager:
        assert manager.load(state) is None
        assert holdfast.load(path, state, process_group=False).step == 100
        assert state["step"] == 100 and torch.equal(state["weights"], state_of(100)["weights"])  # type: ignore[arg-type]
        for step in (101, 200):
            manager.save(step, state_of(-step)).wait()
    with manager_at(new) as manager:
        assert manager.load(state) == 200 and state["step"] == -200
    with manager_at(old) as manager:
        assert manager.load(state) == 300


@pytest.mark.parametrize("newest", [None, 3])
def test_loading_the_newest_again_allows_saves(tmp_path: Path, newest: int | None) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with manager_at(tmp_path) as manager:
        manager.load(state_of(0), step=1)
        with pytest.raises(InvalidError, match="going back"):
            manager.save(4, state_of(4))
        assert manager.load(state_of(0), newest) == 3
        manager.save(4, state_of(4)).wait()


def test_the_newest_step_asked_for_by_number_is_no_going_back(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with manager_at(tmp_path) as manager:
        assert manager.load(state_of(0), step=2) == 2
        for step in (3, 4):
            manager.save(step, state_of(step)).wait()


def test_a_load_that_fails_leaves_the_run_where_it_was(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path, 1)
    with manager_at(tmp_path) as manager:
        assert manager.load(state_of(0)) == 2
        with pytest.raises(CorruptError):
            manager.load(state_of(0), step=1)
        manager.save(3, state_of(3)).wait()


def damage(root: Path, step: int) -> None:
    (pack,) = step_path(root, step).glob("*/*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)


def test_falling_back_past_a_damaged_step_is_no_going_back(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path, 2)
    with manager_at(tmp_path) as manager:
        assert manager.load(state_of(0)) == 1
        manager.save(2, state_of(2)).wait()
        assert manager.load(state_of(0)) == 2


def test_newer_steps_under_quarantine_do_not_count(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path, 2)
    with manager_at(tmp_path) as manager:
        assert manager.load(state_of(0)) == 1
    with manager_at(tmp_path) as manager:
        # The step that a resume takes, asked for by its number.
        assert manager.load(state_of(0), step=1) == 1
        manager.save(2, state_of(2)).wait()
        assert manager.load(state_of(0), step=1) == 1
        with pytest.raises(InvalidError, match=r"a newer step exists \(2\)"):
            manager.save(3, state_of(3))


def test_a_newer_save_still_under_way_counts() -> None:
    def part(rank: int, run: CheckpointManager) -> None:
        saved(run, 1, {"p": plain(1.0)})
        # As while a save of step 5 is in the background.
        run._parts.pins.pin(5, None)
        run.load({"p": plain(0.0)}, 1)
        with pytest.raises(InvalidError, match=r"a newer step exists \(5\)"):
            run.save(2, {"p": plain(2.0)})

    assert World(1).play(part) == [None]


def test_a_newer_step_that_cannot_be_looked_at_fails_no_load_and_counts() -> None:
    store = fresh_store()

    def work(comm: ThreadComm) -> None:
        run = run_of(comm, store)
        for step in (1, 2):
            saved(run, step, {"p": plain(float(step))})
        run.close()

        def fail(operation: FaultPoint) -> None:
            if "000002" in operation.subject:
                raise UnavailableError("the disk does not answer")

        faults = Faults(fail, names=("get", "size"), lasting=True)
        run = run_of(comm, FaultyStore(store, faults))
        assert run.load({"p": plain(0.0)}, 1) == 1
        with pytest.raises(InvalidError, match=r"a newer step exists \(2\)"):
            run.save(3, {"p": plain(3.0)})
        assert faults.met

    assert outcomes_of_ranks(1, work) == [None]


@pytest.mark.parametrize("moment", ["before", "in the grace", "at the second look"])
def test_nothing_is_collected_once_training_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    with manager_at(tmp_path, keep_last=2) as manager:
        run = manager
        assert run._parts.collecting is not None
        run._parts.writer_lease.hold(str(read_run_id(LocalStore(tmp_path, settings=SETTINGS))))
        confirmed_by = Unreferenced.confirmed_by

        def go_back() -> None:
            # A step that stays anyhow: what is about to be removed cannot be loaded any more.
            assert manager.load(state_of(0), step=3) == 3

        def wait(_: float) -> bool:
            if moment == "in the grace":
                go_back()
            return False

        def confirmed(own: Unreferenced, later: Unreferenced) -> Unreferenced:
            if moment == "at the second look":
                go_back()
            return confirmed_by(own, later)

        monkeypatch.setattr(Unreferenced, "confirmed_by", confirmed)
        if moment == "before":
            go_back()
        assert run._parts.collecting._collector.collect(0.0, wait) is None
        assert manager.steps() == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        assert list(holdfast.open_checkpoint(step_path(tmp_path, step)).verify()) == []


def test_a_save_that_commits_after_training_went_back_has_nothing_collected() -> None:
    store, released = fresh_store(), Event()

    def stall(operation: FaultPoint) -> None:
        if operation.subject.endswith("000003/manifest.json"):
            released.wait(20.0)

    slow = FaultyStore(store, Faults(stall, names=("put_if_absent",), lasting=True))

    def work(comm: ThreadComm) -> None:
        job = Job(comm, SystemClock(), replace(PATIENT, collect_grace_seconds=0.0), NumpyFramework(0))
        run = CheckpointManager.over(slow, job, policies=Policies(keep=LatestN(2)))
        for step in (1, 2):
            saved(run, step, {"p": plain(float(step))})
        handle = run.save(3, {"p": plain(3.0)})
        run.load({"p": plain(0.0)}, 2)
        released.set()
        handle.wait()
        assert run._parts.pins.current_step == 2, "training goes on from there"
        assert run._parts.collecting is not None
        assert run._parts.collecting._collector.collect(0.0, lambda _: False) is None
        run.close()

    assert outcomes_of_ranks(1, work) == [None]
    assert committed_steps(store) == [1, 2, 3]
