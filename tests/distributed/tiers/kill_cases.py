"""What the ranks of a run with a near tier do until they are killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast._face import wiring
from holdfast.errors import CheckpointError
from holdfast.settings import Settings
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.support.forked_processes import write_whole
from tests.support.gloo_worlds import World

SETTINGS = Settings(collect_grace_seconds=0.0, lease_seconds=2.0)
COUNT, EVERY = 40_000, 3
LARGE_COUNT = 700_000
"""Elements, so that the packs of two ranks are large enough for their memory to be used again."""


def state_of(step: int, rank: int = 0, count: int = COUNT) -> dict[str, object]:
    weights = torch.randn(count, generator=torch.Generator().manual_seed(step))
    return {"weights": weights, "frozen": torch.ones(count), "step": step, "own": holdfast.PerRank((step, rank))}


def manager_at(folder: Path, root: Path | str, **options: object) -> holdfast.CheckpointManager:
    near = holdfast.Tier((folder / "near").resolve(), every=1)
    return holdfast.CheckpointManager(
        root, every=EVERY, keep_last=2, near=near, preemption=False, settings=SETTINGS, **options
    )


def live(world: World, folder: str, root: str, begun: str, at_least: int, count: int = COUNT) -> None:
    """Resume, refuse an older step or wrong bits, and save each step; rank 0 notes what was acknowledged."""
    place, state = Path(folder), state_of(0, world.rank, count)
    manager = manager_at(place, root)
    resumed = manager.load(state) or 0
    assert resumed >= at_least, f"resumed at step {resumed}; {at_least} was acknowledged"
    if resumed:
        expected = state_of(resumed, world.rank, count)
        assert all(torch.equal(state[name], expected[name]) for name in ("weights", "frozen"))
        assert (state["step"], state["own"].value) == (resumed, expected["own"].value)
    acknowledged = os.open(place / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    due = []
    for step in range(resumed + 1, resumed + 10_000):
        handle = manager.maybe_save(step, state_of(step, world.rank, count))
        assert handle is not None
        handle.wait("near")
        due += [(step, handle)] if step % EVERY == 0 else []
        if world.rank == 0:
            os.write(acknowledged, f"near {step}\n".encode())
            for number, each in due:
                if each.committed.done() and each.committed.exception() is None:
                    os.write(acknowledged, f"root {number}\n".encode())
            due = [pair for pair in due if not pair[1].committed.done()]
        if step == resumed + 1 and world.rank == 0:
            write_whole(place / begun, "")
        dist.barrier()


def stopped(folder: str, root: str) -> None:
    """Save steps; stop in the act of publishing step 6 in the root, and go on after somebody else has taken over."""
    torch.set_num_threads(1)
    place, is_over = Path(folder), threading.Event()

    def stop(operation: FaultPoint) -> None:
        if operation.subject == "step-000000000006/manifest.json" and not is_over.is_set():
            is_over.set()
            # To this thread: one that is sent to the process may stop it only after this thread has published.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    faults, store_at = Faults(stop, names={"put_if_absent"}, lasting=True), wiring.store_at
    wiring.store_at = lambda path, settings: FaultyStore(store_at(path, settings), faults)
    manager, said = manager_at(place, root, process_group=False), {}
    manager.load(state_of(0))
    for step in (1, 2, 3):
        manager.maybe_save(step, state_of(step)).wait()
    write_whole(place / "begun", "")
    while not (place / "go").exists():
        time.sleep(0.01)
    for step in (4, 5, 6):
        handle = manager.maybe_save(step, state_of(step))
        handle.wait("near")
    is_over.wait()
    time.sleep(0.5)
    for step in (7, 8, 9):
        try:
            manager.maybe_save(step, state_of(-step)).wait("near")
            said[step] = "saved"
        except CheckpointError as error:
            said[step] = f"{type(error).__name__}: {error}"
    said["drain"] = repr(handle.committed.exception(20))
    manager.close(wait=False)
    write_whole(place / "said", json.dumps(said))
