"""The elastic example, told to end on two ranks, goes on with the very next sample on one."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.forked_processes import REPOSITORY, Forked, Work, environment, start_ranks
from tests.support.trained_lines import lines_of, require_exact, trained_again, write_text

EXAMPLE = REPOSITORY / "examples" / "elastic.py"
SAMPLES, EPOCHS = 101, 3
"""The last step of an epoch has 5 samples; the run has 15 steps."""

Process = subprocess.Popen[str] | Forked


def by_torchrun(ranks: int, folder: Path, arguments: list[str]) -> list[Process]:
    """Start the example as its docstring says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with (folder / "log.torchrun").open("a") as log:
        return [
            subprocess.Popen(
                [*command, str(EXAMPLE), *arguments],
                env=environment(),
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                text=True,
            )
        ]


def by_ranks(ranks: int, folder: Path, arguments: list[str]) -> list[Process]:
    """Start ranks as torchrun would, from processes that have torch imported."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _stores.append(store)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    scratch = folder / f"{ranks}-ranks"
    scratch.mkdir()
    works = [
        Work.of_rank(
            rank,
            scratch,
            "tests.distributed.jobs.test_elastic_example:be_example",
            *arguments,
            **place,
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
        )
        for rank in range(ranks)
    ]
    return [*start_ranks(works)]


_stores: list[dist.TCPStore] = []
"""They live as long as the ranks."""


def be_example(*arguments: str) -> None:
    """Run the example as a program, in this process."""
    sys.path.insert(0, str(EXAMPLE.parent))
    sys.argv = [str(EXAMPLE), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.parametrize("start", [by_ranks, pytest.param(by_torchrun, marks=pytest.mark.long)])
def test_a_run_on_two_ranks_goes_on_with_the_next_sample_on_one(
    tmp_path: Path, start: Callable[[int, Path, list[str]], list[Process]]
) -> None:
    trained = tmp_path / "trained"
    text = write_text(tmp_path / "text", SAMPLES)
    options = ["--text", str(text), "--epochs", str(EPOCHS), "--trained", str(trained)]
    arguments = [str(tmp_path / "run"), *options]

    first = start(2, tmp_path, [*arguments, "--step-seconds", "0.1"])
    while not any(line.step >= 6 for line in lines_of(trained)):
        assert all(process.poll() is None for process in first), _logs(tmp_path)
        time.sleep(0.02)
    # Of torchrun, which tells its ranks; or of one rank, which tells the other.
    os.kill(first[0].pid, signal.SIGTERM)
    codes = [process.wait(60) for process in first]
    assert start is by_torchrun or codes == [85, 85], _logs(tmp_path)
    left = max(line.step for line in lines_of(trained))

    assert [process.wait(60) for process in start(1, tmp_path, arguments)] == [0], _logs(tmp_path)

    lines = lines_of(trained)
    require_exact(lines, SAMPLES, EPOCHS)
    assert [line.step for line in lines if line.ranks == 1] == [*range(left + 1, 16)]
    assert trained_again(lines) == 0
    saved = re.findall(r"^step (\d+) saved", _logs(tmp_path), re.MULTILINE)
    assert sorted(map(int, saved)) == sorted({left, 10}), saved


def _logs(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.rglob("log.*")))
