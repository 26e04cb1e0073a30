"""Memory that is used again: fresh memory costs a page fault for every 4 KiB, a fifth of the time of encoding."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray


class _Scratch(threading.local):
    """The arrays of a thread by purpose, each as large as the largest chunk asked for."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[np.uint8]] = {}


_scratch = _Scratch()


def scratch(purpose: str, count: int) -> NDArray[np.uint8]:
    """Return memory whose content is undefined, until this thread asks for it again.

    Args:
        purpose: Names it. Memory of different names does not overlap.
        count: How many bytes; at most those of a chunk.
    """
    array = _scratch.arrays.get(purpose)
    if array is None or len(array) < count:
        array = _scratch.arrays[purpose] = np.empty(count, np.uint8)
    return array[:count]


_LENT_KEPT_MAX = 8
"""Buffers of each capacity kept for later: at 1 MiB a chunk, all of them together hold less than 8 MiB."""

_kept: defaultdict[int, deque[memoryview]] = defaultdict(lambda: deque(maxlen=_LENT_KEPT_MAX))
"""Buffers in use no more, by capacity: a power of two. Operations of a deque are atomic."""


def lent(count: int) -> NDArray[np.uint8]:
    """Return memory of its own whose content is undefined. It is used again once nothing refers to it.

    Args:
        count: How many bytes; at most those of a chunk.
    """
    kept = _kept[(count - 1).bit_length()]
    try:
        buffer = kept.pop()
    except IndexError:
        buffer = np.empty(1 << (count - 1).bit_length(), np.uint8).data
    # Of a memoryview, so that numpy keeps this array, and not the memory below it, as the owner of every view of it.
    array = np.frombuffer(buffer, np.uint8, count)
    loan = _Loan(array, _give_back)
    loan.buffer = buffer
    _loans[id(loan)] = loan
    return array


class _Loan(weakref.ref[NDArray[np.uint8]]):
    """Knows which buffer is free once an array is gone. `weakref.finalize` takes five times as long."""

    __slots__ = ("buffer",)

    buffer: memoryview


_loans: dict[int, _Loan] = {}


def _give_back(loan: weakref.ref[NDArray[np.uint8]]) -> None:
    buffer = _loans.pop(id(loan)).buffer
    _kept[(len(buffer) - 1).bit_length()].append(buffer)
