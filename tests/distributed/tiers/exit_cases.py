"""Processes with a near tier that a signal ends."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch

import holdfast
from holdfast._face import wiring
from holdfast.settings import Settings
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.support.forked_processes import write_whole

SETTINGS = Settings(lease_seconds=5.0)


def state_of(step: int) -> dict[str, object]:
    return {"weights": torch.full((50_000,), float(step)), "step": step}


def preempted(folder: str, grace_seconds: str, hangs: str) -> None:
    """Train until a signal comes; some operations of the root hang once step 2 is there."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    place = Path(folder)

    def hang(operation: FaultPoint) -> None:
        if (place / "begun").exists():
            threading.Event().wait()

    faults, store_at = Faults(hang, names=set(filter(None, hangs.split(","))), lasting=True), wiring.store_at
    wiring.store_at = lambda path, settings: FaultyStore(store_at(path, settings), faults)
    preemption = holdfast.Preemption(grace_seconds=float(grace_seconds))
    near = holdfast.Tier(place / "near", every=1)
    with holdfast.CheckpointManager(
        place / "root", every=2, near=near, process_group=False, preemption=preemption, settings=SETTINGS
    ) as manager:
        manager.load(state_of(0))
        for step in range(1, 100_000):
            handle = manager.maybe_save(step, state_of(step))
            if step <= 2 and handle is not None:
                handle.wait()
            if step == 2:
                write_whole(place / "begun", "")
            if step > 2:
                threading.Event().wait(0.05)
