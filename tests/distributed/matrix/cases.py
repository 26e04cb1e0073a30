"""What ranks do for the matrix: train and save a layout here, build it anew and load every checkpoint there."""

from __future__ import annotations

import gc
import time
import zlib
from dataclasses import replace
from pathlib import Path

import holdfast
from holdfast.settings import Settings
from tests.distributed.matrix.layouts import KINDS
from tests.support.gloo_worlds import World
from tests.support.tuning import tuned

SAVED_STEPS = [1, 2]

COMPRESSED = tuned(Settings(compression="on", chunk_bytes=4096), window_bytes=8192, coded_bytes_min=256)
"""Small limits, so that the tensors of the model are coded, most of them in several chunks."""
TURN_SECONDS = 840.0


def await_turn(world: World, turn: str) -> None:
    """Wait for a file: the worlds take turns, and none holds the processor meanwhile."""
    deadline = time.monotonic() + TURN_SECONDS
    while not Path(turn).exists():
        assert time.monotonic() < deadline, f"{turn} never came"
        time.sleep(0.05)


def save(world: World | None, kind: str, root: str) -> dict[str, object]:
    """Train a layout for two steps and save it, plain and compressed; return the digests of what was saved."""
    built = KINDS[kind].build(1)
    built.train(SAVED_STEPS)
    state, group = built.state | {"batches": 2}, None if world else False
    report = holdfast.save(f"{root}/{kind}", state, process_group=group)
    holdfast.save(f"{root}/{kind}.compressed", state, process_group=group, settings=COMPRESSED)
    return {"digests": built.digests(), "bytes": report.bytes}


def is_drawn(source: str, kind: str, seed: int | None) -> bool:
    """Return whether a compressed checkpoint is loaded too: one in ten by chance, all without a seed."""
    return seed is None or zlib.crc32(f"{source} {kind} {seed}".encode()) % 10 == 0


def load(world: World | None, kind: str, root: str, seed: int | None) -> dict[str, object]:
    """Load what each layout saved, into an optimizer that has stepped and one that has not in turn; then step on.

    What a layout saved compressed is loaded over that, if it is drawn, with and without exchange in turn.
    """
    found: dict[str, dict[str, object]] = {}
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
        if is_drawn(source, kind, seed):
            settings = replace(COMPRESSED, share_reads="never" if number % 2 else "always")
            holdfast.load(
                f"{root}/{source}.compressed", state, process_group=None if world else False, settings=settings
            )
            found[source] |= {"compressed": built.digests()}
        del built, state
        gc.collect()
    return dict(found)
