"""A training in the memory of its nodes that loses nodes again and again: its lives, and what each of them must show.

A node is its ranks, its agent, and a folder of its own in a tmpfs. A lost node loses all three.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import holdfast
from holdfast.core.plan.placement import Grouping, RosterNode, grouping
from holdfast.training.runs.tiers.agent_files import agent_lock
from tests.distributed.peers.networks import Networks
from tests.distributed.peers.nodes import agents_naming, kill
from tests.distributed.peers.peer_cases import STEPS
from tests.support.forked_processes import Forked, await_within
from tests.support.gloo_worlds import Case, Launch
from tests.support.server_folders import steps_in

CASES = "tests.distributed.peers.peer_cases"
await_ = partial(await_within, 60.0)


def end(ranks: Sequence[Forked]) -> None:
    """Kill ranks, and await their end."""
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.wait(60.0)


@dataclass
class Life:
    """One job of a training, from its start to its end."""

    folder: Path
    nodes: Sequence[str]
    """By rank."""
    ranks: Sequence[Forked] = ()

    def ranks_of(self, *nodes: str) -> list[Forked]:
        """Return the ranks of some nodes."""
        return [rank for rank, node in zip(self.ranks, self.nodes, strict=True) if node in nodes]

    @property
    def has_ended(self) -> bool:
        """Whether no rank runs."""
        return all(rank.poll() is not None for rank in self.ranks)

    def lines(self, kind: str) -> list[list[str]]:
        """Return the whole lines of one kind that rank 0 has noted."""
        path = self.folder / "journal"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [words[1:] for words in map(str.split, lines) if words[0] == kind]

    def newest(self, *kinds: str) -> int:
        """Return the newest step that has a line of each kind; 0 without one."""
        return max(set.intersection(*({int(words[0]) for words in self.lines(kind)} for kind in kinds)), default=0)

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
    """The node of each rank of the next life, in any order."""
    replicated: int = 0
    """The newest step of which rank 0 was told that no loss of a node loses it."""
    trained: int = 0
    """The newest step that any life has trained."""
    blocked_seconds_max: float = 8.0
    """A step is never blocked for so long: a busy machine takes a second or two, a wait that nobody ends takes 10."""
    domains: dict[str, str] = field(default_factory=dict)
    """The domain of a node, where it is not a domain of its own."""
    networks: Networks | None = None
    """The networks of the nodes; None: all are on that of this host."""
    lives: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The groups of the nodes of the next life."""
        return self._grouping().groups

    @property
    def keepers(self) -> Sequence[str]:
        """The nodes of the next life that keep the small objects."""
        return self._grouping().keepers

    def _grouping(self) -> Grouping:
        return grouping([RosterNode(node, self.domains.get(node, node)) for node in {*self.nodes}], 2)

    def kill_agents(self, *nodes: str) -> None:
        """Kill the agents of some nodes."""
        kill(*(agent for node in nodes for agent in agents_naming(f'"{self.memory / node}"')))

    def lose(self, life: Life, *nodes: str) -> None:
        """Lose nodes: their ranks, their agents, their memory."""
        end(life.ranks_of(*nodes))
        self.kill_agents(*nodes)
        for node in nodes:
            shutil.rmtree(self.memory / node)

    @contextmanager
    def life(self, *, awaited: str = "replicated", last_step: int = STEPS, stops_at: int = 0) -> Iterator[Life]:
        """Start a job; at the end of the block no rank is left.

        Args:
            awaited: The kind of line with whose first the block begins.
            last_step: The job ends by itself after this step.
            stops_at: The rank that publishes this step stops before it puts the manifest; 0 for none.
        """
        self.lives += 1
        expected = self.replicated
        life = Life(self.folder / f"life-{self.lives}", self.chance.sample(self.nodes, len(self.nodes)))
        arguments: dict[str, object] = {"folder": str(self.folder), "near": str(self.memory), "life": life.folder.name}
        domains = [self.domains.get(node, node) for node in life.nodes]
        arguments |= {"nodes": list(life.nodes), "domains": domains, "last_step": last_step, "stops_at": stops_at}
        if (networks := self.networks) is not None:
            arguments["networks"] = [(networks.name_of(node), networks.address_of(node)) for node in life.nodes]
        case = Case(f"{CASES}:live", arguments)
        with Launch(len(life.nodes), [case], life.folder / "world") as launch:
            life.ranks = launch.processes
            await_(lambda: bool(life.lines(awaited)) or life.has_ended, said=life.said)
            assert life.lines(awaited), life.said()
            yield life
            end(life.ranks)
        self._judge(life, expected)

    def _judge(self, life: Life, expected: int) -> None:
        """Require that the job has resumed at an acknowledged step or a newer one, and trained as if undisturbed."""
        (resumed,) = (int(words[0]) for words in life.lines("resumed"))
        assert resumed >= expected, f"resumed at {resumed} of {expected}\n{life.said()}"
        losses = {int(step): loss for step, loss in life.lines("loss")}
        assert list(losses) == [*range(resumed + 1, resumed + 1 + len(losses))], life.said()
        differing = [step for step, loss in losses.items() if loss != self.whole[step]]
        assert not differing, f"other losses at steps {differing}\n{life.said()}"
        blocked = max((float(seconds) for _, seconds in life.lines("blocked")), default=0.0)
        assert blocked < self.blocked_seconds_max, f"a step was blocked for {blocked} s\n{life.said()}"
        self.replicated = max(self.replicated, life.newest("replicated"))
        self.trained = max(self.trained, life.newest("loss"))
        self.counts["lives"] += 1
        self.counts["steps with equal losses"] += len(losses)
        self.counts["steps replicated"] += len(life.lines("replicated"))

    def pause(self, seconds: float) -> None:
        """Let some time pass, up to so many seconds."""
        time.sleep(self.chance.random() * seconds)

    def end(self) -> None:
        """Resume and train; require that the end leaves all in the root, and neither packs in memory nor agents."""
        last_step = self.replicated + 12
        with self.life(last_step=last_step) as life:
            await_(lambda: life.has_ended, said=life.said)
        assert life.newest("loss") == last_step, life.said()
        await_(lambda: not agents_naming(f"{self.memory}/"))
        newest = steps_in(self.root)[-1]
        assert newest == life.newest("replicated"), life.said()
        left = [*self.memory.glob("*/step-*"), *self.memory.glob("*/parity/*")]
        assert not left, f"{[[each, *each.rglob('*')] for each in left]}\n{life.said()}"
        assert list(holdfast.open_checkpoint(self.root / f"step-{newest:012d}").verify()) == []


@contextmanager
def no_agent(run: Run, node: str) -> Iterator[None]:
    """Kill the agent of a node, and let none be started for a block."""
    while True:
        run.kill_agents(node)
        with suppress(holdfast.ConflictError), agent_lock(str(run.memory / node)):
            yield
            return
