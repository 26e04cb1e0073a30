"""A training in the memory of its nodes that loses nodes again and again: its lives, and what each of them must show.

A node is the rank of the node, its agent, and a folder of its own in a tmpfs. A lost node loses all three.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from holdfast.core.plan.placement import RosterNode, grouping
from holdfast.training.runs.tiers.agent_files import is_agent_running, read_serving
from tests.distributed.peers.peer_cases import STEPS
from tests.support.forked_processes import await_within
from tests.support.gloo_worlds import Case, Launch
from tests.support.server_folders import steps_in

CASES = "tests.distributed.peers.peer_cases"
await_ = partial(await_within, 60.0)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and that its parent has not seen yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(*pids: int) -> None:
    """Kill processes, and await their end."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await_(lambda: not any(map(is_alive, pids)))


@contextmanager
def node_memory() -> Iterator[Path]:
    """A folder in a tmpfs for the folders of nodes; at its end no agent of them is left, whatever has failed."""
    with tempfile.TemporaryDirectory(prefix="peers-", dir="/dev/shm", ignore_cleanup_errors=True) as name:
        try:
            yield Path(name)
        finally:
            while agents := _agents_below(name):
                kill(*agents)


def _agents_below(folder: str) -> list[int]:
    """Return the processes whose command names a folder of nodes: agents, also those that have just been started."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{folder}/".encode() in (each / "cmdline").read_bytes() and is_alive(int(each.name)):
                found.append(int(each.name))
    return found


@dataclass
class Life:
    """One job of a training, from its start to its end."""

    folder: Path
    nodes: Sequence[str]
    """By rank."""

    def rank_of(self, node: str) -> int:
        """Return the process of the rank of a node."""
        return int((self.folder / f"pid.{self.nodes.index(node)}").read_text())

    @property
    def ranks(self) -> list[int]:
        """The processes of the ranks that have begun."""
        return [int(path.read_text()) for path in self.folder.glob("pid.*")]

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have begun, and none runs."""
        return len(self.ranks) == len(self.nodes) and not any(map(is_alive, self.ranks))

    def lines(self, kind: str) -> list[list[str]]:
        """Return the whole lines of one kind that rank 0 has noted."""
        path = self.folder / "journal"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [words[1:] for words in map(str.split, lines) if words[0] == kind]

    def newest(self, kind: str) -> int:
        """Return the newest step of the lines of one kind; 0 without one."""
        return max((int(words[0]) for words in self.lines(kind)), default=0)

    def log(self, rank: int = 0) -> str:
        """Return what a rank has logged."""
        return (self.folder / f"world/log.{rank}").read_text(errors="replace")

    def said(self) -> str:
        """Return the end of all that the ranks have printed."""
        logs = [*self.folder.glob("world/log.*"), *self.folder.glob("world/live.*"), self.folder / "journal"]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-4000:]}" for path in logs if path.exists())


@dataclass
class Run:
    """A training, its places, and what its lives have shown so far."""

    folder: Path
    memory: Path
    """The folders of the nodes are below."""
    whole: Mapping[int, str]
    """The losses of a training that nothing disturbs."""
    chance: random.Random
    nodes: Sequence[str] = ("a", "b", "c", "d")
    """The nodes of the next life, by rank."""
    replicated: int = 0
    """The newest step of which rank 0 was told that no loss of a node loses it."""
    lives: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The groups of the nodes of the next life."""
        return grouping([RosterNode(node, node) for node in self.nodes], 2).groups

    def agent(self, node: str) -> int:
        """Return the process of the agent of a node that serves; -1 without one."""
        serving = read_serving(str(self.memory / node))
        is_there = serving is not None and is_agent_running(str(self.memory / node))
        return serving.pid if is_there and serving is not None else -1

    def lose(self, life: Life, *nodes: str) -> None:
        """Lose nodes: their ranks, their agents, their memory."""
        kill(*(life.rank_of(node) for node in nodes))
        kill(*filter(lambda pid: pid > 0, map(self.agent, nodes)))
        for node in nodes:
            shutil.rmtree(self.memory / node)

    @contextmanager
    def life(self, *, awaited: str = "replicated", last_step: int = STEPS) -> Iterator[Life]:
        """Start a job; at the end of the block no rank is left.

        Args:
            awaited: The kind of line with whose first the block begins.
            last_step: The job ends by itself after this step.
        """
        self.lives += 1
        life = Life(self.folder / f"life-{self.lives}", tuple(self.nodes))
        arguments = {"folder": str(self.folder), "near": str(self.memory), "life": life.folder.name}
        case = Case(f"{CASES}:live", {**arguments, "nodes": list(life.nodes), "last_step": last_step})
        with Launch(len(life.nodes), [case], life.folder / "world"):
            await_(lambda: bool(life.lines(awaited)) or life.has_ended, said=life.said)
            assert life.lines(awaited), life.said()
            yield life
            kill(*life.ranks)
        self._judge(life)

    def _judge(self, life: Life) -> None:
        """Require that the job has resumed at an acknowledged step or a newer one, and trained as if undisturbed."""
        (resumed,) = (int(words[0]) for words in life.lines("resumed"))
        assert resumed >= self.replicated, f"resumed at {resumed} of {self.replicated}\n{life.said()}"
        losses = {int(step): loss for step, loss in life.lines("loss")}
        assert list(losses) == [*range(resumed + 1, resumed + 1 + len(losses))], life.said()
        differing = [step for step, loss in losses.items() if loss != self.whole[step]]
        assert not differing, f"other losses at steps {differing}\n{life.said()}"
        self.replicated = max(self.replicated, life.newest("replicated"))
        self.counts["lives"] += 1
        self.counts["steps with equal losses"] += len(losses)
        self.counts["steps replicated"] += len(life.lines("replicated"))

    def forget_near(self) -> None:
        """Expect no more than the root has: a loss that the near tier does not survive."""
        self.replicated = max(steps_in(self.root), default=0)

    def pause(self, seconds: float) -> None:
        """Let some time pass, up to so many seconds."""
        time.sleep(self.chance.random() * seconds)
