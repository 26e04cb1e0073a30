"""What a replaced job, a stale node or an absent one still has never counts again: neither twice, nor once removed."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast import api
from tests.distributed.peers.networks import may_make_networks, networks
from tests.distributed.peers.nodes import node_memory
from tests.distributed.peers.peer_cases import SETTINGS, STEPS
from tests.distributed.peers.peer_runs import CASES, Life, Run, await_, end
from tests.support.forked_processes import Forked, await_within
from tests.support.gloo_worlds import GLOO_TIMEOUT_SECONDS, Case, run_world
from tests.support.server_folders import steps_in

NODES = ("a", "b", "c")
ENDED_SECONDS = 2 * GLOO_TIMEOUT_SECONDS
"""A rank whose other ranks were killed may wait in gloo for its timeout."""

ROUNDS = int(os.environ.get("PEER_LOSSES", "1"))

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("whole")
    run_world(1, [Case(f"{CASES}:undisturbed", {"folder": str(folder / "life")})], folder / "world")
    return {int(step): loss for step, loss in Life(folder / "life", ("a",)).lines("loss")}


@pytest.fixture(params=range(ROUNDS))
def run(request: pytest.FixtureRequest, tmp_path: Path, whole: dict[int, str]) -> Iterator[Run]:
    seed = f"{os.environ.get('CAMPAIGN_SEED') or random.randrange(2**32)} {request.param}"
    print(f"seed {seed}")
    with node_memory() as memory:
        yield Run(tmp_path, memory / "nodes", whole, random.Random(seed), NODES)


def counting(run: Run) -> dict[str, int]:
    """Return the steps that count, in both places, by attempt."""
    found = api.list_steps(run.root).steps
    return {
        each.manifest.attempt: each.step
        for each in found
        if each.manifest is not None and not (each.fenced or each.superseded)
    }


def signal_all(ranks: Sequence[Forked], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)


def is_stopped(rank: Forked) -> bool:
    return rank.poll() is None and ") T " in Path(f"/proc/{rank.pid}/stat").read_text()


def train_past_the_root(run: Run) -> dict[str, int]:
    """Train until the near tier has a newer step than the root; return the newer steps, by attempt."""
    with run.life() as life:
        await_(lambda: bool(steps_in(run.root)), said=life.said)
        await_(lambda: life.newest("replicated") > steps_in(run.root)[-1], said=life.said)
    return {attempt: step for attempt, step in counting(run).items() if step > steps_in(run.root)[-1]}


def lose_and_take_back(run: Run, node: str, stale: Path) -> None:
    """Lose a node with its memory, and have it come back with an older copy of the memory."""
    run.kill_agents(node)
    shutil.rmtree(run.memory / node)
    shutil.copytree(stale, run.memory / node)


def test_no_removed_step_comes_back_with_a_stale_node_or_one_that_was_away(run: Run) -> None:
    """Neither at once nor after another job has come to the same steps; two keepers of three have the steps again."""
    newer = train_past_the_root(run)
    node, other = run.chance.sample(NODES, 2)
    stale, away = run.folder / "stale", run.memory.with_name("away")
    shutil.copytree(run.memory / node, stale)
    run.kill_agents(other)
    (run.memory / other).rename(away)
    api.remove_steps(run.root, [*newer.values()], grace_seconds=0.0, settings=SETTINGS)
    left = counting(run)
    run.replicated = max(left.values())
    assert not left.keys() & newer.keys()
    away.rename(run.memory / other)
    lose_and_take_back(run, node, stale)
    assert not counting(run).keys() & newer.keys()
    with run.life() as life:
        assert life.newest("resumed") == run.replicated, life.said()
    after = counting(run)
    assert not after.keys() & newer.keys()
    lose_and_take_back(run, node, stale)
    found = counting(run)
    # Steps that a collection took meanwhile may be back: they are older than the newest one.
    assert all(step < run.replicated for attempt, step in found.items() if attempt not in after)
    assert run.replicated in found.values() and not found.keys() & newer.keys()


def test_no_step_of_a_stopped_trainer_counts_once_another_job_took_over(run: Run) -> None:
    """A job loses the ranks of a node, stops, and goes on while the next job trains on that node and another one.

    The ranks stop at a random moment, or one of them before it puts a manifest.
    """
    stops_at = run.chance.choice([0, 6])
    run.blocked_seconds_max = math.inf
    with run.life(stops_at=stops_at) as stopped:
        if stops_at:
            await_(lambda: any(map(is_stopped, stopped.ranks)), said=stopped.said)
        else:
            run.pause(0.5)
        kept = [node for node in stopped.nodes[1:] if not any(map(is_stopped, stopped.ranks_of(node)))]
        node = run.chance.choice(kept)
        signal_all(stopped.ranks, signal.SIGSTOP)
        end(stopped.ranks_of(node))
        run.nodes = [node, "new"]
        with run.life(awaited="near") as life:

            def has_failed() -> bool:
                signal_all(stopped.ranks, signal.SIGCONT)  # Another rank may stop in the place of the first.
                return bool(stopped.lines("failed")) or stopped.ranks[0].poll() is not None

            await_within(ENDED_SECONDS, has_failed, said=stopped.said)
            last = life.newest("loss")
            await_(lambda: life.newest("replicated") >= min(last + 1, STEPS), said=life.said)
        acknowledged = max(map(stopped.newest, ("near", "replicated", "root")))
        assert acknowledged <= life.newest("resumed"), f"{stopped.said()}\n{life.said()}"
    with run.life(awaited="resumed"):
        pass


def test_no_step_counts_twice_after_the_agents_of_a_node_were_cut_off(run: Run) -> None:
    """One node and the two others drop all that the other side sends to an agent; the training itself goes on.

    Then the two other nodes lose their ranks, another job goes on there, and the sides meet again. If rank 0 is on the
    node that was cut off, its heartbeat in the root refuses the other job until rank 0 has given up: its saves under
    way end after its network has healed.
    """
    if not may_make_networks():
        pytest.skip("no right to make network namespaces")
    run.blocked_seconds_max = 40.0  # For the deadline of a call of an agent, and then not at each save.
    with networks(NODES) as run.networks:
        with run.life() as old:
            run.pause(0.5)
            node = run.chance.choice(NODES)
            run.networks.cut(node)
            run.pause(5.0)
            print(f"cut off: {node} of {old.nodes}")
            run.nodes = [each for each in NODES if each != node]
            end(old.ranks_of(*run.nodes))
            acknowledged = max(map(old.newest, ("replicated", "root")))
            if node == old.nodes[0]:
                run.networks.heal()
                await_within(ENDED_SECONDS, lambda: old.has_ended, said=old.said)
            with run.life() as life:
                run.networks.heal()
                await_within(ENDED_SECONDS, lambda: old.has_ended, said=old.said)
                last = life.newest("loss")
                await_(lambda: life.newest("replicated") >= min(last + 1, STEPS), said=life.said)
                acknowledged = max(acknowledged, *map(old.newest, ("replicated", "root")))
            assert acknowledged <= life.newest("resumed"), f"{old.said()}\n{life.said()}"
        counted = counting(run)
        assert len({*counted.values()}) == len(counted), counted
        run.nodes = NODES
        with run.life(awaited="resumed"):
            pass
        counted = counting(run)
        assert len({*counted.values()}) == len(counted), counted
