"""The parts of the bench, in the order in which they run."""

from __future__ import annotations

from bench import (
    amplification,
    compression_auto,
    compression_codecs,
    compression_index,
    compression_memory,
    compression_ratios,
    compression_reads,
    compression_speed,
    large,
    lazy,
    memory,
    stall,
    store_memory,
    store_requests,
    store_speed,
    store_streams,
    tiny,
    training,
)
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

STORE_PARTS: dict[str, Part] = {
    part.name: part for part in (store_requests.PART, store_speed.PART, store_streams.PART, store_memory.PART)
}
"""Those of `python -m bench.stores`: they need a server of objects."""

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
