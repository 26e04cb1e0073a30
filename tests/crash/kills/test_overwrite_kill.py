"""Processes that overwrite one checkpoint are killed, stopped and set against each other: one is there, whole."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.errors import CheckpointError, ConflictError
from holdfast.training.coordination.job import Job
from holdfast.training.loading.load import load_checkpoint
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.step_choice import StepChoice
from holdfast.training.saving.save import begin_save
from tests.crash.kills.sweeping import fates_of_kills
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import NumpyFramework
from tests.support.crashed_run import (
    Ending,
    FaultyComm,
    is_of_reports,
    local_store,
    paths_under,
)
from tests.support.overwritten_checkpoint import (
    EVERYTHING,
    HASTY,
    PATIENT,
    attempt_at,
    attempts_at,
    job_of,
    location_of,
    number_at,
    number_in,
    request,
    save,
    state_of,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(300),
]

STRIDE = int(os.environ.get("GO_BACK_STRIDE", "13"))
"""Distance of the system calls at which a process dies; `make campaign` tries every one."""

ROUNDS = int(os.environ.get("EPOCH_RACE_ROUNDS", "8"))
"""`make campaign` asks for more."""

OLD, NEW, NEXT = 2, 3, 4
"""Saves: there before the fault, under the fault, after it."""

Saver = Callable[[Path, Faults], None]


def over_syscalls(best: Path, faults: Faults) -> None:
    """Every call to the operating system counts: open, pwrite, fsync, link, rename, unlink …"""
    save(local_store(best, faults), NEW)


def over_syscalls_alone(best: Path, faults: Faults) -> None:
    """The same while nothing is removed: on another thread that happens before the commit or after it."""
    save(local_store(best, faults), NEW, PATIENT)


def over_store(best: Path, faults: Faults) -> None:
    """Every call to the store counts."""
    save(FaultyStore(local_store(best), faults), NEW)


def over_store_alone(best: Path, faults: Faults) -> None:
    """The same while nothing is removed."""
    save(FaultyStore(local_store(best), faults), NEW, PATIENT)


def over_key_values(best: Path, faults: Faults) -> None:
    """Every call to the job's key-value store counts."""
    job = Job(FaultyComm(faults), SystemClock(), HASTY, NumpyFramework(0))
    begin_save(job, *request(job, best, state_of(NEW))).wait()


def require_old_or_new(best: Path, ending: Ending) -> str:
    """Require that one of the two is there whole, that whoever comes next goes on, and that leftovers go with that."""
    number = number_at(best)
    assert number in (OLD, NEW)
    assert number == NEW or not ending.acknowledged, "an acknowledged checkpoint was lost"
    for following in (NEXT, NEXT + 1):
        save(best, following)
        assert number_at(best) == following
    replaced = attempts_at(best) - {attempt_at(best)}
    assert len(replaced) == 1
    left = {path for path in paths_under(best / "overwriting") if not path.startswith(".tmp-")}
    assert left == {f"{replaced.pop()}.replaced.json"}
    hidden = {path for path in paths_under(best) if "/." in f"/{path}" and not is_of_reports(path, torn=True)}
    assert hidden == set(), "the second overwrite has removed what the dead process left half written"
    return "new" if number == NEW else "old"


@pytest.mark.parametrize(
    ("saver", "stride"),
    [
        (over_syscalls, STRIDE),
        (over_syscalls_alone, STRIDE),
        (over_store, 1),
        (over_store_alone, 1),
        (over_key_values, 1),
    ],
)
def test_an_overwrite_dies_anywhere(in_memory: Path, saver: Saver, stride: int) -> None:
    template = in_memory / "template"
    for number in range(1, OLD + 1):
        save(template, number)
    fates, judged = fates_of_kills(template, in_memory / "best", saver, require_old_or_new, range(1, 2000, stride))
    print(f"{saver.__name__}: {len(fates)} points, {fates.count('old')} left the old one, {judged.contents} contents")
    assert fates.count("old") >= 5 and fates[-1] == "new"
    if saver not in (over_syscalls, over_store):
        assert fates == sorted(fates, reverse=True), "once committed, always committed"


def started(act: Callable[[], object]) -> tuple[int, Callable[[], str]]:
    """Do something in a forked process; return its id, and a function that waits for what it says.

    It says the name of the error that it ended with, with the message, or `done`.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            os.close(reading)
            try:
                act()
                said = "done"
            except CheckpointError as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode()[:4000])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)

    def answer() -> str:
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(child, 0)
        return said

    return child, answer


def test_two_that_race_never_mix(in_memory: Path) -> None:
    """Of those that begin at one moment some come first, some are refused; what is there is one that was committed."""
    best, said_by_all = in_memory / "best", list[str]()
    # Heartbeats this often: who waits for another notices it within a few hundredths of a second.
    settings = replace(HASTY, lease_seconds=0.15)
    save(best, 1)
    for round_number in range(ROUNDS):
        at = time.monotonic() + 0.05
        answers = {}
        for racer in range(2):
            number = 10 * (round_number + 1) + racer

            def race(number: int = number, at: float = at) -> None:
                time.sleep(max(at - time.monotonic(), 0.0))
                save(best, number, settings)

            answers[number] = started(race)[1]
        said = {number: answer() for number, answer in answers.items()}
        committed = {number for number, text in said.items() if text == "done"}
        assert committed and all(text == "done" or text.startswith("ConflictError") for text in said.values()), said
        assert number_at(best) in committed
        said_by_all += said.values()
    print(f"{len(said_by_all)} overwrites, {said_by_all.count('done')} committed")


class StopOnce:
    """Stops this process at the first operation on a prepared manifest."""

    def __init__(self) -> None:
        self._is_over = False

    def __call__(self, operation: FaultPoint) -> None:
        if operation.subject.endswith(".next.json") and not self._is_over:
            self._is_over = True
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@pytest.mark.parametrize("name", ["put_if_absent", "move"])
def test_one_that_was_stopped_finds_its_claim_taken(in_memory: Path, name: str) -> None:
    """It is stopped right before it replaces the manifest, and goes on once another has taken over and committed."""
    best = in_memory / "best"
    save(best, 1)
    store = FaultyStore(LocalStore(best, settings=HASTY), Faults(StopOnce(), names={name}, lasting=True))
    child, answer = started(lambda: save(store, 2))
    os.waitpid(child, os.WUNTRACED)
    assert len(list((best / "overwriting").glob("claim.json"))) == 1 and number_at(best) == 1
    save(best, 3)
    assert number_at(best) == 3
    os.kill(child, signal.SIGCONT)
    assert re.match("ConflictError: .*(may not overwrite|took over)", answer())
    assert number_at(best) == 3
    save(best, 4)
    assert number_at(best) == 4 and len(attempts_at(best)) == 2


def test_one_that_writes_is_not_disturbed(in_memory: Path) -> None:
    """A second job is refused while the first writes, and told which process that is."""
    best = in_memory / "best"
    save(best, 1)

    def slowly(operation: FaultPoint) -> None:
        if operation.subject.endswith(".next.json"):
            time.sleep(0.6)

    store = FaultyStore(LocalStore(best, settings=HASTY), Faults(slowly, names={"move"}, lasting=True))
    child, answer = started(lambda: save(store, 2))
    while not list((best / "overwriting").glob("*.next.json")):
        time.sleep(0.01)
    with pytest.raises(ConflictError, match=f"another job overwrites this checkpoint: .*process {child}, since"):
        save(best, 3)
    assert answer() == "done" and number_at(best) == 2


def test_whoever_loads_meanwhile_loads_one_whole_checkpoint(in_memory: Path) -> None:
    best, last = in_memory / "best", 40
    save(best, 0)

    def overwrite_again_and_again() -> None:
        for number in range(1, last + 1):
            save(best, number)

    _, answer = started(overwrite_again_and_again)
    seen = [0]
    while seen[-1] < last:
        state = state_of(-1)
        job = job_of(replace(HASTY, reports=False))
        load_checkpoint(job, StepChoice(location_of(best), is_path=True), LoadRequest(state, EVERYTHING, True))
        seen.append(number_in(state))
    assert answer() == "done"
    print(f"{len(seen)} loads saw {len({*seen})} of {last} checkpoints")
    assert seen == sorted(seen) and len({*seen}) > 2
