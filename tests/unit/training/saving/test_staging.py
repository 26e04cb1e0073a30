"""A save that goes on while training does: copied at the call, written behind it, never skipped."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.utils.data import DataLoader

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import SaveReport
from holdfast.errors import InvalidError, UnavailableError
from holdfast.settings import Settings
from holdfast.training.saving.handle import SaveHandle
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.unit.ranks import PATIENT, World, fresh_store, plain, saved

WINDOW = PATIENT._tuning.window_bytes
ONE_SAVE = replace(PATIENT, arena_bytes_max=3 * WINDOW)
"""Room for one save of `state`: a page of header and 16 KiB."""


def state(value: float) -> dict[str, object]:
    return {"w": plain(value, count=4096)}


class Gate:
    """Holds every window back until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, operation: FaultPoint) -> None:
        self.reached.set()
        assert self.open.wait(20.0)


def gated(settings: Settings, ranks: int = 1) -> tuple[World, Gate]:
    gate = Gate()
    store = fresh_store()
    slow: Store = FaultyStore(store, Faults(gate, names={"upload.write"}, lasting=True))
    return World(ranks, settings=settings, store=store, stores=dict.fromkeys(range(ranks), slow)), gate


def loaded(run: CheckpointManager, step: int | None) -> float:
    target = state(0.0)
    run.load(target, step)
    values = set(target["w"].array.tolist())  # type: ignore[attr-defined]
    assert len(values) == 1
    return float(values.pop())


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_while_windows_are_written(ranks: int) -> None:
    world, gate = gated(PATIENT, ranks)
    changed = threading.Barrier(ranks)

    def part(rank: int, run: CheckpointManager) -> object:
        live = state(1.0)
        handle = run.save(1, live)
        assert handle.staged.done() and not handle.committed.done()
        live["w"].array[:] = 2.0  # type: ignore[attr-defined]
        changed.wait(20.0)
        gate.open.set()
        report = handle.wait(timeout=20.0)
        assert report is not None and report.staging == "copy" and report.waited_seconds == 0.0
        assert report.committed_seconds >= report.staged_seconds
        return loaded(run, 1)

    assert world.play(part) == [1.0] * ranks


def test_saves_in_flight_keep_their_order_and_their_parents() -> None:
    world, gate = gated(PATIENT)

    def part(rank: int, run: CheckpointManager) -> object:
        handles = [run.save(step, state(float(step))) for step in (1, 2, 3)]
        assert all(handle.staged.done() for handle in handles)
        gate.open.set()
        for handle in handles:
            handle.wait(timeout=20.0)
        return [loaded(run, step) for step in (1, 2, 3)]

    assert world.play(part) == [[1.0, 2.0, 3.0]]
    parents = [world.manifest(step).parent for step in (1, 2, 3)]
    assert parents[0] is None
    assert [parent.step for parent in parents[1:] if parent is not None] == [1, 2]


def test_a_load_while_a_save_is_under_way_does_not_change_its_parent() -> None:
    world, gate = gated(PATIENT)

    def part(rank: int, run: CheckpointManager) -> object:
        gate.open.set()
        for step in (80, 90):
            assert isinstance(saved(run, step, state(float(step))), SaveReport)
        gate.open.clear()
        pending = run.save(100, state(100.0))
        # Step 90, as rank 0 finds it: step 100 is not there yet.
        assert loaded(run, None) == 90.0
        gate.open.set()
        pending.wait(timeout=20.0)
        return saved(run, 110, state(110.0))

    (report,) = world.play(part)
    assert isinstance(report, SaveReport)
    parents = {step: world.manifest(step).parent for step in (90, 100, 110)}
    assert {step: parent.step for step, parent in parents.items() if parent is not None} == {90: 80, 100: 90, 110: 90}


def test_a_save_whose_predecessor_failed_continues_what_that_one_did() -> None:
    def fail(operation: FaultPoint) -> None:
        if "step-000000000002" in operation.subject:
            raise UnavailableError("full")

    store = fresh_store()
    slow: Store = FaultyStore(store, Faults(fail, names={"upload"}, lasting=True))
    world = World(1, store=store, stores={0: slow})

    def part(rank: int, run: CheckpointManager) -> object:
        handles = [run.save(step, state(float(step))) for step in (1, 2, 3)]
        with pytest.raises(UnavailableError, match="full"):
            handles[1].wait(timeout=20.0)
        return [handles[number].wait(timeout=20.0) for number in (0, 2)]

    assert world.play(part) and world.committed() == [1, 3]
    parent = world.manifest(3).parent
    assert parent is not None and parent.step == 1


def test_a_save_that_finds_no_memory_waits_and_says_so() -> None:
    world, gate = gated(ONE_SAVE)

    def part(rank: int, run: CheckpointManager) -> object:
        first = run.save(1, state(1.0))
        assert gate.reached.wait(20.0)
        threading.Timer(0.2, gate.open.set).start()
        second = run.save(2, state(2.0))
        reports = [handle.wait(timeout=20.0) for handle in (first, second)]
        assert all(report is not None and report.staging == "copy" for report in reports)
        return [report.waited_seconds for report in reports if report is not None], loaded(run, 1), loaded(run, 2)

    ((waits, one, two),) = world.play(part)  # type: ignore[misc]
    assert waits[0] == 0.0 and waits[1] > 0.1
    assert (one, two) == (1.0, 2.0)


@pytest.mark.parametrize("budget", [0, WINDOW])
def test_a_state_larger_than_the_arena_is_written_before_the_call_returns(budget: int) -> None:
    world, gate = gated(replace(PATIENT, arena_bytes_max=budget))
    gate.open.set()

    def part(rank: int, run: CheckpointManager) -> object:
        live = state(1.0)
        handle = run.save(1, live)
        assert gate.reached.is_set()
        live["w"].array[:] = 2.0  # type: ignore[attr-defined]
        report = handle.wait(timeout=20.0)
        assert report is not None and report.staging == "none"
        return loaded(run, 1)

    assert world.play(part) == [1.0]


def test_a_write_that_fails_behind_the_call_gives_its_memory_back() -> None:
    """Else the second or third save would wait for buffers that nobody has any more."""

    def fail(operation: FaultPoint) -> None:
        raise UnavailableError("full")

    faults = Faults(fail, names={"upload.write"}, lasting=True)
    store = fresh_store()
    world = World(1, settings=ONE_SAVE, store=store, stores={0: FaultyStore(store, faults)})

    def part(rank: int, run: CheckpointManager) -> object:
        for step in range(5):
            outcome = saved(run, step, state(1.0))
            assert isinstance(outcome, UnavailableError) and "full" in str(outcome)
        faults.heal()
        return saved(run, 5, state(5.0)), loaded(run, 5)

    ((report, value),) = world.play(part)  # type: ignore[misc]
    assert isinstance(report, SaveReport) and report.staging == "copy" and value == 5.0
    assert world.committed() == [5]


@pytest.mark.parametrize("error", [RuntimeError("no thread"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_save_that_is_not_handed_on_is_lost_at_once(error: BaseException) -> None:
    """What ends the call after the copy must not leave memory lent, the handle open or the other ranks waiting."""
    world = World(2, settings=ONE_SAVE)

    def part(rank: int, run: CheckpointManager) -> object:
        submit = run._job.commits.submit

        def refuse(*_: object) -> object:
            raise error

        if rank == 0:
            run._job.commits.submit = refuse  # type: ignore[method-assign, assignment]
            if isinstance(error, Exception):
                failed = saved(run, 1, state(1.0))
            else:
                with pytest.raises(KeyboardInterrupt):
                    run.save(1, state(1.0))
                failed = run._saves._handles
            run._job.commits.submit = submit  # type: ignore[method-assign]
        else:
            failed = saved(run, 1, state(1.0))
        arena = run._job.arena
        assert len(arena._free) == arena._count
        return failed, saved(run, 2, state(2.0)), loaded(run, 2)

    (first, *_), (told, report, value) = world.play(part)  # type: ignore[misc]
    assert isinstance(told, UnavailableError) and "rank 0" in str(told)
    assert isinstance(first, UnavailableError) or first == []
    assert isinstance(report, SaveReport) and value == 2.0
    assert world.committed() == [2]


def test_a_forked_child_does_not_save_with_its_parents_manager(tmp_path: Path) -> None:
    """Its memory is the parent's: it would write into copies that are not yet hashed."""
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(1, {"w": torch.ones(1000)}).wait()
        holdfast.async_save(tmp_path / "one", {"w": torch.ones(3)}, process_group=False).wait()
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(InvalidError, match="forked"):
                    manager.save(2, {"w": torch.zeros(1000)})
                holdfast.async_save(tmp_path / "two", {"w": torch.ones(3)}, process_group=False).wait(timeout=20.0)
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert manager.steps() == [1]
    assert not list(holdfast.open_checkpoint(tmp_path / "two").verify())


@pytest.mark.parametrize("staging", ["copy", "lazy"])
def test_workers_forked_while_a_save_is_in_flight(tmp_path: Path, staging: Literal["copy", "lazy"]) -> None:
    model = torch.nn.Linear(2048, 4096)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    settings = Settings(staging=staging)
    with holdfast.CheckpointManager(tmp_path, process_group=False, settings=settings) as manager:
        handles: list[SaveHandle] = []

        def batches() -> Iterator[torch.Tensor]:
            loader = DataLoader(list(range(64)), batch_size=8, num_workers=2, multiprocessing_context="fork")
            for step in range(3):
                handles.append(manager.save(step, state))
                yield from loader

        assert sum(int(batch.sum()) for batch in batches()) == 3 * sum(range(64))
        reports = [handle.wait(timeout=60.0) for handle in handles]
        assert [report.staging for report in reports if report is not None] == [staging] * 3
        assert manager.steps() == [0, 1, 2]
    for step in range(3):
        assert not list(holdfast.open_checkpoint(tmp_path / f"step-{step:012}").verify())
