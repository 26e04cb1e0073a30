"""Python's garbage collector, held off while a plan of many small values is made and while little data moves."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from holdfast.settings import Settings

_lock = threading.RLock()  # A signal handler may save while this thread is about to.
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
    held = False
    try:
        with _lock:
            if not _holders:
                _was_enabled = gc.isenabled()
            held, _holders = True, _holders + 1
            gc.disable()
        yield
    finally:
        with _lock:
            _holders -= held
            if not _holders and _was_enabled:
                gc.enable()


def collector_paused_for(data_bytes: int, settings: Settings) -> AbstractContextManager[None]:
    """Keep the collector from running while little data moves: what fits one window takes less time than its plan."""
    return collector_paused() if data_bytes <= settings.window_bytes else nullcontext()


def _start_afresh() -> None:
    """In a forked child (a data loader's worker): the threads that held the collector off are not there."""
    global _lock, _holders
    _lock = threading.RLock()
    if _holders:
        _holders = 0
        if _was_enabled:
            gc.enable()


os.register_at_fork(after_in_child=_start_afresh)
