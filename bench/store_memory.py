"""The memory that a save to an object store needs beyond the state and the arena."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from bench import memory
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from bench.store_place import Place


def measure(root: Path, params: Params) -> Measured:
    """Save in each way, each in its own process."""
    place, name = Place.here(), f"memory-{time.time_ns()}"
    found = memory.measured(place.folder(name), params["mib"], lambda: place.remove(name))
    return Measured([found], [])


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the largest value."""
    return {"object_peak_extra_mib": spread_of([max(each.values()) for each in rounds])}


PART = Part(
    name="store_memory",
    question="How much memory does a save to an object store take above the state and the arena?",
    ranks=1,
    full={"mib": 512, "number": 0},
    quick={"mib": 512, "number": 0},
    measure=measure,
    keys=keys,
)
