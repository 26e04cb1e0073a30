"""Python's garbage collector, held off while a plan of many small values is made and while little data moves."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import nullcontext
from typing import Self

from holdfast.settings import MIB

_LITTLE_BYTES = 4 * MIB
"""Moved in a few milliseconds, where planning as many bytes of tiny tensors takes hundreds."""

_lock = threading.RLock()  # A signal handler may save while this thread is about to.
_holders = 0
_was_enabled = False


class GcPause:
    """Keeps the cyclic garbage collector from running in this process from `begin` to `end`, or for a block.

    A plan for 20,000 tensors makes hundreds of thousands of values that all live until it is carried out. The
    collector takes that growth for garbage and walks every object of the training process several times
    (measured: half the time of such a save). Reference counting goes on; pauses may nest and overlap in threads, and
    each may be ended twice, by whichever thread. What lives when it ends is walked once.
    """

    def __init__(self) -> None:
        self._holds = False

    def begin(self) -> None:
        """Hold the collector off."""
        global _holders, _was_enabled
        try:
            with _lock:
                if self._holds:
                    return
                if not _holders:
                    _was_enabled = gc.isenabled()
                self._holds, _holders = True, _holders + 1
                gc.disable()
        except BaseException:  # Ctrl-C: whoever began for a block is not in it yet, and would never end.
            self.end()
            raise

    def end(self) -> None:
        """Let the collector go on, unless it is held off elsewhere."""
        global _holders
        with _lock:
            if not self._holds:
                return
            if _holders <= 1 and _was_enabled:
                gc.enable()
            _holders = max(_holders - 1, 0)  # None holds it in a child that was forked meanwhile.
            self._holds = False

    def __del__(self) -> None:
        # Ctrl-C at the very entry of `__exit__` must not hold it off for good. At the end of the interpreter, when the
        # lock may be gone, none is held.
        if self._holds:
            self.end()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def is_small_transfer(data_bytes: int) -> bool:
    """Return whether so much data moves in less time than a plan of many tensors takes."""
    return data_bytes <= _LITTLE_BYTES


def gc_paused_for(data_bytes: int) -> GcPause | nullcontext[None]:
    """Keep the collector from running while little data moves."""
    return GcPause() if is_small_transfer(data_bytes) else nullcontext()


def _start_afresh() -> None:
    """In a forked child (a data loader's worker): the threads that held the collector off are not there."""
    global _lock, _holders
    _lock = threading.RLock()
    if _holders:
        _holders = 0
        if _was_enabled:
            gc.enable()


os.register_at_fork(after_in_child=_start_afresh)
