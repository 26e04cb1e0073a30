"""Trainings that are told to end at random moments, one after the other over the same root, and what came of each."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import holdfast
from tests.support.forked_processes import KILLED_SECONDS, REPOSITORY, Forked, Work, environment, start_ranks

Told = Literal["one", "all", "launcher"]
"""Who is sent SIGTERM: a rank, every rank, or torchrun, which tells its ranks."""

Process = Forked | subprocess.Popen[bytes]

WORLD_SIZE = 2
PATIENCE_SECONDS = 120.0
FOREVER = 10_000_000


@dataclass(frozen=True, slots=True)
class Ending:
    """How one training ended."""

    resumed: int | None
    """The step it went on from."""

    resumed_digest: str
    """Of what it loaded."""

    code: int
    """With which every rank left."""

    step: int
    """Where every rank left."""

    left_digest: str
    """Of what every rank had."""

    why: str
    """What it said."""

    seconds: float
    """From the signal until every process was gone."""


@contextmanager
def training(
    root: Path,
    scratch: Path,
    *,
    grace_seconds: float,
    steps: int = FOREVER,
    looked_at: str = "",
    torchrun: bool = False,
) -> Iterator[Sequence[Process]]:
    """Start the ranks, or torchrun; whatever still lives in the end is killed."""
    scratch.mkdir(parents=True)
    arguments = [*map(str, (root, scratch, grace_seconds, steps, looked_at))]
    processes: Sequence[Process]
    if torchrun:
        processes = [_agent("tests.distributed.jobs.preempted_worker", arguments, scratch / "log.0")]
    else:
        world = [{"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)} for rank in range(WORLD_SIZE)]
        main = "tests.distributed.jobs.preempted_worker:main"
        processes = start_ranks(
            [Work.of_rank(rank, scratch, main, *arguments, **each) for rank, each in enumerate(world)]
        )
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait(KILLED_SECONDS)


def _agent(module: str, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD_SIZE}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--module", module, *arguments]
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def interrupted(root: Path, scratch: Path, told: Told, chance: random.Random, *, grace_seconds: float) -> Ending:
    """Train, tell it to end at a random moment, and judge how it ended and what lies there."""
    with training(root, scratch, grace_seconds=grace_seconds, torchrun=told == "launcher") as processes:
        _wait_for_beginning(scratch, processes)
        time.sleep(chance.random() * 0.8)
        start = time.monotonic()
        for process in [chance.choice(processes)] if told == "one" else chance.sample(processes, len(processes)):
            process.send_signal(signal.SIGTERM)
            time.sleep(chance.choice([0.0, 0.01]))
        for process in processes:
            process.wait(PATIENCE_SECONDS)
        seconds = time.monotonic() - start
        logs = _logs(scratch)
        ends = []
        for rank in range(WORLD_SIZE):
            path = scratch / f"end.{rank}.json"
            assert path.exists(), f"rank {rank} did not leave by its loop\n{logs}"
            ends.append(json.loads(path.read_text()))
        first, second = ends
        assert first == second, f"ranks ended apart: {ends}\n{logs}"
        if told != "launcher":
            assert [process.returncode for process in processes] == [first["code"]] * WORLD_SIZE, logs
    _judge_root(root, first["code"], first["step"], logs)
    return Ending(first["resumed"], first["digest"], first["code"], first["step"], first["left"], first["why"], seconds)


def trained_through(root: Path, scratch: Path, steps: list[int]) -> dict[int, str]:
    """Train without a break; return digests of what there was at some steps."""
    looked_at = ",".join(map(str, steps))
    with training(root, scratch, grace_seconds=15.0, steps=max(steps), looked_at=looked_at) as processes:
        for process in processes:
            process.wait(600)
        assert [process.returncode for process in processes] == [0] * WORLD_SIZE, _logs(scratch)
    return {int(step): digest for step, digest in json.loads((scratch / "seen.json").read_text()).items()}


def _judge_root(root: Path, code: int, step: int, logs: str) -> None:
    """Refuse an exit code that does not say what lies there."""
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        steps = manager.steps()
    assert code in (85, 86), logs
    assert (code == 85) == (step in steps), f"exit code {code}, left at step {step}, committed are {steps[-5:]}\n{logs}"
    if steps:
        assert steps[-1] <= step
        newest = holdfast.open_checkpoint(root / f"step-{steps[-1]:012d}")
        assert list(newest.verify()) == [], logs


def _wait_for_beginning(scratch: Path, processes: Sequence[Process]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all((scratch / f"begun.{rank}").exists() for rank in range(WORLD_SIZE)):
        assert time.monotonic() < deadline and all(each.poll() is None for each in processes), _logs(scratch)
        time.sleep(0.01)


def _logs(scratch: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in scratch.glob("log.*"))


def require_never_broken(endings: list[Ending], digests: dict[int, str]) -> None:
    """Refuse a training that lost a step it said is saved, or that differs from one without a break."""
    newest: Ending | None = None
    for each in endings:
        if newest is not None:
            assert (each.resumed, each.resumed_digest) == (newest.step, newest.left_digest), (newest, each)
        assert each.left_digest == digests[each.step], f"step {each.step} is not what it is without a break"
        # After one that could not be saved training goes on from a save before it.
        newest = each if each.code == 85 else None
