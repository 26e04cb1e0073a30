"""A run with a near tier and an agent, whose jobs are processes that are killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch

import holdfast
from holdfast import api
from holdfast.settings import Settings
from holdfast.training.runs.tiers.agent_files import AgentStatus, is_agent_running
from tests.support.forked_processes import await_within

SETTINGS = Settings(collect_grace_seconds=0.0, lease_seconds=2.0)
await_ = partial(await_within, 30.0)


def state_of(step: int, elements: int = 1000) -> dict[str, object]:
    return {"weights": torch.full((elements,), float(step)), "step": step}


@dataclass
class Run:
    """The places of a run, and the processes of its jobs."""

    root: Path
    near: Path
    orphan_seconds: float = 0.6
    linger_seconds: float = 0.3
    elements: int = 1000
    """Size of the state."""
    jobs: list[int] = field(default_factory=list)

    def manager(self, **options: object) -> holdfast.CheckpointManager:
        tier = holdfast.Tier(
            self.near,
            every=1,
            keep_last=2,
            agent=True,
            orphan_seconds=self.orphan_seconds,
            linger_seconds=self.linger_seconds,
        )
        options = {"every": 10, "preemption": False, "settings": SETTINGS, **options}
        return holdfast.CheckpointManager(self.root, process_group=False, near=tier, **options)  # type: ignore[arg-type]

    def begin(self, *steps: int, closes: bool = False, resumes_at: int | None = None) -> int:
        """Save some steps in another process, which then waits to be killed; return its id once the steps are near.

        Args:
            steps: The steps.
            closes: Whether the process ends by itself instead.
            resumes_at: The step that the process must resume at; None for any.
        """
        saved = self.root.parent / f"saved-{len([*self.root.parent.glob('saved-*')])}"
        pid = os.fork()
        if not pid:
            status = 1
            try:
                manager = self.manager()
                resumed = manager.load(state_of(0, self.elements))
                assert resumes_at in (None, resumed), resumed
                for step in steps:
                    handle = manager.maybe_save(step, state_of(step, self.elements))
                    assert handle is not None
                    handle.wait("near")
                if closes:
                    await_(lambda: (self.near / "agent.json").exists())
                    manager.close()
                saved.touch()
                while not closes:
                    time.sleep(1.0)
                status = 0
            finally:
                os._exit(status)
        self.jobs.append(pid)
        await_(lambda: saved.exists() or os.waitpid(pid, os.WNOHANG)[0] == pid)
        assert saved.exists(), "the job failed"
        if not closes:
            await_(lambda: is_agent_running(str(self.near)) and (self.near / "agent.json").exists())
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.jobs.remove(pid)

    def status(self) -> AgentStatus:
        return api.agent_status(str(self.near))

    def states(self) -> list[str]:
        """Return all states of the agents so far, in order."""
        text = (self.near / "agent.log").read_text()
        return re.findall(r": (watching|orphaned|draining|lingering|ended)$", text, re.MULTILINE)

    def await_state(self, state: str) -> AgentStatus:
        await_(lambda: self.status().state == state)
        return self.status()

    def await_end(self) -> None:
        await_(lambda: not is_agent_running(str(self.near)))


@contextmanager
def ended(run: Run) -> Iterator[Run]:
    """Kill at the end of a block all that a run has begun."""
    try:
        yield run
    finally:
        for pid in run.jobs:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if is_agent_running(str(run.near)):
            os.kill(run.status().pid, signal.SIGKILL)


@contextmanager
def run_in_memory(root: Path) -> Iterator[Run]:
    """Return a run whose near tier is in memory."""
    folder = Path(mkdtemp(dir="/dev/shm"))
    try:
        with ended(Run(root, folder / "near")) as run:
            yield run
    finally:
        shutil.rmtree(folder)
