"""Loads of a restarted job: two ranks were killed, and two new ones load from memory or from a disk.

Each load runs in new processes, so nothing of them is warm. A save and a load are jobs of their own: the ranks of the
first one end by SIGKILL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import holdfast
from bench import conditions, device, job
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spread_of
from bench.settings import settings
from bench.state import MIB, sharded_state

DISK, MEMORY = "HOLDFAST_BENCH_DISK", "HOLDFAST_BENCH_MEMORY"
"""Variables that name the folders of both roots, and of the near tier."""

STEP = 1
FULL, QUICK = {"mib": 1024}, {"mib": 256}


def _manager(is_shelf: bool) -> holdfast.CheckpointManager:
    disk, memory = Path(os.environ[DISK]), Path(os.environ[MEMORY])
    near = holdfast.Tier(memory / "recovery", every=1 << 30) if is_shelf else None
    root = disk / ("tiered" if is_shelf else "plain")
    return holdfast.CheckpointManager(root, near=near, preemption=False, settings=settings())


def _save_and_die(root: Path, params: Params) -> Measured:
    state = sharded_state(device.mesh(), params["mib"] * MIB, fill=True)
    with _manager(True) as shelf, _manager(False) as plain:
        shelf.load(state)
        plain.load(state)
        shelf.save(STEP, state, near_only=True).wait()
        plain.save(STEP, state).wait()
        conditions.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the rank is dead")


def _load(root: Path, params: Params) -> Measured:
    mesh, total_bytes = device.mesh(), params["mib"] * MIB
    target, name = sharded_state(mesh, total_bytes, fill=False), "shelf_load" if params["is_shelf"] else "disk_load"
    if not params["is_shelf"]:
        plain = Path(os.environ[DISK]) / "plain"
        conditions.on_first_rank(lambda: conditions.forget_pages(plain))
    with _manager(bool(params["is_shelf"])) as run:
        found = conditions.measured(name, lambda: run.load(target, step=STEP))
        conditions.require_equal(sharded_state(mesh, total_bytes, fill=True), target)
        run.close(wait=False)
    return Measured([found], [])


def _no_keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    return {}


SAVED = Part(
    name="shelf_killed",
    question="None: two ranks save, and are killed",
    ranks=2,
    full=FULL,
    quick=QUICK,
    measure=_save_and_die,
    keys=_no_keys,
)
LOADED = Part(
    name="shelf_recovery",
    question="How fast does a restarted job load from memory, and from a disk?",
    ranks=2,
    full={**FULL, "is_shelf": 1},
    quick={**QUICK, "is_shelf": 1},
    measure=_load,
    keys=_no_keys,
)


def measure(folder: Path, memory: Path, rounds: int, *, quick: bool) -> list[Round]:
    """Save and kill the ranks once; then load in new ranks, from both places in turn."""
    variables, found = {DISK: str(folder), MEMORY: str(memory)}, list[Round]()
    with suppress(SystemExit):  # The job says that its ranks have failed.
        job.run(SAVED, QUICK if quick else FULL, folder / "job", variables=variables)
    for number in range(rounds):
        this: Round = {}
        for is_shelf in in_turn([1, 0], number):
            params = {**(QUICK if quick else FULL), "is_shelf": is_shelf}
            this |= job.run(LOADED, params, folder / "job", variables=variables).rounds[0]
        found.append(this)
        print(", ".join(f"{name} {value:.3f}" for name, value in this.items()), flush=True)
    return found


def keys(rounds: Sequence[Round]) -> dict[str, Spread]:
    """Return the results as ratios."""
    return {
        "recover_vs_disk": spread_of([each["disk_load"] / each["shelf_load"] for each in rounds]),
        "recover_cpu_vs_disk": spread_of([each["disk_load_cpu"] / each["shelf_load_cpu"] for each in rounds]),
    }
