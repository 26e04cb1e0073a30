"""A training with a near tier in memory and an agent is killed at random moments, in each way that a job dies.

The GPT of the examples under FSDP2, two ranks. After each kill the next job resumes: its losses are those of an
undisturbed training to the last bit, and no step is lost of which rank 0 was told that it is near. Ranks are forked;
torchrun starts them in the rounds that kill torchrun.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.distributed.tiers.memory_cases import ORPHAN_SECONDS, STEPS
from tests.distributed.tiers.memory_runs import (
    CASES,
    RANKS,
    Life,
    Run,
    await_,
    is_alive,
    kill,
    killed_agent,
    no_agent,
)
from tests.support.gloo_worlds import Case, run_world

ROUNDS = int(os.environ.get("MEMORY_KILLS", "1"))
"""Kills of each kind."""

SECONDS_MAX = 0.8
"""How long a job goes on at most before the kill, from its resume or from its first step that is near."""

STEPS_WITHOUT_AGENT = 50

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240 + 120 * ROUNDS),
    pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to"),
]


def _one_rank(run: Run, life: Life) -> None:
    kill(run.chance.choice(life.ranks))


def _all_ranks(run: Run, life: Life) -> None:
    kill(*run.chance.sample(life.ranks, RANKS))


def _torchrun(run: Run, life: Life) -> None:
    """Kill torchrun alone: a job that comes while its ranks live is refused."""
    kill(life.launcher)
    await_(lambda: not is_alive(life.launcher))
    time.sleep(run.chance.random())
    if all(map(is_alive, life.ranks)):
        run.require_refused()
    run.counts["ranks that outlived torchrun"] += sum(map(is_alive, life.ranks))
    kill(*life.ranks)


def _torchrun_and_ranks(run: Run, life: Life) -> None:
    kill(life.launcher)
    time.sleep(run.chance.random() * 0.05)
    kill(*run.chance.sample(life.ranks, RANKS))


def _watching_agent(run: Run, life: Life) -> None:
    """Kill the agent of a living job: the next save starts another."""
    run.agent()
    # A job that has not seen its agent yet takes that agent for one that still begins, for 20 seconds.
    seen = len(life.lines("near"))
    await_(lambda: len(life.lines("near")) > seen + 1, said=life.said)
    killed = killed_agent(run)
    await_(lambda: run.agent() != killed, said=life.said)
    assert run.status().state == "watching"
    kill(*life.ranks)


def _orphaned_agent(run: Run, life: Life) -> None:
    agent = run.agent()
    kill(*life.ranks)
    await_(lambda: run.status().state == "orphaned")
    time.sleep(run.chance.random() * ORPHAN_SECONDS * 0.8)
    assert run.status().state == "orphaned" and run.status().is_running
    kill(agent)


def _draining_agent(run: Run, life: Life) -> None:
    agent = run.agent()
    kill(*life.ranks)
    await_(lambda: run.status().state not in ("watching", "orphaned"))
    time.sleep(run.chance.random() * 0.03)
    kill(agent)
    run.counts["agents killed within their drain"] += run.status().state == "draining"
    run.require_whole()


def _agent_and_ranks(run: Run, life: Life) -> None:
    kill(*run.chance.sample([run.agent(), *life.ranks], RANKS + 1))


def _no_agent(run: Run, life: Life) -> None:
    """Train without an agent that could be started, and kill the ranks; the next job has an agent again."""
    with no_agent(run) as obstacle:
        run.counts[f"without an agent: {obstacle}"] += 1
        first, before = life.steps("loss")[-1], len(life.lines("near"))
        await_(lambda: life.steps("loss")[-1] >= first + STEPS_WITHOUT_AGENT, said=life.said)
        assert len(life.lines("near")) >= before + STEPS_WITHOUT_AGENT // 2, life.said()
        kill(*life.ranks)
        await_(lambda: life.has_ended)


KINDS: dict[str, Callable[[Run, Life], None]] = {
    "one rank": _one_rank,
    "all ranks": _all_ranks,
    "torchrun": _torchrun,
    "torchrun and its ranks": _torchrun_and_ranks,
    "the agent that watches": _watching_agent,
    "the agent of an orphan": _orphaned_agent,
    "the agent that drains": _draining_agent,
    "the agent and all ranks": _agent_and_ranks,
    "all ranks, and no agent can be started": _no_agent,
}

ALSO_BEFORE_THE_FIRST_SAVE = ("one rank", "all ranks", "torchrun and its ranks")
"""A job takes the lease of the run with its first save."""


@pytest.fixture
def near() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name) / "near"


def test_no_acknowledged_step_is_lost_and_all_losses_are_equal(
    tmp_path: Path, near: Path, record_property: Callable[[str, object], None]
) -> None:
    run_world(RANKS, [Case(f"{CASES}:undisturbed", {"folder": str(tmp_path / "whole")})], tmp_path / "world")
    whole = {int(step): loss for step, loss in Life(tmp_path / "whole").lines("loss")}
    assert list(whole) == [*range(1, STEPS + 1)]
    seed = int(os.environ.get("CAMPAIGN_SEED") or random.randrange(2**32))
    print(f"seed {seed}")
    chance, number, run = random.Random(seed), 0, None
    for kind in (kind for _ in range(ROUNDS) for kind in chance.sample([*KINDS], len(KINDS))):
        if run is None or run.acknowledged > STEPS - 2 * STEPS_WITHOUT_AGENT:
            if run is not None:
                run.end()
            number += 1
            folder = tmp_path / f"run-{number}"
            folder.mkdir()
            before = run
            run = Run(folder, near.with_name(f"near-{number}"), whole, chance)
            run.counts += before.counts if before else run.counts
        began = time.monotonic()
        awaited = chance.choice(["resumed", "near"]) if kind in ALSO_BEFORE_THE_FIRST_SAVE else "near"
        with run.life(torchrun=kind.startswith("torchrun"), awaited=awaited) as life:
            time.sleep(chance.random() * SECONDS_MAX)
            KINDS[kind](run, life)
        run.counts[f"kills: {kind}"] += 1
        print(f"{kind}: {run.acknowledged} acknowledged, {time.monotonic() - began:.1f} s", flush=True)
    assert run is not None
    run.end()
    for name, value in run.counts.items():
        record_property(name, value)
    print(dict(run.counts))
