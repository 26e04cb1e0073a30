"""Storage that is small, slow or stalls: the log gives way, and neither training nor a checkpoint pays for the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.store import Store, Upload
from holdfast.errors import UnavailableError
from holdfast.observers import Event, LogInterrupted
from holdfast.training.redo_log import log_memory
from tests.support.redo_log.logged_runs import memory_store

WIDTH = 128
BASE_BYTES = (WIDTH * WIDTH + WIDTH * 9 + 8) * 12 + 40_000


class SmallDisk(ForwardingStore):
    """A store with limited space."""

    def __init__(self, inner: Store, bytes_max: int) -> None:
        super().__init__(inner)
        self._bytes_max = bytes_max
        self.refused: list[str] = []

    def free_bytes(self) -> int:
        return max(self._bytes_max - sum(entry.bytes for entry in self._inner.list()), 0)

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        self._require(key, len(data))
        super().put(key, data, durable=durable)

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        self._require(key, len(data))
        super().put_if_absent(key, data, folders_durable=folders_durable)

    def upload(self, key: str, bytes_max: int, part_bytes: int, **options: Any) -> Upload:
        self._require(key, bytes_max)
        return super().upload(key, bytes_max, part_bytes, **options)

    def _require(self, key: str, count: int) -> None:
        if self.free_bytes() < count:
            self.refused.append(key)
            raise UnavailableError(f"{key}: no space left on device")


class Run:
    """A training whose every step is one matrix product."""

    def __init__(self, store: Store, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.interrupted: list[int] = []
        self.saves: dict[int, holdfast.SaveHandle] = {}
        """Handles of the bases by step."""
        self.trained: dict[int, bytes] = {}
        """Bits of the parameters after each step."""
        self.held_seconds: list[float] = []
        """How long each call of `maybe_save` took."""
        options = {"differential": True, "preemption": False, "process_group": False} | options
        self.manager = holdfast.CheckpointManager(store, observers=[self], **options)

    def on_event(self, event: Event) -> None:
        if isinstance(event, LogInterrupted):
            self.interrupted.append(event.step)

    def train(self, first: int, last: int, after: Callable[[int], None] = lambda step: None) -> None:
        for step in range(first, last + 1):
            self.model(torch.ones(1, WIDTH)).square().mean().backward()
            began = time.monotonic()
            self.optimizer.step()
            self.optimizer.zero_grad()
            handle = self.manager.maybe_save(step, self.state)
            self.held_seconds.append(time.monotonic() - began)
            if handle is not None:
                self.saves[step] = handle
            self.trained[step] = self.bits()
            after(step)

    def bits(self) -> bytes:
        return b"".join(parameter.detach().numpy().tobytes() for parameter in self.model.parameters())

    def settle(self, _: int = 0) -> None:
        """Wait until saves and seals have ended."""
        self.manager.wait()
        assert self.manager._redo_log is not None
        self.manager._redo_log._writer.drain(20)


@pytest.mark.parametrize("bases", [3.2, pytest.param(6.0, marks=pytest.mark.long)])
def test_a_small_disk_refuses_no_save(bases: float) -> None:
    require_no_refusal(bases, grace_seconds=0.0, pause_seconds=0.0)


@pytest.mark.long
def test_a_small_disk_refuses_no_save_within_the_grace_of_a_collection() -> None:
    require_no_refusal(6.0, grace_seconds=0.05, pause_seconds=0.003)


def require_no_refusal(bases: float, *, grace_seconds: float, pause_seconds: float) -> None:
    """Train 400 steps on a disk with room for a few bases; the last step must come back.

    Args:
        bases: Room, in bases.
        grace_seconds: Of a collection.
        pause_seconds: After each step. The policy saves every hundred steps, long after the grace.
    """
    disk = SmallDisk(memory_store(), int(bases * BASE_BYTES))
    run = Run(disk, every=100, keep_last=1, settings=holdfast.Settings(collect_grace_seconds=grace_seconds))

    def settle(step: int) -> None:
        run.settle()
        time.sleep(pause_seconds)

    run.train(1, 401, settle)
    recoverable = run.manager.recoverable
    run.manager.close()

    # No seal begins that would not leave space, so storage refuses nothing.
    assert disk.refused == []
    assert {1, 100, 200, 300, 400} <= {*run.saves}
    # On the smallest disk there is no room for two kept bases, a log and two more bases. On others a collection that
    # comes late may interrupt the log.
    assert recoverable == 400 or (recoverable == 401 and bases > 4)
    require_resumes(run, disk)


class SlowStore(ForwardingStore):
    """A store whose segments and packs take long, or stall until they are released."""

    def __init__(self, inner: Store, seconds: float = 0.0) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.released = threading.Event()
        self.released.set()

    def upload(self, key: str, bytes_max: int, part_bytes: int, **options: Any) -> Upload:
        self.released.wait(60)
        time.sleep(self.seconds)
        return super().upload(key, bytes_max, part_bytes, **options)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two records of this small training be more than the memory of records takes at least."""
    monkeypatch.setattr(log_memory, "_BYTES_MIN", 1)


@pytest.mark.usefixtures("small_memory")
def test_slow_storage_holds_training_for_a_hundredth_of_the_time() -> None:
    """Each seal takes ten steps."""
    store = SlowStore(memory_store(), 0.05)
    run = Run(store, every=1000)
    run.train(1, 60, lambda step: time.sleep(0.005))
    require_few_waits_and_requests(run)
    run.manager.close()
    require_resumes(run, store)


@pytest.mark.usefixtures("small_memory")
def test_stalled_storage_holds_training_for_a_hundredth_of_the_time() -> None:
    store = SlowStore(memory_store())
    run = Run(store, every=1000)
    run.train(1, 5, run.settle)
    store.released.clear()
    run.train(6, 60)
    assert run.interrupted
    require_few_waits_and_requests(run)

    store.released.set()
    run.settle()
    run.manager.save(61, run.state).wait()
    run.train(62, 70, run.settle)
    assert run.manager.recoverable == 70
    run.manager.close()
    require_resumes(run, store)


def require_few_waits_and_requests(run: Run) -> None:
    memory = run.manager._redo_log._memory  # type: ignore[union-attr]
    assert memory.waited_seconds < 1, "a hundredth of a window of a minute, and the overshoot of a busy machine"
    assert sum(run.held_seconds) < memory.waited_seconds + 5, "nothing else holds training"
    assert len(run.saves) <= 3, "the first base, and two that interruptions requested"


def require_resumes(run: Run, store: Store) -> None:
    """Load the last step that was said to be recoverable, with every bit of it."""
    again = Run(store, every=1000)
    step = again.manager.load(again.state)
    assert step is not None and step >= (run.manager.recoverable or 0)
    assert again.bits() == run.trained[step]
    again.manager.close()
