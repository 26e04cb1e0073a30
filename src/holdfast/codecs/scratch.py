"""Memory that a thread uses again for each chunk: fresh memory costs a page fault for every 4 KiB."""

from __future__ import annotations

import threading

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
