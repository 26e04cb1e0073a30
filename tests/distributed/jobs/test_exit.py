"""The end of a process: pending saves are waited for, and a failure nobody awaited is heard once."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import UnavailableError
from tests.doubles.faults import raise_error
from tests.support.faulty_run import Trigger, run_with, save, state_of
from tests.support.forked_processes import REPOSITORY, environment

FALLS_OFF_THE_END = """
import sys, time
from tests.support.faulty_run import Trigger, run_with, save
trigger = Trigger(lambda _: time.sleep(1.0), ["put_if_absent"], "manifest.json", armed=True)
handle = save(run_with(sys.argv[1], store=trigger, process_group=False), 1)
assert not handle.committed.done()
print("the end")
"""

FAILS_UNSEEN = """
import logging, sys
from holdfast.errors import UnavailableError
from tests.doubles.faults import raise_error
from tests.support.faulty_run import Trigger, run_with, save
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
trigger = Trigger(raise_error(UnavailableError), ["put_if_absent"], "/parts/", armed=True)
save(run_with(sys.argv[1], store=trigger, process_group=False), 1)
print("training goes on")
"""

MANAGER_FALLS_OFF_THE_END = """
import sys, torch, holdfast
manager = holdfast.CheckpointManager(sys.argv[1], settings=holdfast.Settings(staging="STAGING"))
manager.save(1, {"weights": torch.ones(5_000_000)})
"""


SPLIT_FALLS_OFF_THE_END = """
import sys, torch, holdfast
from tests.support.tuning import tuned
settings = tuned(holdfast.Settings(chunk_bytes=4096), index_chunks_max=8)
manager = holdfast.CheckpointManager(sys.argv[1], settings=settings)
manager.save(1, {f"w{number}": torch.ones(5_000) for number in range(50)})
"""


def python(script: str, root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, str(root)]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def test_interpreter_exit_waits_for_a_pending_save(tmp_path: Path) -> None:
    done = python(FALLS_OFF_THE_END, tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
    state: dict[str, object] = {name: torch.zeros(30_000) for name in "abc"} | {"step": 0}
    with holdfast.CheckpointManager(tmp_path / "run") as manager:
        assert manager.load(state) == 1
    assert torch.equal(state["a"], state_of(1)["a"])  # type: ignore[arg-type]


@pytest.mark.parametrize("staging", ["copy", "lazy"])
def test_a_manager_that_nobody_closed_commits_what_it_was_given(tmp_path: Path, staging: str) -> None:
    done = python(MANAGER_FALLS_OFF_THE_END.replace("STAGING", staging), tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert list(holdfast.open_checkpoint(tmp_path / "run" / "step-000000000001").verify()) == []


def test_an_index_of_many_files_is_written_while_the_interpreter_exits(tmp_path: Path) -> None:
    done = python(SPLIT_FALLS_OFF_THE_END, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    checkpoint = holdfast.open_checkpoint(tmp_path / "run" / "step-000000000001")
    assert len(checkpoint.manifest.indexes) > 16
    assert list(checkpoint.verify()) == []


def test_a_failed_save_never_ends_training_and_is_said_once(tmp_path: Path) -> None:
    done = python(FAILS_UNSEEN, tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "training goes on\n"), done.stderr
    assert done.stderr.count("ERROR holdfast") == 1, done.stderr
    assert "save of step 1" in done.stderr
    assert not (tmp_path / "run" / "step-000000000001" / "manifest.json").exists()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("ending", ["close", "wait"])
def test_a_failure_nobody_awaited_is_logged_once_and_raised_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    trigger = Trigger(raise_error(UnavailableError), ["put_if_absent"], "/parts/", armed=True)
    run = run_with(tmp_path / "run", store=trigger, process_group=False)
    handle = save(run, 1)
    assert isinstance(handle.committed.exception(timeout=30), UnavailableError)
    with pytest.raises(UnavailableError, match="a fault was injected at put_if_absent"):
        getattr(run, ending)()
    assert len(errors(caplog)) == 1, errors(caplog)
    run.close()
    assert len(errors(caplog)) == 1, "said once"


def test_a_failure_that_was_awaited_is_neither_logged_nor_raised_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trigger = Trigger(raise_error(UnavailableError), ["put_if_absent"], "/parts/", armed=True)
    run = run_with(tmp_path / "run", store=trigger, process_group=False)
    handle = save(run, 1)
    with pytest.raises(UnavailableError):
        handle.wait()
    run.wait()
    run.close()


def test_the_next_save_works_after_a_failure_and_the_manager_closes_well(tmp_path: Path) -> None:
    trigger = Trigger(raise_error(UnavailableError), ["put_if_absent"], "/parts/", armed=True)
    run = run_with(tmp_path / "run", store=trigger, process_group=False)
    with pytest.raises(UnavailableError):
        save(run, 1).wait()
    trigger.armed = False
    save(run, 1).wait()
    assert run.steps() == [1]
    run.close()


def test_a_closed_manager_refuses_to_save(tmp_path: Path) -> None:
    manager = holdfast.CheckpointManager(tmp_path / "run")
    manager.close()
    with pytest.raises(holdfast.InvalidError, match="closed"):
        manager.save(1, {"a": torch.ones(1)})
