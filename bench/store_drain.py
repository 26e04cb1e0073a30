"""A drain of two ranks from memory to an object store, beside bare puts and beside a save straight to the store.

Limit: server and clients share the cores of one machine, so the work of the server is in every wall time. Processor
time is that of the processes of the ranks alone.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import holdfast
from bench import conditions, device
from bench.part import Measured, Params, Part, Round, Spread, in_turn, share_of, times_as_fast
from bench.settings import settings
from bench.state import MIB, sharded_state
from bench.store_place import SHAPES, Limit, Place, wait_until_idle

WARM_MIB = 64
"""Size of the state with which every contender makes its connections and its threads."""

MEMORY, PREFIX = "/dev/shm", "bench-drain-"
"""Where near tiers are, and how their names begin."""

NEAR_ALONE = 1 << 30
"""No step of the bench is a multiple: each one is due at the store."""

State = dict[str, torch.Tensor]


def measure(root: Path, params: Params) -> Measured:
    """Measure each contender once, in turn; remove the objects of each one before the next."""
    mesh, place = device.mesh(), Place.here()
    # Other names: no tensor of the large state may be found unchanged in the small one.
    warm = {f"warm.{name}": tensor for name, tensor in sharded_state(mesh, WARM_MIB * MIB, fill=True).items()}
    state = sharded_state(mesh, params["mib"] * MIB, fill=True)
    small, limit = (Limit(place, conditions.local_bytes(each)) for each in (warm, state))
    contenders: list[tuple[str, Callable[[str], Round]]] = [
        ("drain", lambda folder: _drained(place.folder(folder), warm, state)),
        ("save", lambda folder: _saved(place.folder(folder), warm, state)),
        *((f"limit_{count}", partial(_put, f"limit_{count}", small, limit, count)) for count in SHAPES),
    ]
    found: Round = {}
    for name, work in in_turn(contenders, params["number"]):
        folder = conditions.of_first_rank(f"drain-{name}-{time.time_ns()}")
        found |= work(folder)
        conditions.on_first_rank(lambda folder=folder: place.remove(folder))  # type: ignore[misc]
        speed, cpu = params["mib"] / found[name], found[f"{name}_cpu"] * 1024 / params["mib"]
        conditions.say(f"{name:8} {speed:4.0f} MiB/s, {cpu:.2f} s/GiB of processor")
    for each in (small, limit):
        each.close()
    return Measured([found], [])


def _drained(url: str, warm: State, state: State) -> Round:
    """Save into memory, and measure from there to the commit in the store, on the rank that learns of it last."""
    made = tempfile.mkdtemp(dir=MEMORY, prefix=PREFIX) if conditions.rank() == 0 else ""
    memory = Path(conditions.of_first_rank(made))
    try:
        with _manager(url, holdfast.Tier(memory / "near", every=NEAR_ALONE)) as run:
            run.load(warm)
            run.save(1, warm).wait("committed")
            conditions.on_first_rank(wait_until_idle)
            handle = run.save(2, state)
            handle.wait("near")
            # No barrier: the drain has begun, on the rank that was near first.
            return conditions.measured("drain", partial(handle.wait, "committed"), together=False)
    finally:
        conditions.on_first_rank(lambda: shutil.rmtree(memory))


def _saved(url: str, warm: State, state: State) -> Round:
    with _manager(url, None) as run:
        run.load(warm)
        run.save(1, warm).wait()
        conditions.on_first_rank(wait_until_idle)
        return conditions.measured("save", lambda: run.save(2, state).wait())


def _put(name: str, small: Limit, limit: Limit, count: int, folder: str) -> Round:
    small.write(f"{folder}/warm", count)
    conditions.on_first_rank(wait_until_idle)
    return conditions.measured(name, lambda: limit.write(folder, count))


def _manager(url: str, near: holdfast.Tier | None) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(url, near=near, preemption=False, settings=settings(collect_grace_seconds=0.0))


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the results as ratios."""
    return {
        "drain_vs_limit": times_as_fast(rounds, "drain", [f"limit_{count}" for count in SHAPES]),
        "drain_cpu_vs_save": share_of(rounds, "drain_cpu", ["save_cpu"]),
    }


PART = Part(
    name="store_drain",
    question="How fast does a drain send a step from memory to an object store, and with how much processor time?",
    ranks=2,
    full={"mib": 2048, "number": 0},
    # As in the full bench, the pack of a rank is larger than one request.
    quick={"mib": 1024, "number": 0},
    measure=measure,
    keys=keys,
)
