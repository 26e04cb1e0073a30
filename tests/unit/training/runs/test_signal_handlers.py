"""A signal handler that saves, waits or loads: it does so, or fails at once with a typed error. It never hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast._face.wiring import codecs
from holdfast.backends.alone import AloneComm
from holdfast.base.clock import SystemClock
from holdfast.base.interrupts import GUARD, UnlockedFuture
from holdfast.base.ports.framework import Selection
from holdfast.base.types.reports import SaveReport
from holdfast.core.engine.background import WriteProgress
from holdfast.errors import UnavailableError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import Job
from holdfast.training.runs.saves_in_flight import SavesInFlight
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.saving.save import save_and_wait
from holdfast.training.saving.target import path_save
from tests.doubles.framework import NumpyFramework
from tests.unit.ranks import PATIENT, fresh_store, plain

REPORT = SaveReport(2, "", "0" * 16, 1, 0, 1, True, "copy", 0.1, 0.0, 0.0, 0.2, (), ())
INTERRUPTED = "signal handler that interrupted Holdfast itself"


def test_a_signal_at_each_line_of_a_save_and_a_wait_hangs_nothing_and_both_end_as_they_must(tmp_path: Path) -> None:
    """The handler saves, waits and loads. `interrupted_run.py` checks each save, and the values of the committed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.training.runs.interrupted_run", tmp_path],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    succeeded = sum(count for name, count in outcomes.items() if name.startswith("done"))
    refused = sum(count for name, count in outcomes.items() if name.startswith("refused"))
    assert succeeded > 250, "the signal came at the lines of a save, and most handlers met no lock"
    assert 0 < refused < succeeded / 4, "a block under the lock is a few lines"
    assert outcomes["committed"] > 150


@pytest.fixture
def run() -> Iterator[CheckpointManager]:
    job = Job(AloneComm(), SystemClock(), PATIENT, NumpyFramework(0), codecs=codecs())
    with CheckpointManager.over(fresh_store(), job) as manager:
        manager.save(1, {"w": plain(1.0)}).wait()
        yield manager


def test_a_save_in_a_handler_that_interrupted_holdfast_fails_at_once_and_the_next_is_committed(
    run: CheckpointManager,
) -> None:
    with GUARD:  # As the interrupted call would.
        handle = run.save(2, {"w": plain(2.0)})
    assert handle.committed.done() and isinstance(handle.failure, UnavailableError)
    assert str(handle.failure).startswith("save of step 2: ") and INTERRUPTED in str(handle.failure)
    assert "request_save()" in str(handle.failure), "the way out"
    with pytest.raises(UnavailableError, match=INTERRUPTED):
        run.wait()
    run.save(3, {"w": plain(3.0)}).wait()
    assert run.steps() == [1, 3]


@pytest.mark.parametrize("verb", ["wait", "wait for all", "load", "save by path", "close"])
def test_other_calls_in_such_a_handler_raise_at_once_and_do_their_work_later(run: CheckpointManager, verb: str) -> None:
    pending, state = SaveHandle("save of step 2"), {"w": plain(0.0)}
    run._saves.add(pending)
    request = partial(path_save, run._job, CheckpointLocation(fresh_store(), "", None), state, Selection())
    calls: dict[str, Callable[[], object]] = {
        "wait": pending.wait,
        "wait for all": run.wait,
        "load": lambda: run.load(state),
        "save by path": lambda: save_and_wait(run._job, *request()),
        "close": run.close,
    }
    with pytest.raises(UnavailableError, match=INTERRUPTED), GUARD:
        calls[verb]()
    pending.reach_committed(REPORT)
    calls[verb]()
    assert verb != "load" or state["w"].array[0] == 1.0


def test_what_has_ended_is_told_in_such_a_handler_too() -> None:
    handle = SaveHandle("save of step 2")
    handle.reach_committed(REPORT)
    with GUARD:
        assert handle.wait() is REPORT and handle.wait("staged") is None


def test_a_save_that_a_handler_adds_while_ended_ones_are_forgotten_is_not_lost() -> None:
    saves = SavesInFlight(WriteProgress(SystemClock()))
    of_handler = SaveHandle("save of step 9")

    class Interrupted(UnlockedFuture[SaveReport]):
        is_armed = True

        def done(self) -> bool:
            if Interrupted.is_armed:
                Interrupted.is_armed = False
                saves.add(of_handler)
            return super().done()

    first = SaveHandle("save of step 8")
    first.near = Interrupted()
    saves.add(first)
    for handle in (first, of_handler):
        handle.fail(UnavailableError(f"{handle.name}: no room"))
    with pytest.raises(UnavailableError, match="no room") as raised:
        saves.wait(closing=False)
    assert isinstance(raised.value.__cause__, ExceptionGroup) and len(raised.value.__cause__.exceptions) == 2
