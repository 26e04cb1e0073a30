"""How fast storage takes bytes, where nothing was saved yet that could tell."""

from __future__ import annotations

import mmap

from holdfast.ports.clock import Clock
from holdfast.ports.store import Store

_WINDOWS = 8
"""Windows written at most: enough to get past what a device answers from its own memory at once."""

_SECONDS = 0.5
"""For how long, however slow storage is: time is short when this is asked."""


def write_bytes_per_second(store: Store, key: str, window_bytes: int, clock: Clock) -> float:
    """Return how fast an object at `key` is written, one window after the other; nothing of it stays.

    Raises:
        CheckpointError: Storage cannot be written.
    """
    with mmap.mmap(-1, window_bytes) as window:
        # No zeros: a file system may store none.
        window.write(clock.random_bytes(window_bytes))
        with memoryview(window) as data:
            upload = store.upload(key, _WINDOWS * window_bytes, window_bytes)
            written = 0
            start = clock.monotonic_seconds()
            try:
                while written < _WINDOWS and (not written or clock.monotonic_seconds() - start < _SECONDS):
                    upload.write(written * window_bytes, data)
                    written += 1
                seconds = clock.monotonic_seconds() - start
            finally:
                upload.abort()
    return written * window_bytes / max(seconds, 1e-6)
