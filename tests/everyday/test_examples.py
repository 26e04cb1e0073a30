"""The examples, killed and started again, print the losses of a run that nobody killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS, KILLED_AT = 24, 13
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "one process": [str(EXAMPLES / "train.py")],
    "DDP with accumulation": [*RANKS, str(EXAMPLES / "train.py")],
    "FSDP2": [*RANKS, str(EXAMPLES / "train_fsdp2.py")],
}


def started(name: str, folder: Path) -> subprocess.Popen[str]:
    """Start an example."""
    command = [sys.executable, *COMMANDS[name], str(folder), "--steps", str(STEPS)]
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


def finished(name: str, folder: Path) -> dict[int, str]:
    """Run an example to its end; return its losses."""
    process = started(name, folder)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return losses_of(out)


def killed(name: str, folder: Path) -> dict[int, str]:
    """Start an example and kill all its processes after some step; return the losses it printed."""
    process = started(name, folder)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {KILLED_AT} "):
            kill_all(folder)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    return losses_of("".join(lines))


@pytest.mark.parametrize("name", list(COMMANDS))
def test_killed_example_resumes_to_the_same_losses(name: str, tmp_path: Path) -> None:
    whole = finished(name, tmp_path / "whole")
    assert list(whole) == [*range(1, STEPS + 1)]
    before = killed(name, tmp_path / "killed")
    after = finished(name, tmp_path / "killed")
    first = min(after)
    assert 1 < first <= KILLED_AT + 1, "it goes on from a committed step"
    assert first % 5 == 1, "every fifth step is saved"
    assert {**before, **after} == whole
    assert list(after) == [*range(first, STEPS + 1)]


@pytest.mark.parametrize("script", ["train.py", "train_fsdp2.py"])
def test_example_needs_few_lines_of_holdfast(script: str) -> None:
    code = (EXAMPLES / script).read_text().partition('"""\n\n')[2]
    lines = [line for line in code.splitlines() if re.search(r"holdfast|manager", line)]
    assert 0 < len(lines) <= 12
