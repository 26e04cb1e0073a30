"""The parts of the bench, in the order in which they run."""

from __future__ import annotations

from bench import (
    amplification,
    large,
    lazy,
    memory,
    peers_memory,
    peers_protecting,
    peers_recovery,
    peers_training,
    peers_wire,
    shelf_recovery,
    shelf_training,
    stall,
    store_drain,
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

TIER_PARTS: dict[str, Part] = {store_drain.PART.name: store_drain.PART}
"""Those of `python -m bench.tiers URL`, in processes of their own."""

SHELF_PARTS: dict[str, Part] = {
    part.name: part for part in (shelf_recovery.SAVED, shelf_recovery.LOADED, shelf_training.PART)
}
"""Those of `python -m bench.shelf`, in processes of their own."""

PEERS_PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        peers_protecting.PART,
        peers_recovery.SAVED,
        peers_recovery.SLOW,
        peers_recovery.RECOVERED,
        peers_wire.PART,
        peers_memory.PART,
        peers_training.STEPS,
        peers_training.ALL_REDUCE,
    )
}
"""Those of `python -m bench.peers`, in processes of their own."""
