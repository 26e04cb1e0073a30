"""A job that dies for good, and its agent: the newest step comes to the root once, and the status is right throughout.

Moments are drawn, so each round of a case differs: `ORPHAN_ROUNDS=n`.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import api
from holdfast._face import wiring
from holdfast.training.runs.tiers.agent_files import is_agent_running
from tests.doubles.faults import Faults, FaultyStore
from tests.support.server_folders import steps_in
from tests.unit.training.runs.tiers.agent_runs import (
    SETTINGS,
    Run,
    await_,
    run_in_memory,
    state_of,
)

ROUNDS = int(os.environ.get("ORPHAN_ROUNDS", "1"))
AWAY_SECONDS = float(os.environ.get("ORPHAN_AWAY_SECONDS", "1.5"))
"""How long a root does not answer."""

GRACE_SECONDS = 5.0
CHANGES = {"put", "put_if_absent", "upload.write", "upload.complete"}
NEW_HOST, NEW_USER = 0x04000000, 0x10000000

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
each_round = pytest.mark.parametrize("number", range(ROUNDS))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with run_in_memory(tmp_path / "root") as run:
        yield run


@pytest.fixture
def chance(number: int) -> random.Random:
    seed = int(os.environ.get("CAMPAIGN_SEED") or random.randrange(2**32)) + number
    print(f"seed {seed}")
    return random.Random(seed)


def files_in(root: Path) -> dict[str, tuple[int, int]]:
    """Return the files of all steps of a root, by what changes if one is written again."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in root.glob("step-*/**/*")}


def told(run: Run) -> dict[str, object]:
    """Return the status as the command prints it."""
    command = [sys.executable, "-m", "holdfast.cli", "agent", str(run.near), "--status", "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(shown))


def require_status(run: Run, state: str, waiting: tuple[int, ...], *, is_running: bool = True) -> None:
    status = run.status()
    assert (status.state, status.waiting, status.is_running) == (state, waiting, is_running)
    assert (status.near, status.root, status.error) == (str(run.near), str(run.root), "")


def require_loaded(run: Run, step: int, value: float) -> None:
    """Require the newest step of the root, by its bits."""
    state = state_of(0, run.elements)
    assert holdfast.load(run.root, state, step="latest").step == step
    weights = state["weights"]
    assert isinstance(weights, torch.Tensor) and weights.unique().tolist() == [value]


@each_round
def test_the_newest_step_of_a_job_that_is_dead_for_good_comes_once(run: Run, chance: random.Random) -> None:
    run.linger_seconds = 1.0
    steps = chance.choice([(10,), (1, 2, 3), (9, 10, 11)])
    job = run.begin(*steps)
    require_status(run, "watching", ())
    run.kill(job)
    run.await_state("orphaned")
    if (waiting := run.status().waiting) or steps != (10,):  # The job itself may have drained its step 10.
        assert waiting[-1] == steps[-1]
    run.await_state("lingering")
    require_status(run, "lingering", ())
    expected = [step for step in (10, steps[-1]) if step in steps]
    assert steps_in(run.root) == sorted({*expected})
    before = files_in(run.root)
    run.await_end()
    require_status(run, "ended", (), is_running=False)
    assert told(run)["state"] == "ended"
    assert run.states() == ["watching", "orphaned", "draining", "lingering", "ended"]
    if steps_in(run.near):
        report = api.drain(str(run.near), settings=SETTINGS)
        assert (report.steps, report.files, report.bytes) == ((), 0, 0)
    assert files_in(run.root) == before, "nothing is written twice"
    require_loaded(run, steps[-1], float(steps[-1]))


@each_round
def test_a_job_that_is_back_in_time_finds_no_drain(run: Run, chance: random.Random) -> None:
    run.orphan_seconds = 2.0
    run.kill(run.begin(1, 2))
    run.await_state("orphaned")
    require_status(run, "orphaned", (2,))
    time.sleep(chance.random())
    job = run.begin(3, resumes_at=2)
    run.await_state("watching")
    require_status(run, "watching", ())
    time.sleep(run.orphan_seconds)
    require_status(run, "watching", ())
    assert run.states() == ["watching", "orphaned", "watching"] and steps_in(run.root) == []
    run.kill(job)
    run.await_end()
    assert run.states()[3:] == ["orphaned", "draining", "lingering", "ended"] and steps_in(run.root) == [3]


@each_round
def test_a_root_that_was_away_gets_the_step_once(run: Run, chance: random.Random) -> None:
    job = run.begin(1, 2)
    away = run.root.with_name("away")
    run.root.rename(away)
    run.root.write_text("not a folder")
    run.kill(job)
    await_(lambda: bool(run.status().error))
    gone, errors = time.monotonic() + AWAY_SECONDS * chance.uniform(0.7, 1.3), 0
    while time.monotonic() < gone:
        status = run.status()
        assert status.is_running and status.state in ("orphaned", "draining"), status
        errors += bool(status.error)
        time.sleep(0.05)
    assert errors
    run.root.unlink()
    away.rename(run.root)
    run.await_state("lingering")
    require_status(run, "lingering", ())
    run.await_end()
    require_status(run, "ended", (), is_running=False)
    assert steps_in(run.root) == [2] and run.states().count("lingering") == 1


def require_ended_within(run: Run, seconds: float) -> None:
    pid = run.status().pid
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while is_agent_running(str(run.near)):
        assert time.monotonic() < deadline, f"the agent took longer than {seconds} s: {run.status()}"
        time.sleep(0.01)


@each_round
@pytest.mark.parametrize("state", ["watching", "orphaned", "lingering"])
def test_sigterm_ends_the_agent_within_a_grace_of_five_seconds(run: Run, chance: random.Random, state: str) -> None:
    run.orphan_seconds, run.linger_seconds = 0.3 if state == "lingering" else 600.0, 600.0
    job = run.begin(1, 2)
    if state != "watching":
        run.kill(job)
    run.await_state(state)
    time.sleep(chance.random() * 0.5)
    require_ended_within(run, GRACE_SECONDS)
    require_status(run, "ended", (), is_running=False)
    assert steps_in(run.root) == ([] if state == "watching" else [2])
    assert steps_in(run.near)[-1] == 2, "the near tier stays"


@contextmanager
def slow_agent(run: Run, names: set[str], seconds: float) -> Iterator[int]:
    """Put an agent in the place of the agent of a job; some calls to its root take seconds. Yield the process."""
    os.kill(run.status().pid, signal.SIGKILL)
    run.await_end()
    (run.near / "agent.json").unlink()
    pid = os.fork()
    if not pid:
        try:
            faults, store_at = Faults(lambda _: time.sleep(seconds), names=names, lasting=True), wiring.store_at
            wiring.store_at = lambda path, settings: FaultyStore(store_at(path, settings), faults)
            api.agent(str(run.near), orphan_seconds=0.1, linger_seconds=0.3, settings=SETTINGS)
        finally:
            os._exit(0)
    try:
        await_(lambda: (run.near / "agent.json").exists())
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@each_round
def test_a_drain_that_outlasts_the_grace_is_killed_and_goes_on_later(run: Run, chance: random.Random) -> None:
    run.kill(run.begin(1, 2))
    with slow_agent(run, {"upload.write"}, 60.0) as pid:
        run.await_state("draining")
        require_status(run, "draining", (2,))
        time.sleep(chance.random())
        os.kill(pid, signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
    require_status(run, "draining", (2,), is_running=False)
    assert steps_in(run.root) == []
    assert api.drain(str(run.near), settings=SETTINGS).steps == (2,)
    assert steps_in(run.root) == [2]
    assert list(holdfast.open_checkpoint(run.root / "step-000000000002").verify()) == []


@each_round
def test_close_leaves_neither_packs_nor_an_agent(run: Run, number: int) -> None:
    job = run.begin(1, 2, 3, closes=True)
    os.waitpid(job, 0)
    run.jobs.remove(job)
    await_(lambda: (run.near / "agent.json").exists() and run.status().state == "ended")
    run.await_end()
    require_status(run, "ended", (), is_running=False)
    assert steps_in(run.root) == [3]
    left = [path for path in run.near.rglob("*") if path.is_file()]
    assert steps_in(run.near) == [] and sum(path.stat().st_size for path in left) < 1 << 16, left


@contextmanager
def job_elsewhere(run: Run, *steps: int, resumes_at: int) -> Iterator[Callable[[], None]]:
    """Start a job on another host, with a near folder of its own; yield what closes the job, once its steps are saved.

    The host is real to all that asks the kernel: a name of its own, in a namespace of its own.
    """
    saved, go = run.root.parent / "saved-elsewhere", run.root.parent / "go"
    pid = os.fork()
    if not pid:
        status = 1
        try:
            _become_another_host()
            near = holdfast.Tier(run.near.with_name("elsewhere"), every=1, keep_last=2)
            options = {"every": 1, "preemption": False, "process_group": False, "settings": SETTINGS}
            with holdfast.CheckpointManager(run.root, near=near, **options) as manager:  # type: ignore[arg-type]
                resumed = manager.load(state_of(0, run.elements))
                assert resumed == resumes_at, resumed
                for step in steps:
                    manager.save(step, state_of(-step, run.elements)).wait()
                saved.touch()
                while not go.exists():
                    time.sleep(0.01)
            status = 0
        finally:
            os._exit(status)

    def close() -> None:
        go.touch()
        assert os.waitpid(pid, 0)[1] == 0
        closed.append(True)

    closed: list[bool] = []
    try:
        await_(lambda: saved.exists() or bool(os.waitpid(pid, os.WNOHANG)[0]))
        assert saved.exists(), "the job elsewhere failed"
        yield close
    finally:
        if not closed:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _become_another_host() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_HOST) and libc.unshare(NEW_USER | NEW_HOST):
        raise OSError(ctypes.get_errno(), "no namespace for the name of a host")
    name = b"another-host"
    assert not libc.sethostname(name, len(name))


def require_other_job(run: Run) -> None:
    """Require that the steps of the job elsewhere count, and those of the orphan do not."""
    require_loaded(run, 12, -12.0)
    listed = [record.step for record in api.list_steps(run.root).steps if not record.superseded]
    assert sorted(listed) == [10, 11, 12], listed
    state = state_of(0, run.elements)
    assert holdfast.load(run.root, state, step=11).step == 11
    assert state["weights"].unique().tolist() == [-11.0]  # type: ignore[attr-defined]
    with run.manager() as manager:
        assert manager.load(state) == 12 and state["weights"].unique().tolist() == [-12.0]  # type: ignore[attr-defined]


def orphaned_after(run: Run) -> None:
    """Kill a job whose step 10 is in the root, and whose step 11 is near alone."""
    job = run.begin(10, 11)
    await_(lambda: steps_in(run.root) == [10])
    run.kill(job)


@each_round
def test_a_job_elsewhere_that_took_over_fences_the_orphan(run: Run, chance: random.Random) -> None:
    run.orphan_seconds = 3.0
    orphaned_after(run)
    run.await_state("orphaned")
    require_status(run, "orphaned", (11,))
    with job_elsewhere(run, 11, 12, resumes_at=10) as close:
        lives_on = chance.random() < 0.5
        if lives_on:
            await_(lambda: bool(run.status().error))
            assert "another job writes here" in run.status().error and run.status().is_running
            assert steps_in(run.root) == [10, 11, 12]
        close()
    run.await_state("lingering")
    require_status(run, "lingering", ())
    run.await_end()
    assert steps_in(run.root) == [10, 11, 12]
    require_other_job(run)


@each_round
def test_a_step_that_a_stopped_agent_drains_late_does_not_count(run: Run, chance: random.Random) -> None:
    orphaned_after(run)
    with slow_agent(run, CHANGES, 0.4) as pid:
        run.await_state("draining")
        time.sleep(chance.random() * 1.5)
        os.kill(pid, signal.SIGSTOP)
        assert run.status().state == "draining" and run.status().waiting == (11,)
        assert steps_in(run.root) == [10]
        with job_elsewhere(run, 11, 12, resumes_at=10) as close:
            os.kill(pid, signal.SIGCONT)
            if chance.random() < 0.5:
                # It is refused, or finds by the list of the new epoch that nothing of the near tier counts.
                await_(lambda: bool(run.status().error) or run.status().state in ("lingering", "ended"))
            close()
        await_(lambda: run.status().state in ("lingering", "ended"))
        assert run.status().waiting == ()
        run.await_end()
    require_other_job(run)
