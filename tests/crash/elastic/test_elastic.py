"""A job under four agents loses nodes and ranks by SIGKILL, gets them back, and trains every sample once."""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import holdfast
from tests.crash.elastic.agents import Agents
from tests.support.trained_lines import Line, lineage, lines_of, require_exact, trained_again, write_text

ROUNDS = int(os.environ.get("ELASTIC_ROUNDS", "0"))
"""How often a node is lost, then a rank, and a node comes back; `make campaign` asks for three."""

RANKS, SAMPLES, EVERY = 4, 437, 10
EPOCHS = 5 * ROUNDS + 3
"""About 95 steps a round, and more than a round takes: the ranks that are left train while a node starts."""
STEPS = EPOCHS * -(-SAMPLES // 24)
STEPS_BETWEEN = 12
"""Steps that are trained before the next loss: with a save among them, so that the next life resumes at another one."""
WAIT_SECONDS = 240.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300 + 300 * ROUNDS),
    pytest.mark.skipif(not ROUNDS, reason="takes minutes: set ELASTIC_ROUNDS, as `make campaign` does"),
]


def test_a_job_that_loses_nodes_and_ranks_trains_every_sample_once(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    text = write_text(tmp_path / "text", SAMPLES)
    options = ["--text", str(text), "--epochs", str(EPOCHS), "--every", str(EVERY), "--keep-last", str(STEPS)]
    with Agents(tmp_path, RANKS, [*options, "--step-seconds", "0.5"]) as agents:
        for _ in range(RANKS):
            agents.start()
        _report(agents, "started", lambda: None, RANKS)
        for number in range(ROUNDS):
            lost, place = chance.choice([*agents.running]), f"{number + 1}/{ROUNDS}"
            _report(agents, f"{place}: agent {lost} and its rank lost", partial(agents.lose_node, lost), RANKS - 1)
            victim = chance.choice([*agents.running])
            _report(agents, f"{place}: rank of agent {victim} lost", partial(agents.kill_worker, victim), RANKS - 1)
            _report(agents, f"{place}: an agent back", agents.start, RANKS)
        codes = [agent.wait(WAIT_SECONDS) for agent in agents.running.values()]
        assert codes == [0] * RANKS, agents.log()[-9000:]
        lines, log = lines_of(agents.trained), agents.log()

    require_exact(lines, SAMPLES, EPOCHS)
    assert max(lineage(lines)) == STEPS
    _require_saved_once(agents.root, log)
    again = trained_again(lines)
    print(f"{STEPS} steps, {again} trained again after {2 * ROUNDS} losses")
    assert again <= 2 * ROUNDS * 2 * EVERY


def _report(agents: Agents, what: str, change: Callable[[], object], ranks: int) -> None:
    """Make a change, wait until the job has trained some steps after it, and print how long the job stood still."""
    before = lines_of(agents.trained)
    life, began = _life(before), time.time()
    change()
    while True:
        new = [line for line in lines_of(agents.trained) if line.time > began]
        first = next((line for line in new if line.ranks == ranks and _life([line]) != life), None)
        if first is not None and new[-1].step >= first.step + STEPS_BETWEEN:
            break
        alive = [agent.poll() is None for agent in agents.running.values()]
        assert all(alive) and time.time() < began + WAIT_SECONDS, f"{what}: no step\n{agents.log()[-9000:]}"
        time.sleep(0.1)
    last = max((line for line in lines_of(agents.trained) if line.time < first.time), key=_time, default=None)
    still = f", {first.time - last.time:.1f} s without a step" if last else ""
    print(f"{what}: first step {first.step} after {first.time - began:.1f} s{still}", flush=True)


def _life(lines: list[Line]) -> tuple[int, int] | None:
    return (lines[-1].ranks, lines[-1].resumed) if lines else None


def _time(line: Line) -> float:
    return line.time


def _require_saved_once(root: Path, log: str) -> None:
    """Check that all steps that were due are stored, and none was committed twice."""
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        steps = manager.steps()
    assert {*range(EVERY, STEPS + 1, EVERY)} <= {*steps}
    said = Counter(int(step) for step in re.findall(r"^step (\d+) saved", log, re.MULTILINE))
    assert {*said} <= {*steps}
    assert max(said.values()) == 1, said
    # A step that is saved again moves the manifest that it had there.
    assert not list(root.glob("superseded/*"))
