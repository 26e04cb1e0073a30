"""The ranks of one training, started as torchrun starts them, and what came of each."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forked_processes import REPOSITORY, Forked, Work, start_ranks

_END_SECONDS = 8.0
"""How long survivors of a killed rank may go on, before they are told to end, as an agent does."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one world."""

    seconds: float
    killed: tuple[int, ...]
    """Ranks that were killed where they should be."""

    results: dict[int, dict[str, object]] = field(default_factory=dict)
    """What each rank left, by rank."""

    error: str = ""
    """Of the lowest rank that raised."""

    @property
    def resumed_from(self) -> int | None:
        """The step at which the ranks resumed."""
        found = {result["resumed_from"] for result in self.results.values()}
        assert len(found) == 1, f"ranks resumed from different steps: {found}"
        step = found.pop()
        assert step is None or isinstance(step, int)
        return step


@dataclass(frozen=True, slots=True)
class Kill:
    """Where ranks are killed."""

    ranks: tuple[int, ...]
    """Those that end where they come to the phase."""

    phase: str
    """A phase of Holdfast's save, or `bytes` for what lies in the folder."""

    save: int = 2
    takes_all: bool = True
    """Whether the other ranks end with the first one, as on one machine: to some phases only one rank comes."""

    folder_bytes: int = 0
    """With `bytes`: kill once so many lie in the folder."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training of some ranks."""

    framework: str
    folder: Path
    keeper: str
    steps: int
    every: int
    ranks: int = 2
    resume: bool = False
    kill: Kill | None = None


def run(job: Job, scratch: Path, *, deadline_seconds: float = 240.0) -> Outcome:
    """Run one training to its end or to its kill.

    Args:
        job: What to train.
        scratch: A new folder for logs and results.
        deadline_seconds: After this every rank is killed, and that is the error.
    """
    scratch.mkdir(parents=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    inside = job.kill if job.kill is not None and job.kill.phase != "bytes" else None
    spec = {
        "folder": str(job.folder),
        "keeper": job.keeper,
        "steps": job.steps,
        "every": job.every,
        "resume": job.resume,
        "results": str(scratch),
        "kill": None if inside is None else {"ranks": inside.ranks, "phase": inside.phase, "save": inside.save},
    }
    began = time.monotonic()
    processes = start(job.framework, "train", job.ranks, spec, scratch)
    try:
        killed = _watch(job, processes, scratch, began + deadline_seconds)
    finally:
        _end(processes)
    return Outcome(time.monotonic() - began, killed, _results(scratch), _error(scratch, processes))


def start(framework: str, function: str, ranks: int, spec: dict[str, object], scratch: Path) -> list[Forked]:
    """Start the ranks of a function of `rank.py`."""
    (scratch / "spec.json").write_text(json.dumps(spec))
    port = str(_free_port())
    return start_ranks(
        [
            Work.of_rank(
                rank,
                scratch,
                f"tests.integrations.rank:{function}",
                framework,
                scratch / "spec.json",
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
            for rank in range(ranks)
        ]
    )


def _watch(job: Job, processes: Sequence[Forked], scratch: Path, deadline: float) -> tuple[int, ...]:
    """Wait until all ranks end, or some were killed and the others had their time; return the killed ones."""
    kill, killed_at = job.kill, None
    killed: set[int] = set()
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if now > deadline:
            break
        if kill is not None and not killed:
            if kill.phase == "bytes":
                if bytes_in(job.folder) >= kill.folder_bytes:
                    killed = set(kill.ranks)
            else:
                killed = {rank for rank in kill.ranks if (scratch / f"killed-{rank}").exists()}
            for rank in _ending_with(kill, killed, len(processes)):
                processes[rank].send_signal(signal.SIGKILL)
        if killed and killed_at is None:
            killed_at = now
        if killed_at is not None and now > killed_at + _END_SECONDS:
            break
        time.sleep(0.0005 if kill is not None and kill.phase == "bytes" and not killed else 0.01)
    if kill is not None and kill.phase != "bytes":
        killed |= {rank for rank in kill.ranks if (scratch / f"killed-{rank}").exists()}
    return tuple(sorted(killed))


def _ending_with(kill: Kill, killed: set[int], ranks: int) -> Sequence[int]:
    """Return the ranks that are killed from outside, now that some were."""
    if not killed:
        return ()
    if kill.phase == "bytes":
        return kill.ranks
    return range(ranks) if kill.takes_all else ()


def _end(processes: Sequence[Forked]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            process.send_signal(number)
        until = time.monotonic() + 3
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            time.sleep(0.01)


def _results(scratch: Path) -> dict[int, dict[str, object]]:
    return {int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in scratch.glob("rank-*.json")}


def _error(scratch: Path, processes: Sequence[Forked]) -> str:
    for path in sorted(scratch.glob("error-*.json")):
        said = json.loads(path.read_text())
        # What the table shows says nothing of this machine.
        message = (
            said["message"].replace(str(scratch.parents[1]), "").replace(sys.prefix, "").replace(str(REPOSITORY), "")
        )
        return f"{said['error']}: {message}"
    missing = [rank for rank in range(len(processes)) if not (scratch / f"rank-{rank}.json").exists()]
    if missing:
        return f"ranks {missing} ended without a result"
    # A rank that has left its result may still hang, or fail, in its teardown.
    statuses = {rank: process.poll() for rank, process in enumerate(processes) if process.poll() != 0}
    return f"ranks left results, and then ended with {statuses}" if statuses else ""


def bytes_in(folder: Path) -> int:
    """Return how many bytes the files of a folder have at this moment."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_size
        except OSError:
            continue
    return total


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def copy_of(folder: Path, target: Path) -> Path:
    """Copy a folder of checkpoints; return the copy."""
    shutil.copytree(folder, target)
    return target
