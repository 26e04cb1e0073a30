"""Memory that is used again, but never while something refers to it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from holdfast.backends.codecs.scratch import lent, scratch


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_lent_memory_comes_again_when_nothing_refers_to_it() -> None:
    count = 123_457
    first = lent(count)
    address = _address(first)
    views = [first.view(np.uint8)[5:], first[: count - 1].view(np.uint16).reshape(-1, 2).data, first.data[7:]]
    del first
    while views:
        gc.collect()
        other = lent(count)
        assert _address(other) != address
        views.pop()
    gc.collect()
    assert address in {_address(array) for array in [lent(count) for _ in range(9)]}


def test_scratch_is_of_one_thread_and_one_purpose() -> None:
    mine, other = scratch("a", 4096), scratch("b", 4096)
    mine.fill(1)
    other.fill(2)
    assert scratch("a", 100).tolist() == [1] * 100
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(scratch, "a", 4096).result()
    theirs.fill(3)
    assert set(mine.tolist()) == {1}
    assert len(scratch("a", 8192)) == 8192
