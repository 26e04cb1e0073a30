"""The parts of the bench of the redo log, in the order in which they run."""

from __future__ import annotations

from bench import differential_kills, differential_overhead, differential_redo
from bench.part import Part

DIFFERENTIAL_PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        differential_overhead.OVERHEAD,
        differential_overhead.OVERHEAD_CODED,
        differential_overhead.BOUNDARY,
        differential_overhead.RECORDS,
        differential_kills.LONG,
        differential_kills.SHORT,
        differential_redo.PART,
    )
}
"""Those of `python -m bench.differential`."""
