"""The examples, killed and started again, print the losses of a run that nobody killed."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.forked_processes import Work, start_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS, KILLED_AT = 19, 13
"""One save less than would be removed again: the end of a run would wait for the grace of what it removes."""
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SCRIPTS = {"one process": "train.py", "DDP with accumulation": "train.py", "FSDP2": "train_fsdp2.py"}


def started(name: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start an example."""
    launcher = [] if name == "one process" else RANKS
    command = [sys.executable, *launcher, str(EXAMPLES / SCRIPTS[name]), str(folder), "--steps", str(STEPS), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def kill_all(folder: Path) -> None:
    """Kill every process of an example: torchrun puts each rank into a session of its own."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder).encode() in command.read_bytes().split(b"\0"):
                os.kill(int(command.parent.name), signal.SIGKILL)


def losses_of(text: str) -> dict[int, str]:
    """Return the printed losses by step."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.MULTILINE)}


def undisturbed(name: str, folder: Path, *options: str, is_killed: bool = False) -> dict[int, str]:
    """Run an example in ranks that have torch imported, which takes most of its time; return its losses.

    It runs to its end, or is killed after some step.
    """
    arguments, environment = [SCRIPTS[name], str(folder), *options], [{}]
    folder.mkdir(exist_ok=True)
    if name != "one process":
        # As torchrun does: the launcher has the store, so that no port can be taken by somebody else.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    works = [
        Work.of_rank(rank, folder, "tests.everyday.test_examples:be_example", *arguments, **each)
        for rank, each in enumerate(environment)
    ]
    for work in works:
        Path(work.status).unlink(missing_ok=True)
        Path(work.log).touch()
    processes = start_ranks(works)
    while is_killed and f"\nstep {KILLED_AT} " not in Path(works[0].log).read_text():
        assert processes[0].poll() is None, Path(works[0].log).read_text()
        time.sleep(0.002)
    for process in processes if is_killed else ():
        process.send_signal(signal.SIGKILL)
    codes = [process.wait(240) for process in processes]
    logs = "".join(Path(work.log).read_text() for work in works)
    assert codes == [-signal.SIGKILL if is_killed else 0] * len(works), logs
    return losses_of(logs)


def be_example(script: str, folder: str, *options: str) -> None:
    """Run an example as a program, in this process."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [script, f"{folder}/saved", "--steps", str(STEPS), *options]
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def finished(name: str, folder: Path, *options: str) -> dict[int, str]:
    """Run an example to its end; return its losses."""
    process = started(name, folder, *options)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return losses_of(out)


def killed(name: str, folder: Path, *options: str) -> dict[int, str]:
    """Start an example and kill all its processes after some step; return the losses it printed."""
    process = started(name, folder, *options)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {KILLED_AT} "):
            kill_all(folder)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    return losses_of("".join(lines))


@pytest.mark.long
def test_the_demo_trains_in_half_the_memory_with_equal_losses(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    command = [sys.executable, "-m", "examples.activations", "--steps", "2", "--samples", "8", "--plan", str(plan)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=EXAMPLES.parent, env=environment
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^step \d+ loss (\S+) plain, (\S+) planned$", done.stdout, re.MULTILINE)
    assert len(losses) == 2 and all(plain == planned for plain, planned in losses)
    ((plain, planned),) = re.findall(r"^peak (\S+) MiB plain, (\S+) planned$", done.stdout, re.MULTILINE)
    assert 0 < float(planned) <= float(plain) / 2
    assert "16 calls as planned, 0 of other signatures" in done.stdout
    assert plan.is_file()


@pytest.mark.long
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_killed_example_resumes_to_the_same_losses(name: str, tmp_path: Path) -> None:
    whole = undisturbed(name, tmp_path / "whole")
    assert list(whole) == [*range(1, STEPS + 1)]
    before = killed(name, tmp_path / "killed")
    after = finished(name, tmp_path / "killed")
    first = min(after)
    assert 1 < first <= KILLED_AT + 1, "it goes on from a committed step"
    assert first % 5 == 1, "every fifth step is saved"
    assert {**before, **after} == whole
    assert list(after) == [*range(first, STEPS + 1)]
    if name == "FSDP2":
        require_same_with_near(name, tmp_path / "twice", whole)


def require_same_with_near(name: str, folder: Path, whole: dict[int, str]) -> None:
    options = "--near", str(folder / "near")
    before = undisturbed(name, folder, *options, is_killed=True)
    after = undisturbed(name, folder, *options)
    assert KILLED_AT - 2 <= min(after) <= max(before) + 1 and min(after) % 2 == 1, "every second step is near"
    assert {**before, **after} == whole
    drained = folder / "saved" / f"step-{STEPS - 1:012d}" / "manifest.json"
    assert drained.exists(), "close drains the newest step"


@pytest.mark.long
@pytest.mark.parametrize("name", ["one process", "DDP with accumulation"])
def test_killed_example_with_a_redo_log_loses_no_step(name: str, tmp_path: Path) -> None:
    whole = undisturbed(name, tmp_path / "whole")
    before = killed(name, tmp_path / "killed", "--differential")
    after = finished(name, tmp_path / "killed", "--differential")
    # At most one record was not sealed; a step that was printed is not recorded yet.
    assert KILLED_AT - 1 <= min(after) <= max(before) + 1
    assert {**before, **after} == whole


@pytest.mark.long
def test_example_that_kills_itself_ends_with_the_same_digest(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "differential.py")]
    limits = ["--steps", "110", "--step-seconds", "0.02"]

    def outcome(*arguments: str) -> tuple[int, str]:
        ended = subprocess.run([*script, *arguments, *limits], capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        return ended.returncode, ended.stdout

    _, whole = outcome(str(tmp_path / "whole"))
    deaths, text = 0, ""
    while True:
        code, text = outcome(str(tmp_path / "killed"), "--die")
        if code == 0:
            break
        deaths += 1
    assert deaths > 0, "a start draws at most 90 of 110 steps"
    assert text.splitlines()[-1] == whole.splitlines()[-1]
    assert "digest" in whole


@pytest.mark.parametrize("script", ["train.py", "train_fsdp2.py"])
def test_example_needs_few_lines_of_holdfast(script: str) -> None:
    code = (EXAMPLES / script).read_text().partition('"""\n\n')[2]
    lines = [line for line in code.splitlines() if re.search(r"holdfast|manager", line)]
    assert 0 < len(lines) <= 12
