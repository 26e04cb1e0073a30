"""The parts of the bench of `holdfast.data`, in the order in which they run."""

from __future__ import annotations

from bench.data import loaders, positions, rivals, saves
from bench.part import Part

DATA_PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        loaders.SMALL,
        loaders.LARGE,
        positions.FIRST,
        positions.ORDER,
        positions.STATE,
        saves.PART,
        rivals.PART,
    )
}
"""Those of `python -m bench.data`."""
