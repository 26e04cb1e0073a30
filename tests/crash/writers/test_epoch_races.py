"""Eight processes race for one root, round after round: exactly one of them writes, and the others are told which."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import api
from tests.crash.writers.epoch_processes import Writer, writers

ROUNDS = int(os.environ.get("EPOCH_RACE_ROUNDS", "10"))
"""`make campaign` asks for more."""

WRITERS = 8
LEASE_SECONDS = 3.0
HEAD_START_SECONDS = 0.05

pytestmark = [pytest.mark.long, pytest.mark.timeout(60 + 12 * ROUNDS)]


def race(root: Path, step: int, racers: list[Writer]) -> Writer:
    """Let all save one step at one moment; return the one that did, after proving that no other did."""
    at = time.monotonic() + HEAD_START_SECONDS
    for each in racers:
        each.tell("race", root, step, at)
    said = {each: each.answer() for each in racers}
    won = [each for each in racers if said[each]["said"] == "committed"]
    assert len(won) == 1, list(said.values())
    (winner,) = won
    for each in racers:
        if each is not winner:
            assert said[each]["said"] == "ConflictError", said[each]
            message = str(said[each]["message"])
            assert f"process {winner.pid}, since 20" in message, message
            assert f"host {os.uname().nodename}" in message, message
    return winner


def require_won(root: Path, step: int, winner: Writer) -> None:
    """Require that the step is whole, the winner's, of the newest epoch, and the only thing there."""
    checkpoint = holdfast.open_checkpoint(root / f"step-{step:012d}")
    assert list(checkpoint.verify()) == []
    written = checkpoint.read("weights")
    assert isinstance(written, np.ndarray) and (written == winner.pid).all()
    records = [path for path in (root / "epochs").glob("*.json") if "accepted" not in path.name]
    assert checkpoint.manifest.epoch == max(int(path.stem) for path in records)
    holder = json.loads(max(records).read_text())["holder"]
    assert holder["pid"] == winner.pid
    folders = [path for path in (root / f"step-{step:012d}").iterdir() if path.is_dir() and path.name != "reports"]
    assert [path.name for path in folders] == [checkpoint.manifest.attempt], "a loser wrote"


def test_exactly_one_of_eight_writes(in_memory: Path) -> None:
    """Rounds take turns: a root that nobody wrote to, one that was released, one whose holder was killed."""
    root, step, won = in_memory / "root", 0, set[int]()
    with writers(WRITERS, LEASE_SECONDS) as racers:
        for number in range(ROUNDS):
            step += 1
            winner = race(root, step, racers)
            require_won(root, step, winner)
            won.add(winner.pid)
            match number % 3:
                case 0:
                    winner.tell("close")
                    winner.answer()
                case 1:
                    winner.end()
                    racers[racers.index(winner)] = fresh = Writer(LEASE_SECONDS)
                    fresh.ready()
                case 2:
                    assert api.list_steps(root).steps[-1].step == step
                    winner.tell("close")
                    winner.answer()
                    shutil.rmtree(root)
    print(f"{ROUNDS} rounds of {WRITERS}: one winner each, {len(won)} processes won at least once")
