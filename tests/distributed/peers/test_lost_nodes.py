"""A training in the memory of its nodes loses nodes, agents and ranks at random moments, and goes on.

A small model under FSDP2 and AdamW on four nodes in groups of two. After each loss the next job resumes: its losses are
those of an undisturbed training to the last bit, on any number of ranks, and no step is lost of which rank 0 was told
that the step is replicated.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.peers.peer_cases import STEPS
from tests.distributed.peers.peer_runs import CASES, Life, Run, await_, kill, node_memory
from tests.support.gloo_worlds import Case, run_world
from tests.support.server_folders import steps_in

ROUNDS = int(os.environ.get("PEER_LOSSES", "1"))
"""Losses of each kind."""

SECONDS_MAX = 0.6
"""How long a job goes on at most from its first replicated step to the loss."""

SURVIVOR_SECONDS = 0.3
"""How long the ranks of the other nodes go on at most."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240 + 180 * ROUNDS),
    pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to"),
]


def _lose(run: Run, *nodes: str, awaited: str = "replicated") -> Life:
    """Have a job lose nodes at a random moment."""
    with run.life(awaited=awaited) as life:
        run.pause(SECONDS_MAX)
        run.lose(life, *nodes)
        run.pause(SURVIVOR_SECONDS)
    return life


def _a_node(run: Run) -> None:
    _lose(run, run.chance.choice(run.nodes[1:]))


def _node_of_rank_0(run: Run) -> None:
    _lose(run, run.nodes[0])


def _two_of_different_groups(run: Run) -> None:
    _lose(run, *map(run.chance.choice, run.groups))


KINDS: dict[str, Callable[[Run], None]] = {
    "a node": _a_node,
    "the node of rank 0": _node_of_rank_0,
    "two nodes of different groups": _two_of_different_groups,
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
    run = Run(tmp_path, memory, whole, chance)
    for kind in (kind for _ in range(ROUNDS) for kind in chance.sample([*KINDS], len(KINDS))):
        began = time.monotonic()
        KINDS[kind](run)
        run.counts[f"lost: {kind}"] += 1
        print(f"{kind}: {run.replicated} replicated, {time.monotonic() - began:.1f} s", flush=True)
    with run.life() as life:
        pass
    for name, value in run.counts.items():
        record_property(name, value)
    print(dict(run.counts))
