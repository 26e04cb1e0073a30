"""A training in the memory of its nodes loses nodes, agents and ranks at random moments, and goes on.

A small model under FSDP2 and AdamW on four nodes in groups of two. After each loss the next job resumes: its losses are
those of an undisturbed training to the last bit, on any number of ranks, and no step is lost of which rank 0 was told
that the step is replicated.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.stored.peers.roster import ROSTER_FILE
from tests.distributed.peers.nodes import node_memory
from tests.distributed.peers.peer_cases import STEPS
from tests.distributed.peers.peer_runs import CASES, Life, Run, await_, end, no_agent
from tests.support.gloo_worlds import Case, run_world
from tests.support.server_folders import steps_in

ROUNDS = int(os.environ.get("PEER_LOSSES", "1"))
"""Losses of each kind."""

SECONDS_MAX = 0.6
"""How long a job goes on at most from its first replicated step to the loss."""

SURVIVOR_SECONDS = 0.3
"""How long the ranks of the other nodes go on at most."""

STEPS_WITHOUT_AGENT = 50
STEPS_LEFT = 150
"""Steps that a training must still have before the next loss."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240 + 180 * ROUNDS),
    pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to"),
]


def _lose(run: Run, *nodes: str, awaited: str = "replicated") -> Life:
    """Have a job lose nodes at a random moment."""
    with run.life(awaited=awaited) as life:
        run.pause(SECONDS_MAX)
        run.lose(life, *(nodes or life.nodes[:1]))
        run.pause(SURVIVOR_SECONDS)
    return life


def _node_of_rank_0(run: Run) -> None:
    _lose(run)


def _two_of_different_groups(run: Run) -> None:
    _lose(run, *map(run.chance.choice, run.groups))


def _domain(run: Run) -> None:
    """Lose two nodes of one domain: they are in different groups."""
    run.domains = dict.fromkeys(run.chance.sample(run.nodes, 2), "rack")
    _lose(run, *run.domains)
    run.domains = {}


def _two_of_one_group(run: Run) -> None:
    _lose_all_near(run, run.chance.choice(run.groups))


def _all_keepers(run: Run) -> None:
    _lose_all_near(run, run.keepers)


def _all_nodes(run: Run) -> None:
    _lose_all_near(run, run.nodes)


def _lose_all_near(run: Run, nodes: Sequence[str]) -> None:
    """Lose what no parity can bring back: the next job takes the newest step of the root, and says so."""
    with run.life() as life:
        await_(lambda: bool(steps_in(run.root)), said=life.said)
        run.pause(SECONDS_MAX)
        run.lose(life, *nodes)
    newest, run.replicated = life.newest("near"), max(steps_in(run.root))
    with run.life(awaited="resumed") as life:
        log = life.log()
    assert life.newest("resumed") == run.replicated, life.said()
    assert f"from {run.root}" in log, life.said()
    told = ("older steps are tried", "steps that only this folder had are lost", "have lost their folders")
    assert newest <= run.replicated or any(text in log for text in told), life.said()


def _agent(run: Run) -> None:
    """Have no agent of one node for 50 steps, which are saved; the next agent protects the other node of its group."""
    with run.life() as life:
        # A keeper without an agent may still have the manifest of a damaged step, and refuse the step a second time.
        await_(lambda: life.newest("replicated") > run.trained, said=life.said)
        node, other = run.chance.sample(run.chance.choice(run.groups), 2)
        with no_agent(run, node):
            first = life.newest("loss")
            await_(lambda: life.newest("loss") >= first + STEPS_WITHOUT_AGENT, said=life.said)
            await_(lambda: life.newest("near") > first + STEPS_WITHOUT_AGENT // 2, said=life.said)
            steps = [*(run.memory / other).glob("step-*")]
            assert len(steps) <= 8, f"{sorted(each.name for each in steps)} {life.said()}"
            failed = life.lines("failed")
            assert len(failed) <= 1, failed  # The save that the kill of the agent met may fail.
        last = life.newest("loss")
        await_(lambda: life.newest("near", "replicated") > last, said=life.said)
        run.lose(life, other)


def _all_ranks_of_fewer_and_more(run: Run) -> None:
    """Kill all ranks, and no agent: also a step that is only near is there for the next job, on any number of ranks.

    First on two nodes, one of which has two ranks. A job finds the memory of other nodes if one of its own has not lost
    its folder.
    """
    first, second, *_ = sorted(run.nodes, key=lambda node: not (run.memory / node / ROSTER_FILE).exists())
    for nodes in ([first, first, second], run.nodes):
        run.nodes = nodes
        with run.life() as life:
            run.pause(SECONDS_MAX)
            end(run.chance.sample(life.ranks, len(nodes)))
        run.replicated = max(run.replicated, life.newest("near"))


def _second_before_healed(run: Run) -> None:
    """Lose a node of the other group while the next job has not yet protected a step anew."""
    first, second = run.chance.sample([run.chance.choice(group) for group in run.groups], 2)
    nodes = run.nodes
    _lose(run, first)
    run.nodes = [node for node in nodes if node != first]
    with run.life(awaited="resumed") as life:
        assert f"node {first} silent" in life.log(), life.said()
        run.pause(SURVIVOR_SECONDS)
        run.lose(life, second)
    run.counts["healed before the second loss"] += bool(life.lines("replicated"))
    run.nodes = nodes


KINDS: dict[str, Callable[[Run], None]] = {
    "the node of rank 0": _node_of_rank_0,
    "two nodes of different groups": _two_of_different_groups,
    "a domain": _domain,
    "two nodes of one group": _two_of_one_group,
    "all keepers": _all_keepers,
    "all nodes": _all_nodes,
    "an agent": _agent,
    "all ranks, of fewer and of more": _all_ranks_of_fewer_and_more,
    "a node, and a second one before the healing save": _second_before_healed,
}


@pytest.fixture
def memory() -> Iterator[Path]:
    with node_memory() as folder:
        yield folder


def test_no_replicated_step_is_lost_and_all_losses_are_equal(
    tmp_path: Path, memory: Path, record_property: Callable[[str, object], None]
) -> None:
    run_world(1, [Case(f"{CASES}:undisturbed", {"folder": str(tmp_path / "whole")})], tmp_path / "world")
    whole = {int(step): loss for step, loss in Life(tmp_path / "whole", ("a",)).lines("loss")}
    assert list(whole) == [*range(1, STEPS + 1)]
    seed = int(os.environ.get("CAMPAIGN_SEED") or random.randrange(2**32))
    print(f"seed {seed}")
    chance = random.Random(seed)
    run, runs = Run(tmp_path / "run-0", memory / "run-0", whole, chance), 0
    for kind in (kind for _ in range(ROUNDS) for kind in chance.sample([*KINDS], len(KINDS))):
        if run.replicated > STEPS - STEPS_LEFT:
            run.end()
            runs += 1
            run = Run(tmp_path / f"run-{runs}", memory / f"run-{runs}", whole, chance, counts=run.counts)
        began = time.monotonic()
        KINDS[kind](run)
        run.counts[f"lost: {kind}"] += 1
        print(f"{kind}: {run.replicated} replicated, {time.monotonic() - began:.1f} s", flush=True)
    run.end()
    for name, value in run.counts.items():
        record_property(name, value)
    print(dict(run.counts))
