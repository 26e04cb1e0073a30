"""The agent: a process that brings the newest step to the root if a killed job does not come back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import api
from holdfast._face import wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError, UnavailableError
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.catalog import read_run_id
from holdfast.training.runs.tiers.agent import Agent, AgentStarter, Patience, run_agent
from holdfast.training.runs.tiers.agent_files import LOCK_FILE, agent_lock, has_job_lock, is_agent_running
from holdfast.training.runs.tiers.offline_drain import NearDrain
from tests.support.server_folders import steps_in
from tests.unit.training.runs.tiers.agent_runs import SETTINGS, Run, await_, ended, run_in_memory, state_of


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ended(Run(tmp_path / "root", tmp_path / "near")) as run:
        yield run


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Run]:
    with run_in_memory(tmp_path / "root") as run:
        yield run


def test_the_newest_step_of_a_killed_job_comes_to_the_root(run: Run) -> None:
    job = run.begin(1, 2, 3)
    assert steps_in(run.root) == []
    run.kill(job)
    run.await_end()
    assert steps_in(run.root) == [3] and run.status().state == "ended" and not run.status().is_running
    assert steps_in(run.near) == [2, 3], "a tier on a disk stays"
    with run.manager() as manager:
        state = state_of(0)
        assert manager.load(state) == 3 and state["step"] == 3


def test_a_near_tier_in_memory_is_emptied(memory: Run) -> None:
    memory.kill(memory.begin(1, 2))
    memory.await_end()
    assert steps_in(memory.root) == [2], "step 1 was for the near tier alone"
    assert steps_in(memory.near) == []


def test_a_person_who_drains_and_empties_the_near_tier_ends_the_agent(memory: Run) -> None:
    memory.orphan_seconds = 600.0
    memory.kill(memory.begin(1, 2))
    await_(lambda: memory.status().state == "orphaned")
    assert memory.status().seconds == 600.0
    assert api.drain(str(memory.near), memory.root, remove=True).steps == (2,)
    memory.await_end()
    status = memory.status()
    assert (status.state, status.error, status.waiting) == ("ended", "", ())


@pytest.mark.long
def test_a_job_that_comes_back_in_time_drains_by_itself(run: Run) -> None:
    run.orphan_seconds = 3.0
    job = run.begin(1, 2)
    agent = run.status().pid
    run.kill(job)
    await_(lambda: run.status().state == "orphaned")
    assert run.status().waiting == (2,)
    job = run.begin(3)
    await_(lambda: run.status().state == "watching")
    time.sleep(0.5)
    assert run.status().pid == agent and run.status().is_running, "one agent for both jobs"
    assert steps_in(run.root) == []
    run.kill(job)


@pytest.mark.long
def test_the_end_of_a_job_ends_the_agent(run: Run) -> None:
    job = run.begin(1, 2, closes=True)
    os.waitpid(job, 0)
    run.jobs.remove(job)
    await_(lambda: (run.near / "agent.json").exists() and run.status().state == "ended")
    run.await_end()
    assert steps_in(run.root) == [2]


@pytest.mark.long
def test_a_killed_agent_is_started_again_by_the_next_save(run: Run) -> None:
    with run.manager() as manager:
        manager.load(state_of(0))
        manager.maybe_save(1, state_of(1)).wait("near")  # type: ignore[union-attr]
        await_(lambda: is_agent_running(str(run.near)) and (run.near / "agent.json").exists())
        manager.maybe_save(2, state_of(2)).wait("near")  # type: ignore[union-attr]
        first = run.status().pid
        os.kill(first, signal.SIGKILL)
        await_(lambda: not is_agent_running(str(run.near)))
        manager.maybe_save(3, state_of(3)).wait("near")  # type: ignore[union-attr]
        await_(lambda: is_agent_running(str(run.near)) and run.status().pid != first)


@pytest.mark.long
def test_sigterm_drains_at_once_if_no_job_lives_and_ends_at_once_if_one_does(run: Run) -> None:
    run.orphan_seconds = 600.0
    job = run.begin(1, 2)
    os.kill(run.status().pid, signal.SIGTERM)
    run.await_end()
    assert steps_in(run.root) == []
    run.kill(job)
    job = run.begin(3)
    run.kill(job)
    await_(lambda: run.status().state == "orphaned")
    os.kill(run.status().pid, signal.SIGTERM)
    run.await_end()
    assert steps_in(run.root) == [3]


@pytest.mark.long
def test_a_root_that_fails_is_asked_again(run: Run) -> None:
    job = run.begin(1, 2)
    away = run.root.with_name("away")
    run.root.rename(away)
    run.root.write_text("not a folder")
    run.kill(job)
    await_(lambda: bool(run.status().error))
    assert run.status().state in ("orphaned", "draining") and run.status().is_running
    run.root.unlink()
    away.rename(run.root)
    run.await_end()
    assert steps_in(run.root) == [2]


@pytest.mark.long
def test_a_near_tier_that_goes_ends_the_agent_and_stays_gone(run: Run) -> None:
    run.orphan_seconds = 600.0
    job = run.begin(1)
    pid = run.status().pid
    run.kill(job)
    shutil.rmtree(run.near)
    await_(lambda: not Path(f"/proc/{pid}/cmdline").exists() or b"agent_api" not in _command(pid))
    assert not run.near.exists() and steps_in(run.root) == []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_second_agent_is_refused_and_a_status_needs_a_first(run: Run, tmp_path: Path) -> None:
    with run.manager() as manager:
        manager.load(state_of(0))
        manager.maybe_save(1, state_of(1)).wait("near")  # type: ignore[union-attr]
        await_(lambda: is_agent_running(str(run.near)))
        with pytest.raises(ConflictError, match="another agent runs"):
            api.agent(str(run.near))
    with pytest.raises(MissingError, match="no agent has watched"):
        api.agent_status(str(tmp_path))
    with pytest.raises(MissingError, match="no near tier"):
        api.agent(str(tmp_path))
    with pytest.raises(InvalidError, match="orphan_seconds"):
        api.agent(str(run.near), orphan_seconds=-1)
    with pytest.raises(InvalidError, match=r"Tier\(linger_seconds"):
        holdfast.Tier(run.near, every=1, linger_seconds=float("nan"))
    with pytest.raises(InvalidError, match="no other process can open the root"):
        holdfast.CheckpointManager(
            "memory://agent-test", process_group=False, near=holdfast.Tier(run.near, every=1, agent=True)
        )


def test_the_lock_is_free_after_its_holder(tmp_path: Path) -> None:
    with agent_lock(str(tmp_path)):
        assert is_agent_running(str(tmp_path))
    assert not is_agent_running(str(tmp_path)) and (tmp_path / LOCK_FILE).exists()


def test_the_lock_of_a_job_is_held_until_the_last_of_its_processes_is_dead(tmp_path: Path) -> None:
    assert not has_job_lock(str(tmp_path))
    hold = (
        "import sys, time; from holdfast.training.runs.tiers.agent_files import hold_job_lock; "
        "hold_job_lock(sys.argv[1]); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == b"held\n"
    for job in jobs:
        assert has_job_lock(str(tmp_path))
        job.kill()
        job.communicate()
    assert not has_job_lock(str(tmp_path))
    assert (tmp_path / "job.lock").stat().st_mode & 0o777 == 0o600


def test_the_command_shows_the_status(run: Run) -> None:
    with run.manager() as manager:
        manager.load(state_of(0))
        manager.maybe_save(1, state_of(1)).wait("near")  # type: ignore[union-attr]
        await_(lambda: (run.near / "agent.json").exists())
        command = [sys.executable, "-m", "holdfast.cli", "agent", str(run.near), "--status"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "watching for" in shown
        told = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
        assert told["state"] == "watching" and told["is_running"] and told["root"] == str(run.root)
        listing = [sys.executable, "-m", "holdfast.cli", "ls", str(run.root), "--near", str(run.near)]
        assert "watching for" in subprocess.run(listing, capture_output=True, text=True, check=True).stdout
        listed = json.loads(subprocess.run([*listing, "--json"], capture_output=True, text=True, check=True).stdout)
        assert listed["agent"] == told


def test_the_agent_needs_no_torch(run: Run) -> None:
    code = "import sys, holdfast._face.agent_api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    job = run.begin(1)
    fields = Path(f"/proc/{run.status().pid}/status").read_text().split("\n")
    anonymous = next(int(line.split()[1]) for line in fields if line.startswith("RssAnon"))
    assert anonymous < 80 << 10, f"{anonymous >> 10} MiB"
    run.kill(job)
    with pytest.raises(CheckpointError):
        api.agent(str(run.near / "absent"))


def agent_in_process(run: Run, patience: Patience) -> Agent:
    drain = NearDrain(wiring.two_roots(str(run.near), run.root, SETTINGS), SystemClock(), wiring.codecs())
    return Agent(drain, SystemClock(), SETTINGS.lease_seconds, patience, is_memory=False)


def test_a_lease_that_its_own_drain_could_not_release_is_no_job(run: Run) -> None:
    run.kill(run.begin(1, 2))
    os.kill(run.status().pid, signal.SIGKILL)
    agent = agent_in_process(run, Patience(0.2, 0.1))
    lease = WriterLease(agent._drain.run, SystemClock(), 600.0)
    lease.hold(read_run_id(run_store(run)) or "")
    assert not agent._has_job(), "a root that failed kept the lease from its release"
    lease.release()
    agent.run()
    assert steps_in(run.root) == [2] and run.status().state == "ended"


def run_store(run: Run) -> LocalStore:
    return LocalStore(run.near, settings=SETTINGS)


def test_a_full_near_tier_does_not_end_the_agent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.kill(run.begin(1, 2))
    os.kill(run.status().pid, signal.SIGKILL)
    agent = agent_in_process(run, Patience(0.2, 0.1))

    def full(key: str, data: bytes, *, durable: bool = True) -> None:
        assert key == "agent.json"
        raise UnavailableError("No space left on device")

    with monkeypatch.context() as filled:
        filled.setattr(agent._near, "put", full)
        agent._enter("orphaned", (2,))
    agent.run()
    assert steps_in(run.root) == [2]


def test_a_damaged_step_ends_the_agent_with_its_error(run: Run) -> None:
    run.kill(run.begin(1))
    os.kill(run.status().pid, signal.SIGKILL)
    (pack,) = run.near.glob("step-*/*/r00000.safetensors")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    agent_in_process(run, Patience(0.1, 0.1)).run()
    assert run.status().state == "ended" and "damaged" in run.status().error
    assert steps_in(run.root) == [] and steps_in(run.near) == [1]


def test_an_agent_of_another_run_is_refused_at_its_start(run: Run, tmp_path: Path) -> None:
    run.kill(run.begin(1))
    os.kill(run.status().pid, signal.SIGKILL)
    with holdfast.CheckpointManager(tmp_path / "other", process_group=False, preemption=False) as other:
        other.save(1, state_of(1)).wait()
    with pytest.raises(InvalidError, match=r"is of run .*other holds run .*expected one run"):
        api.agent(str(run.near), str(tmp_path / "other"), orphan_seconds=60.0)


def test_a_root_that_the_agent_cannot_read_is_told_at_its_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run.begin(1)
    os.kill(run.status().pid, signal.SIGKILL)
    await_(lambda: not is_agent_running(str(run.near)))
    agent = agent_in_process(run, Patience(60.0, 0.1))

    def refuse(key: str, bytes_max: int) -> bytes:
        raise InvalidError("the root refuses these credentials")

    monkeypatch.setattr(agent._drain.run.root, "get", refuse)
    watch = threading.Thread(target=lambda: run_agent(str(run.near), agent))
    watch.start()
    await_(lambda: "refuses these credentials" in run.status().error)
    assert run.status().state == "watching" and AgentStarter(str(run.near), [], SystemClock()).error()
    agent.hurry()
    watch.join(30.0)
    assert run.status().state == "ended"
    run.kill(job)


def test_a_root_that_goes_between_two_reads_is_no_root_of_another_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.kill(run.begin(1, 2))
    os.kill(run.status().pid, signal.SIGKILL)
    agent, require_run = agent_in_process(run, Patience(0.1, 0.1)), NearDrain.require_run

    def require_without_root(drain: NearDrain) -> str:
        run.root.rename(run.root.with_name("away"))
        run.root.write_text("not a folder")
        return require_run(drain)

    with monkeypatch.context() as patch:
        patch.setattr(NearDrain, "require_run", require_without_root)
        assert "a folder of the path is a file" in agent._drain.root_error()
    run.root.unlink()
    run.root.with_name("away").rename(run.root)
    agent.run()
    assert steps_in(run.root) == [2]


def test_a_reader_beside_a_job_leaves_its_job_file(run: Run) -> None:
    job = run.begin(1)
    told = (run.near / "job.json").read_bytes()
    with run.manager() as reader:
        assert reader.load(state_of(0)) == 1
        assert (run.near / "job.json").read_bytes() == told
    assert (run.near / "job.json").read_bytes() == told and steps_in(run.root) == []
    run.kill(job)
