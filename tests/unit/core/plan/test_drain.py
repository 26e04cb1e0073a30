"""Who copies which file of a drained step: every file has one rank, and no rank has much more than the others."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.plan.drain import share_of

files_of_steps = st.dictionaries(st.text("abc/", min_size=1, max_size=6), st.integers(0, 1 << 40), max_size=40)


@given(files=files_of_steps, world_size=st.integers(1, 9), seed=st.integers(0, 9))
def test_each_file_has_one_rank_and_shares_are_even(files: dict[str, int], world_size: int, seed: int) -> None:
    shares = [share_of(files.items(), world_size, rank) for rank in range(world_size)]
    assert sorted(key for share in shares for key in share) == sorted(files)
    loads = [sum(files[key] for key in share) for share in shares]
    assert max(loads) - min(loads) <= max(files.values(), default=0)
    shuffled = list(files.items())
    random.Random(seed).shuffle(shuffled)
    assert [share_of(shuffled, world_size, rank) for rank in range(world_size)] == shares


def test_large_files_go_first_and_small_ones_fill_up() -> None:
    files = [("a", 1), ("b", 1), ("c", 1), ("large", 10), ("medium", 7)]
    assert share_of(files, 2, 0) == {"large"}
    assert share_of(files, 2, 1) == {"medium", "a", "b", "c"}
    assert share_of(files, 1, 0) == {"large", "medium", "a", "b", "c"}
    assert share_of([], 2, 0) == frozenset()
