"""Python's garbage collector, held off while a plan of many small values is made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from running in this process for the length of a block.

    A plan for 20,000 tensors makes hundreds of thousands of values that all live until it is carried out. The
    collector takes that growth for garbage and walks every object of the training process several times
    (measured: half the time of such a save). Reference counting goes on; blocks may nest and overlap in threads.
    """
    global _holders, _was_enabled
    with _lock:
        if not _holders:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if not _holders and _was_enabled:
                gc.enable()
