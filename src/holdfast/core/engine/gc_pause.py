"""Pauses Python's cyclic garbage collector while a plan of many small values is built or a small transfer runs."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from typing import Self

from holdfast.base.interrupts import GUARD
from holdfast.settings import MIB

_SMALL_TRANSFER_BYTES = 4 * MIB
"""Transferred in a few milliseconds; planning the same bytes as tiny tensors takes hundreds of milliseconds."""

_holders = 0
"""Pauses in force in this process."""
_was_enabled = False


class GcPause:
    """Pauses the cyclic garbage collector in this process from `begin` to `end`, or for a block.

    A plan for 20,000 tensors makes hundreds of thousands of values, which all live until the plan is executed. Their
    number makes the collector walk every object of the training process several times (measured: half the time of such
    a save). Reference counting goes on. Pauses may nest and overlap in threads. Any thread may end a pause, twice too.
    """

    def __init__(self) -> None:
        self._holds = False

    def begin(self) -> None:
        """Pause the collector."""
        global _holders, _was_enabled
        try:
            with GUARD:
                if self._holds:
                    return
                if not _holders:
                    _was_enabled = gc.isenabled()
                self._holds, _holders = True, _holders + 1
                gc.disable()
        except BaseException:  # Ctrl-C before the with-block is entered: `__exit__` will not run, so undo here.
            self.end()
            raise

    def end(self) -> None:
        """Let the collector run again, unless another pause is in force."""
        global _holders
        with GUARD:
            if not self._holds:
                return
            if _holders <= 1 and _was_enabled:
                gc.enable()
            _holders = max(_holders - 1, 0)  # A child that was forked meanwhile starts at 0.
            self._holds = False

    def __del__(self) -> None:
        # Ctrl-C at the very start of `__exit__` must not pause the collector for good. The check comes first: at the
        # end of the interpreter the lock may be gone, but then no pause is in force.
        if self._holds:
            self.end()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def is_small_transfer(data_bytes: int) -> bool:
    """Return whether a transfer of this size takes less time than a plan of many tensors."""
    return data_bytes <= _SMALL_TRANSFER_BYTES


def gc_paused_for(data_bytes: int) -> GcPause | nullcontext[None]:
    """Return a pause for the time of a small transfer; for a larger one, a context manager that does nothing."""
    return GcPause() if is_small_transfer(data_bytes) else nullcontext()


def _reset_in_child() -> None:
    """End all pauses in a forked child (a data loader's worker): the threads that began them do not exist there."""
    global _holders
    if _holders:
        _holders = 0
        if _was_enabled:
            gc.enable()


os.register_at_fork(after_in_child=_reset_in_child)
