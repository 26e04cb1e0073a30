"""A save that is cancelled ends on every rank, says why, and leaves nothing on storage."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.core.format.names import step_folder
from holdfast.errors import ConflictError, UnavailableError
from holdfast.settings import KIB, MIB, Settings
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.support.tuning import tuned
from tests.unit.ranks import World, fresh_store, plain, saved


class Gate:
    """Holds operations of step 2 on keys that contain a text until it is opened."""

    def __init__(self, text: str) -> None:
        self.text, self.reached, self.opened = text, threading.Event(), threading.Event()

    def __call__(self, operation: FaultPoint) -> None:
        if operation.subject.startswith(step_folder(2)) and self.text in operation.subject:
            self.reached.set()
            assert self.opened.wait(30.0)

    def world(self, ranks: int) -> World:
        """Return ranks of which rank 0 meets the gate, or whichever publishes."""
        store = fresh_store()
        held = FaultyStore(store, Faults(self, names=("upload.write", "put_if_absent"), lasting=True))
        return World(ranks, store=store, stores=dict.fromkeys(range(ranks if "manifest" in self.text else 1), held))


def state_of(value: float) -> dict[str, object]:
    return {"a": plain(value, count=8192), "b": plain(value + 1, count=8192)}


@pytest.mark.parametrize("held", ["safetensors", "parts/"])
@pytest.mark.parametrize(("ranks", "cancels"), [(1, 0), (2, 0), (2, 1)])
def test_a_cancelled_save_ends_on_every_rank_and_leaves_nothing(ranks: int, cancels: int, held: str) -> None:
    """Rank 0 is in the midst of a write; rank 1 has most likely voted."""
    gate, cancelled, ended = Gate(held), threading.Event(), threading.Barrier(ranks, timeout=30.0)
    world = gate.world(ranks)

    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, state_of(1.0))
        handle = run.save(2, state_of(2.0))
        assert gate.reached.wait(20.0)
        if rank == cancels:
            assert handle.cancel("the loss is no number")
            cancelled.set()
        assert cancelled.wait(20.0)
        gate.opened.set()
        with pytest.raises(ConflictError) as caught:
            handle.wait(timeout=20.0)
        assert not handle.cancel("again"), "it has ended"
        ended.wait()
        left = [key for key in world.files() if key.startswith(step_folder(2))]
        ended.wait()
        assert not isinstance(saved(run, 3, state_of(3.0)), Exception)
        return str(caught.value), left

    for rank, outcome in enumerate(world.play(part)):
        assert isinstance(outcome, tuple), outcome
        said, left = outcome
        assert "save of step 2: cancelled: the loss is no number" in said and not left
        assert rank == cancels or f"rank {cancels} aborted: " in said
    assert world.committed() == [1, 3]


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_save_that_is_being_published_is_not_cancelled(ranks: int) -> None:
    gate, asked = Gate("manifest.json"), threading.Barrier(ranks, timeout=30.0)
    world = gate.world(ranks)

    def part(_: int, run: CheckpointManager) -> bool:
        handle = run.save(2, state_of(2.0))
        assert gate.reached.wait(20.0)
        cancelled = handle.cancel("too late")
        asked.wait()
        gate.opened.set()
        assert handle.wait(timeout=20.0) is not None
        return cancelled or handle.cancel("committed")

    assert world.play(part) == [False] * ranks
    assert world.committed() == [2]


def test_a_save_that_has_failed_is_not_cancelled() -> None:
    store = fresh_store()
    failing = FaultyStore(store, Faults(raise_error(UnavailableError), names=("upload.write",), lasting=True))

    def part(_: int, run: CheckpointManager) -> None:
        handle = run.save(2, state_of(2.0))
        with pytest.raises(UnavailableError):
            handle.wait(timeout=20.0)
        assert not handle.cancel("too late")
        assert isinstance(handle.failure, UnavailableError)

    assert World(1, store=store, stores={0: failing}).play(part) == [None]


def test_a_lazy_save_is_cancelled_before_it_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies wait for memory; the next optimizer step waits no longer."""
    writing, opened, real = threading.Event(), threading.Event(), Syscalls.pwrite

    def pwrite(self: Syscalls, descriptor: int, data: memoryview, offset: int) -> int:
        if len(data) > 100_000:
            writing.set()
            assert opened.wait(30.0)
        return real(self, descriptor, data, offset)

    monkeypatch.setattr(Syscalls, "pwrite", pwrite)
    module = torch.nn.Linear(512, 2048)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    settings = tuned(Settings(staging="lazy", arena_bytes_max=MIB, deduplicate=False), window_bytes=256 * KIB)
    state = {"model": module, "optimizer": optimizer}
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, settings=settings) as manager:
        handle = manager.save(1, state)
        assert writing.wait(20.0) and not handle.staged.done()
        assert handle.cancel("a newer step is better")
        threading.Timer(0.2, opened.set).start()
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
        assert handle.wait("staged", timeout=0.0) is None, "training may change the state"
        with pytest.raises(ConflictError, match="a newer step is better"):
            handle.wait(timeout=20.0)
        assert not list((tmp_path / "run" / step_folder(1)).rglob("*.*"))
        manager.save(2, state).wait()
        assert manager.steps() == [2]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR], "its handle was waited for"
