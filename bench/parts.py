"""The parts of the bench, in the order in which they run."""

from __future__ import annotations

from bench import amplification, large, lazy, memory, stall, tiny, training
from bench.part import Part

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        large.PART,
        stall.PART,
        lazy.PART,
        training.PART,
        tiny.PLAIN,
        tiny.DTENSOR,
        memory.PART,
        amplification.PART,
    )
}
