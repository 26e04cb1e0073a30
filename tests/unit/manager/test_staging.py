"""A save that goes on while training does: copied at the call, written behind it, never skipped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import holdfast
from holdfast.errors import UnavailableError
from holdfast.manager.handle import SaveHandle, SaveReport
from holdfast.manager.load import LoadRequest
from holdfast.manager.run import Run
from holdfast.ports.store import Store
from holdfast.settings import Settings
from holdfast.testing.faults import Faults, FaultyStore, Operation
from tests.unit.manager.ranks import ANYTHING, PATIENT, World, fresh_store, plain, saved

WINDOW = PATIENT.window_bytes
ONE_SAVE = replace(PATIENT, arena_bytes_max=3 * WINDOW)
"""Room for one save of `state`: a page of header and 16 KiB."""


def state(value: float) -> dict[str, object]:
    return {"w": plain(value, count=4096)}


class Gate:
    """Holds every window back until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, operation: Operation) -> None:
        self.reached.set()
        assert self.open.wait(20.0)


def gated(settings: Settings, ranks: int = 1) -> tuple[World, Gate]:
    gate = Gate()
    store = fresh_store()
    slow: Store = FaultyStore(store, Faults(gate, names={"upload.write"}, lasting=True))
    return World(ranks, settings=settings, store=store, stores=dict.fromkeys(range(ranks), slow)), gate


def loaded(run: Run, step: int) -> float:
    target = state(0.0)
    run.load(LoadRequest(target, ANYTHING, strict=True, cast=False), step)
    values = set(target["w"].array.tolist())  # type: ignore[attr-defined]
    assert len(values) == 1
    return float(values.pop())


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_while_windows_are_written(ranks: int) -> None:
    world, gate = gated(PATIENT, ranks)
    changed = threading.Barrier(ranks)

    def part(rank: int, run: Run) -> object:
        live = state(1.0)
        handle = run.save(1, live, ANYTHING)
        assert handle.staged.done() and not handle.committed.done()
        live["w"].array[:] = 2.0  # type: ignore[attr-defined]
        changed.wait(20.0)
        gate.open.set()
        report = handle.wait(timeout=20.0)
        assert report is not None and report.overlapped and report.waited_seconds == 0.0
        assert report.committed_seconds >= report.staged_seconds
        return loaded(run, 1)

    assert world.play(part) == [1.0] * ranks


def test_saves_in_flight_keep_their_order_and_their_parents() -> None:
    world, gate = gated(PATIENT)

    def part(rank: int, run: Run) -> object:
        handles = [run.save(step, state(float(step)), ANYTHING) for step in (1, 2, 3)]
        assert all(handle.staged.done() for handle in handles)
        gate.open.set()
        for handle in handles:
            handle.wait(timeout=20.0)
        return [loaded(run, step) for step in (1, 2, 3)]

    assert world.play(part) == [[1.0, 2.0, 3.0]]
    parents = [world.manifest(step).parent for step in (1, 2, 3)]
    assert parents[0] is None
    assert [parent.step for parent in parents[1:] if parent is not None] == [1, 2]


def test_a_save_that_finds_no_memory_waits_and_says_so() -> None:
    world, gate = gated(ONE_SAVE)

    def part(rank: int, run: Run) -> object:
        first = run.save(1, state(1.0), ANYTHING)
        assert gate.reached.wait(20.0)
        threading.Timer(0.2, gate.open.set).start()
        second = run.save(2, state(2.0), ANYTHING)
        reports = [handle.wait(timeout=20.0) for handle in (first, second)]
        assert all(report is not None and report.overlapped for report in reports)
        return [report.waited_seconds for report in reports if report is not None], loaded(run, 1), loaded(run, 2)

    ((waits, one, two),) = world.play(part)  # type: ignore[misc]
    assert waits[0] == 0.0 and waits[1] > 0.1
    assert (one, two) == (1.0, 2.0)


@pytest.mark.parametrize("budget", [0, WINDOW])
def test_a_state_larger_than_the_arena_is_written_before_the_call_returns(budget: int) -> None:
    world, gate = gated(replace(PATIENT, arena_bytes_max=budget))
    gate.open.set()

    def part(rank: int, run: Run) -> object:
        live = state(1.0)
        handle = run.save(1, live, ANYTHING)
        assert gate.reached.is_set()
        live["w"].array[:] = 2.0  # type: ignore[attr-defined]
        report = handle.wait(timeout=20.0)
        assert report is not None and not report.overlapped
        return loaded(run, 1)

    assert world.play(part) == [1.0]


def test_a_write_that_fails_behind_the_call_gives_its_memory_back() -> None:
    """Else the second or third save would wait for slabs that nobody has any more."""

    def fail(operation: Operation) -> None:
        raise UnavailableError("full")

    faults = Faults(fail, names={"upload.write"}, lasting=True)
    store = fresh_store()
    world = World(1, settings=ONE_SAVE, store=store, stores={0: FaultyStore(store, faults)})

    def part(rank: int, run: Run) -> object:
        for step in range(5):
            outcome = saved(run, step, state(1.0))
            assert isinstance(outcome, UnavailableError) and "full" in str(outcome)
        faults.heal()
        return saved(run, 5, state(5.0)), loaded(run, 5)

    ((report, value),) = world.play(part)  # type: ignore[misc]
    assert isinstance(report, SaveReport) and report.overlapped and value == 5.0
    assert world.committed() == [5]


def test_workers_forked_while_a_save_is_in_flight(tmp_path: Path) -> None:
    tensors = {"weights": torch.randn(8 << 20)}
    with holdfast.CheckpointManager(tmp_path, process_group=False) as manager:
        handles: list[SaveHandle] = []

        def batches() -> Iterator[torch.Tensor]:
            loader = DataLoader(list(range(64)), batch_size=8, num_workers=2, multiprocessing_context="fork")
            for step in range(3):
                handles.append(manager.save(step, tensors))
                yield from loader

        assert sum(int(batch.sum()) for batch in batches()) == 3 * sum(range(64))
        for handle in handles:
            handle.wait(timeout=60.0)
        assert manager.steps() == [0, 1, 2]
    for step in range(3):
        assert not list(holdfast.open_checkpoint(tmp_path / f"step-{step:012}").verify())
