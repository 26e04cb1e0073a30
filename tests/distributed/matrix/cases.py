"""What ranks do for the matrix: train and save a layout here, build it anew and load every checkpoint there."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import holdfast
from tests.distributed.launch import World
from tests.distributed.matrix.layouts import KINDS

SAVED_STEPS = [1, 2]
TURN_SECONDS = 840.0


def await_turn(world: World, turn: str) -> None:
    """Wait for a file: the worlds take turns, and none holds the processor meanwhile."""
    deadline = time.monotonic() + TURN_SECONDS
    while not Path(turn).exists():
        assert time.monotonic() < deadline, f"{turn} never came"
        time.sleep(0.05)


def save(world: World | None, kind: str, root: str) -> dict[str, object]:
    """Train a layout for two steps and save it; return the digests of what was saved."""
    built = KINDS[kind].build(1)
    built.train(SAVED_STEPS)
    report = holdfast.save(f"{root}/{kind}", built.state | {"batches": 2}, process_group=None if world else False)
    return {"digests": built.digests(), "bytes": report.bytes}


def load(world: World | None, kind: str, root: str) -> dict[str, object]:
    """Load what each layout saved, into an optimizer that has stepped and one that has not in turn; then step on."""
    found: dict[str, object] = {}
    gc.collect()
    # What the imports left stays: each collection below would look at it for some 15 ms.
    gc.freeze()
    for number, source in enumerate(KINDS):
        if not (Path(root) / source).exists():
            continue
        built = KINDS[kind].build(7)
        if number % 2:
            built.train([5])
        state = built.state | {"batches": 0}
        report = holdfast.load(f"{root}/{source}", state, process_group=None if world else False)
        assert state["batches"] == 2
        assert report.missing == (), report.missing
        digests = built.digests()
        built.train([3])
        found[source] = {"digests": digests, "unexpected": list(report.unexpected)}
        del built, state
        gc.collect()
    return found
