"""A run whose signal handler saves, waits and loads, while saves of the main thread are at each of their lines.

Run by `test_signal_handlers.py` in a process of its own: a hang ends it with the stacks of all threads.
Argument: the folder. Prints the outcomes as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast._face.wiring import codecs
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.framework import Selection
from holdfast.errors import UnavailableError
from holdfast.policies import EveryNSteps, LatestN, Policies
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import Job
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.saving.save import save_and_wait
from holdfast.training.saving.target import path_save
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned

HANG_SECONDS = 30.0
WATCHED = {
    "threading.py", "interrupts.py", "gc_pause.py", "background.py", "arena.py", "staging.py", "handle.py", "save.py",
    "attempt.py", "transfer.py", "overwrite.py", "save_schedule.py", "saves_in_flight.py",
}  # fmt: skip
"""Modules at whose lines a signal comes."""


def holding(value: float) -> dict[str, object]:
    return {"w": GlobalTensor("float32", np.full(3000, value, np.float32))}


class InterruptedRun:
    """A manager, and the handler that uses it once at each line of the main thread in `WATCHED`."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self.root, self.settings = root, settings
        self.manager, self.reader = self.manager_at("0"), self.manager_at("read")
        self.reader.save(1, holding(1.0)).wait()
        self.step, self.managers = 0, 1
        self.outcomes: Counter[str] = Counter()
        self.saved: list[tuple[CheckpointManager, int, SaveHandle]] = []
        self._seen: set[tuple[str, int]] = set()
        signal.signal(signal.SIGUSR1, self.handle)

    def manager_at(self, name: str) -> CheckpointManager:
        job = Job(AloneComm(), SystemClock(), self.settings, NumpyFramework(0), codecs=codecs())
        return CheckpointManager.over(
            LocalStore(self.root / name, settings=self.settings),
            job,
            policies=Policies(EveryNSteps(1), LatestN(100_000)),
        )

    def save(self) -> SaveHandle:
        self.step += 1
        step, manager = self.step, self.manager
        handle = manager.save(step, holding(float(step)))
        self.saved.append((manager, step, handle))
        return handle

    def handle(self, *_: object) -> None:
        """Handle a signal: save and wait for that, or save, or wait for all, or load; in turn."""
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        turn = len(self._seen) % 4
        acts: tuple[Callable[[], object], ...] = (lambda: self.save().wait(), self.save, self.manager.wait, self.load)
        try:
            acts[turn]()
        except UnavailableError as error:
            assert "signal handler that interrupted Holdfast itself" in str(error), error
            self.outcomes[f"refused {turn}"] += 1
        else:
            self.outcomes[f"done {turn}"] += 1

    def wait(self) -> None:
        """Wait for every save of the manager. Those that were refused in the handler have failed."""
        with suppress(UnavailableError):
            self.manager.wait()

    def load(self) -> None:
        state = holding(-1.0)
        assert self.reader.load(state) == 1 and value_of(state) == 1.0

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        name = path.rpartition("/")[2]
        if name not in WATCHED or ("holdfast" not in path and path != threading.__file__):
            return None
        site = path, frame.f_lineno
        if event == "line" and site not in self._seen:
            self._seen.add(site)
            signal.raise_signal(signal.SIGUSR1)
        return self.trace

    def interrupted(self, act: Callable[[], object]) -> None:
        """Do something on this thread until no signal came at a new line."""
        before = -1
        while before < len(self._seen):
            before = len(self._seen)
            sys.settrace(self.trace)
            try:
                act()
            finally:
                sys.settrace(None)

    def check(self) -> None:
        """Each save has ended as it must, and what is committed has its values."""
        for number, (manager, step, handle) in enumerate(self.saved):
            failure = handle.failure
            assert handle.committed.done()
            if failure is not None:
                assert isinstance(failure, UnavailableError) and "signal handler" in str(failure), failure
                self.outcomes["failed"] += 1
                continue
            self.outcomes["committed"] += 1
            if number % 40 == 0:
                state = holding(-1.0)
                manager.load(state, step)
                assert value_of(state) == step


def value_of(state: dict[str, object]) -> float:
    tensor = state["w"]
    assert isinstance(tensor, GlobalTensor)
    assert (tensor.array == tensor.array[0]).all()
    return float(tensor.array[0])


def main(root: Path) -> None:
    logging.disable(logging.CRITICAL)  # Handlers of logging have locks of their own.
    run = InterruptedRun(root, tuned(Settings(chunk_bytes=4096, reports=False), window_bytes=8192))

    def first_saves() -> None:
        """Save with a new manager: its threads are started."""
        run.manager = run.manager_at(str(run.managers))
        run.managers += 1
        run.save().wait("staged")
        run.save().wait()
        run.wait()

    def by_path() -> None:
        location = CheckpointLocation(LocalStore(root / "single", settings=run.settings), "", None)
        request = path_save(run.manager._job, location, holding(1.0), Selection(), overwrite=True)
        save_and_wait(run.manager._job, *request)

    run.interrupted(first_saves)
    run.interrupted(by_path)
    run.wait()
    run.check()
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(run.outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
