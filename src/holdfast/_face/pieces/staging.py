"""Copies of states in host memory that is kept between saves: to touch fresh memory first costs more than a copy."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress

from holdfast.backends.torch.dcp_pieces.staged import staged_copy
from holdfast.base.interrupts import GUARD
from holdfast.base.ports.framework import Pin, Unpin
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.engine.memory_limits import MemoryShare, ranks_on_host
from holdfast.errors import UnavailableError
from holdfast.settings import MIB, Settings

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 2 * MIB
"""Blocks are multiples of it: a huge page. States of nearly one size then share a block."""


class StagedState(dict[str, object]):
    """A copy of a state. Once nobody refers to it any more, its memory is used again: keep no tensor of it alone."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[type, tuple[dict[str, object]]]:
        """Pickle as a plain dict: a process that saves for this one gets copies of its own."""
        return dict, (dict(self),)


def stage(state: Mapping[str, object], settings: Settings) -> StagedState:
    """Return a copy of a state in host memory, once it is complete: training may change the state.

    Args:
        state: Dicts, lists and tuples of tensors (DTensors too) and values.
        settings: `arena_bytes_max` bounds the memory of all such copies of the process.
    Raises:
        UnavailableError: The copies do not fit.
    """
    lent: list[memoryview] = []

    def lend(count: int, pin: Pin | None) -> memoryview:
        lent.append(_MEMORY.lend(count, settings.arena_bytes_max, pin))
        return lent[0]

    try:
        copied = staged_copy(state, lend, StagedState)
    except BaseException:
        for memory in lent:
            _MEMORY.give(memory)
        raise
    assert isinstance(copied, StagedState), "it was made as one"
    for memory in lent:
        weakref.finalize(copied, _MEMORY.give, memory).atexit = False
    return copied


class _StagingMemory:
    """Blocks of host memory, one for each staged state; those that are free are lent again."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._bytes_lent = 0
        self._returned: list[memoryview] = []
        """Appended to without `GUARD`: a garbage collection may give memory back while this thread holds it."""
        self._budget: int | None = None
        self._unpins: dict[int, Unpin] = {}
        """By identity of the memory of a block that is page-locked, what undoes it."""

    def lend(self, count: int, bytes_max: int | None, pin: Pin | None) -> memoryview:
        """Return a block of at least `count` bytes.

        Raises:
            UnavailableError: It would exceed the budget, beside the blocks that are lent.
        """
        count = max(-(-count // _BLOCK_BYTES), 1) * _BLOCK_BYTES
        with GUARD:
            self._take_back()
            fitting = sorted((block for block in self._free if count <= len(block) <= 2 * count), key=len)
            budget = self._budget_bytes() if bytes_max is None else bytes_max
            if self._bytes_lent + count > budget:
                raise UnavailableError(
                    f"a staged copy needs {count} bytes, beside {self._bytes_lent} of saves under way; expected "
                    f"{budget} at most (settings.arena_bytes_max; None is half of the free memory). Wait for the "
                    "future of the save before, raise the setting, or save without a copy: dcp.save"
                )
            if fitting:
                block = fitting[0]
                self._free = [other for other in self._free if other is not block]
            else:
                self._drop_free()  # Blocks of another size would only take memory.
                block = allocate_aligned(count)
            self._bytes_lent += len(block)
        if pin is not None and id(block.obj) not in self._unpins:
            with suppress(UnavailableError):  # Copies into memory that is not page-locked take longer.
                self._unpins[id(block.obj)] = pin(block)
        return block

    def give(self, block: memoryview) -> None:
        """Take a block back; any thread, also within a garbage collection."""
        self._returned.append(block)

    def _drop_free(self) -> None:
        for block in self._free:
            unpin = self._unpins.pop(id(block.obj), None)
            if unpin is not None:
                unpin()
        self._free.clear()

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.pop()
            self._bytes_lent -= len(block)
            self._free.append(block)

    def _budget_bytes(self) -> int:
        if self._budget is None:
            # No rank states to the others what it shares with them: the launcher says how many share the host.
            self._budget = MemoryShare().free_bytes() // 2 // ranks_on_host()
        return self._budget


_MEMORY = _StagingMemory()
