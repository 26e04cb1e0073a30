"""A training with a near tier in memory that is killed again and again: its lives, and what each of them must show."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import holdfast
from holdfast import api
from holdfast.training.runs.tiers.agent_files import AgentStatus, agent_lock, is_agent_running
from tests.distributed.tiers.memory_cases import SETTINGS, STEPS
from tests.support.forked_processes import REPOSITORY, await_within, environment
from tests.support.gloo_worlds import Case, Launch
from tests.support.server_folders import steps_in

RANKS = 2
CASES = "tests.distributed.tiers.memory_cases"
await_ = partial(await_within, 90.0)
SURVIVOR_SECONDS = 2.0
"""How long a rank may go on whose peer or launcher is dead; torchrun waits, too, before it kills."""
BLOCKED_SECONDS_MAX = 1.0
"""How much longer than usual a step may be blocked."""


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and that its parent has not seen yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class Life:
    """One job of a training, from its start to its end."""

    folder: Path
    launcher: int = 0
    """The process of torchrun; 0 for ranks that were forked."""

    @property
    def ranks(self) -> list[int]:
        """The processes of the ranks that have begun."""
        return [int(path.read_text()) for path in self.folder.glob("pid.?")]

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have begun, and none runs."""
        return len(self.ranks) == RANKS and not any(map(is_alive, self.ranks))

    def lines(self, kind: str) -> list[list[str]]:
        """Return the whole lines of one kind that rank 0 has noted."""
        path = self.folder / "journal"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [words[1:] for words in map(str.split, lines) if words[0] == kind]

    def steps(self, kind: str) -> list[int]:
        """Return the steps of the lines of one kind."""
        return [int(words[0]) for words in self.lines(kind)]

    def said(self) -> str:
        """Return the end of all that the ranks have printed."""
        logs = [*self.folder.glob("log*"), *self.folder.glob("world/log.*"), self.folder / "journal"]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-2500:]}" for path in logs if path.exists())

    def end(self) -> None:
        """Await the end of the ranks, and kill those that do not end."""
        deadline = time.monotonic() + SURVIVOR_SECONDS
        while any(map(is_alive, self.ranks)) and time.monotonic() < deadline:
            time.sleep(0.01)
        kill(*filter(is_alive, self.ranks))
        await_(lambda: self.has_ended)


@dataclass
class Run:
    """A training, its places, and what its lives have shown so far."""

    folder: Path
    near: Path
    whole: Mapping[int, str]
    """The losses of a training that nothing disturbs."""
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    acknowledged: int = 0
    """The newest step of which rank 0 was told that it is near."""
    usual: list[float] = field(default_factory=list)
    """How long saves have blocked training."""

    def status(self) -> AgentStatus:
        return api.agent_status(str(self.near))

    @property
    def is_watched(self) -> bool:
        return is_agent_running(str(self.near))

    def agent(self) -> int:
        """Return the process of the agent, once one has its state written."""
        await_(lambda: self.is_watched and is_alive(self._pid()))
        return self._pid()

    def _pid(self) -> int:
        with suppress(holdfast.MissingError):
            return self.status().pid
        return -1

    @contextmanager
    def life(
        self, *, last_step: int = STEPS, torchrun: bool = False, awaited: str = "near", waits_seconds: float = 0.0
    ) -> Iterator[Life]:
        """Start a job; at the end of the block no rank is left.

        Args:
            last_step: The job ends by itself after this step.
            torchrun: Whether torchrun starts the ranks, rather than a fork.
            awaited: The kind of line with whose first the block begins; empty: at once.
            waits_seconds: How long the first save waits for the heartbeat of another job.
        """
        self.lives += 1
        name = f"life-{self.lives}"
        life = Life(self.folder / name)
        life.folder.mkdir()
        begin = self._torchrun if torchrun else self._forked
        with begin(life, name, last_step):
            if awaited:
                await_(lambda: bool(life.lines(awaited)) or life.has_ended, said=life.said)
                assert life.lines(awaited), life.said()
            yield life
            life.end()
        self._judge(life, waits_seconds)

    @contextmanager
    def _forked(self, life: Life, name: str, last_step: int) -> Iterator[None]:
        arguments = {"folder": str(self.folder), "near": str(self.near), "life": name, "last_step": last_step}
        with Launch(RANKS, [Case(f"{CASES}:live", arguments)], life.folder / "world"):
            yield

    @contextmanager
    def _torchrun(self, life: Life, name: str, last_step: int) -> Iterator[None]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += ["--module", CASES, str(self.folder), str(self.near), name, str(last_step)]
        with (
            (life.folder / "log").open("wb") as log,
            subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as launcher,
        ):
            life.launcher = launcher.pid
            try:
                yield
            finally:
                launcher.kill()

    def _judge(self, life: Life, waits_seconds: float) -> None:
        """Require that the job has resumed at an acknowledged step or a newer one, and trained as if undisturbed."""
        said = life.said
        for (resumed,) in life.lines("resumed"):
            assert int(resumed) >= self.acknowledged, f"resumed at {resumed} of {self.acknowledged}\n{said()}"
            losses = {int(step): loss for step, loss in life.lines("loss")}
            assert list(losses) == [*range(int(resumed) + 1, int(resumed) + 1 + len(losses))], said()
            differing = [step for step, loss in losses.items() if loss != self.whole[step]]
            assert not differing, f"other losses at steps {differing}\n{said()}"
            self.counts["steps with equal losses"] += len(losses)
        self.counts["steps acknowledged near"] += len(life.lines("near"))
        self.acknowledged = max([self.acknowledged, *life.steps("near")])
        blocked = [float(seconds) for _, seconds in life.lines("blocked")]
        self.usual += [each for each in blocked if each > 0.001]  # The others have no save.
        if blocked:
            usual = statistics.median(self.usual or blocked)
            self.counts["blocked_milliseconds_max"] = max(
                self.counts["blocked_milliseconds_max"], int(1000 * max(blocked))
            )
            assert max(blocked) <= usual + waits_seconds + BLOCKED_SECONDS_MAX, (
                f"{max(blocked)} s, usual {usual} s\n{said()}"
            )
        self.counts["lives"] += 1

    def require_refused(self) -> None:
        """Require that a second job beside a living one is refused, and changes nothing that counts."""
        with self.life(awaited="", waits_seconds=SETTINGS.lease_seconds) as second:
            await_(lambda: second.has_ended, said=second.said)
            errors = second.lines("failed")
            assert errors and errors[0][1].startswith("ConflictError"), second.said()
            assert not second.lines("near"), second.said()
        self.counts["second jobs refused"] += 1

    def require_whole(self) -> None:
        """Require that each byte of each step that is left is the one that was saved."""
        for place in (self.near, self.folder / "root"):
            for step in steps_in(place):
                with suppress(holdfast.MissingError):  # An agent or a job may collect the step meanwhile.
                    assert list(holdfast.open_checkpoint(place / f"step-{step:012d}").verify()) == []
                    self.counts["steps verified"] += 1

    def end(self) -> None:
        """Resume and train; require that the end leaves all in the root, and neither packs in memory nor an agent."""
        last_step = self.acknowledged + 12
        with self.life(last_step=last_step) as life:
            await_(lambda: life.has_ended, said=life.said)
        assert life.steps("loss")[-1] == last_step, life.said()
        await_(lambda: not self.is_watched)
        newest = last_step - (last_step % 2 if last_step % 5 else 0)
        assert steps_in(self.folder / "root")[-1] == newest == life.steps("near")[-1], life.said()
        assert steps_in(self.near) == [] and not [*self.near.glob(".spare-*"), *self.near.glob("step-*")]
        self.require_whole()


def killed_agent(run: Run) -> int:
    """Kill the agent; return the process that it was."""
    pid = run.agent()
    kill(pid)
    return pid


@contextmanager
def no_agent(run: Run) -> Iterator[str]:
    """Kill the agent, and let no job start one for a block; yield by which obstacle."""
    if run.chance.random() < 0.5:
        while True:
            killed_agent(run)
            with suppress(holdfast.ConflictError), agent_lock(str(run.near)):
                yield "its lock is held"
                return
    log = run.near / "agent.log"
    log.rename(run.near.with_name(f"agent-{run.lives}.log"))
    log.mkdir()
    try:
        killed_agent(run)
        await_(lambda: not run.is_watched)
        yield "its log cannot be opened"
        assert not run.is_watched
    finally:
        log.rmdir()
