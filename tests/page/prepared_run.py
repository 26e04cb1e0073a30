"""A run at three in the morning: killed in a save, resumed, taken back, with a slow rank and a failed save.

python -m tests.page.prepared_run FOLDER
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class PreparedRun:
    """The places of the run, and the answers to the questions."""

    folder: Path
    slow_rank: int = 1
    """The rank whose disk waits in the saves of steps 22 to 28."""

    killed_step: int = 14
    """The step that was being saved when all ranks were killed."""

    left_steps: tuple[int, ...] = (16, 20, 24)
    """Steps of the root that going back to step 12 left behind."""

    back_to: int = 12
    """The step that training went back to."""

    failed_step: int = 30
    """The step whose save failed, for the disk of rank 0 was full."""

    @property
    def root(self) -> Path:
        """The root."""
        return self.folder / "root"

    @property
    def events(self) -> tuple[Path, ...]:
        """The lines of each rank's observer."""
        return tuple(self.folder / f"events-{rank}.jsonl" for rank in range(2))


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start one job of the run on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "-m", "tests.page.prepared_trainer", str(folder), *options],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def prepare(folder: Path) -> PreparedRun:
    """Make the run in an empty folder, in half a minute."""
    run = PreparedRun(folder)
    killed = start(folder, "--until", "20", "--slow-from", str(run.killed_step))
    assert killed.stdout is not None
    printed = next((line for line in killed.stdout if line == f"step {run.killed_step}\n"), "")
    assert printed, "the first job ended too early"
    time.sleep(0.6)  # The other rank waits for its disk.
    # torchrun gives each rank a session of its own.
    ranks = [
        int(rank) for path in Path(f"/proc/{killed.pid}/task").glob("*/children") for rank in path.read_text().split()
    ]
    assert len(ranks) == 2, ranks
    for process in (*ranks, killed.pid):
        os.kill(process, signal.SIGKILL)
    killed.communicate()
    _finish(start(folder, "--until", "24"), 0)
    last = ["--slow-from", "21", "--fails-from", str(run.failed_step), "--tagged", "20", "--rate", "3e-3"]
    _finish(start(folder, "--back-to", str(run.back_to), "--until", str(run.failed_step), *last), 1)
    return run


def _finish(job: subprocess.Popen[str], expected: int) -> None:
    printed, _ = job.communicate(timeout=LIMIT_SECONDS)
    assert job.returncode == expected, printed[-3000:]


if __name__ == "__main__":
    made = Path(sys.argv[1])
    made.mkdir(parents=True)
    print(prepare(made))
