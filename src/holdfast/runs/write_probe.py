"""Measures the write speed of storage, for a run that has not saved yet."""

from __future__ import annotations

import mmap

from holdfast.clock import Clock
from holdfast.ports.store import Store

_PARTS = 4
"""Parts written at most: enough to exceed the write cache of a device."""

_SECONDS = 0.5
"""Time limit of the probe: it runs within the grace of a preemption."""


def write_bytes_per_second(store: Store, key: str, part_bytes: int, clock: Clock) -> float:
    """Return the bytes per second of writing an object part by part; the object is aborted.

    Args:
        store, key: Where to write.
        part_bytes: What is written at once: as much as a save has in flight, or storage that takes its time to answer
            would seem slower than a save finds it.
        clock: For the time, and for bytes.
    Raises:
        CheckpointError: Storage cannot be written.
    """
    with mmap.mmap(-1, part_bytes) as part:
        # Random bytes: a file system may not store zeros.
        part.write(clock.random_bytes(part_bytes))
        with memoryview(part) as data:
            upload = store.upload(key, _PARTS * part_bytes, part_bytes)
            written = 0
            start = clock.monotonic_seconds()
            try:
                while written < _PARTS and (not written or clock.monotonic_seconds() - start < _SECONDS):
                    upload.write(written * part_bytes, data)
                    written += 1
                seconds = clock.monotonic_seconds() - start
            finally:
                upload.abort()
    return written * part_bytes / max(seconds, 1e-6)
