"""The parts of the bench of activations, in the order in which they run."""

from __future__ import annotations

from bench.activations import costs, losses, packs, peaks, slowdowns
from bench.part import Part

ACTIVATION_PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        peaks.PART,
        slowdowns.EXACT,
        slowdowns.EXACT_MODERN,
        slowdowns.WITHIN_BOUND,
        packs.PART,
        costs.SOLVER,
        costs.HOOKS,
        losses.PART,
    )
}
"""Those of `python -m bench.activations`."""
