"""The parts of the bench of compression, in the order in which they run."""

from __future__ import annotations

from bench import (
    compression_auto,
    compression_codecs,
    compression_index,
    compression_memory,
    compression_ratios,
    compression_reads,
    compression_speed,
)
from bench.part import Part

COMPRESSION_PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        compression_ratios.RATIOS,
        compression_ratios.DDP,
        compression_ratios.HSDP,
        compression_ratios.FSDP,
        compression_codecs.PART,
        compression_speed.PART,
        compression_auto.SAVES,
        compression_auto.TRAINING,
        compression_reads.PARTLY,
        compression_reads.RESHARD,
        compression_memory.PART,
        compression_index.PART,
    )
}
"""Those of `python -m bench.compression`: they need a trained state, and rivals of their own."""
