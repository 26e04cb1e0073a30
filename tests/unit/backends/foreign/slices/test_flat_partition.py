"""Where ZeRO puts elements, against ZeRO done with arrays."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.foreign.slices.flat_partition import numel_of, parts_of_each_cut, parts_of_even_cut, share_of

_shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5).map(
    lambda shapes: {f"p{number}": shape for number, shape in enumerate(shapes)}
)


def _numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    first, found = 1, {}
    for name, shape in shapes.items():
        found[name] = np.arange(first, first + math.prod(shape))
        first += math.prod(shape)
    return found


@given(shapes=_shapes, ranks=st.integers(1, 5), alignment=st.integers(1, 4))
def test_an_even_cut_finds_every_element_once(shapes: dict[str, tuple[int, ...]], ranks: int, alignment: int) -> None:
    arrays = _numbered(shapes)
    gaps = [-math.prod(shape) % alignment for shape in shapes.values()]
    flat = np.concatenate([np.append(array, [0] * gap) for array, gap in zip(arrays.values(), gaps, strict=True)])
    assert len(flat) == numel_of(shapes, gaps)
    flat = np.append(flat, [0] * (-len(flat) % (2 * ranks)))
    share = len(flat) // ranks
    shares = flat.reshape(ranks, share) if share else flat.reshape(ranks, 0)
    for name, parts in parts_of_even_cut(shapes, gaps, max(share, 1)):
        found = [shares[part.rank][part.at : part.at + part.stop - part.start] for part in parts]
        assert np.array_equal(np.concatenate([[], *found]), arrays[name])


@given(shapes=_shapes, ranks=st.integers(1, 5))
def test_a_cut_of_each_finds_every_element_once(shapes: dict[str, tuple[int, ...]], ranks: int) -> None:
    arrays = _numbered(shapes)
    cut = [np.append(array, [0] * (-len(array) % ranks)).reshape(ranks, -1) for array in arrays.values()]
    shares = np.concatenate(cut, axis=1)
    for name, parts in parts_of_each_cut(shapes, ranks):
        found = [shares[part.rank][part.at : part.at + part.stop - part.start] for part in parts]
        assert np.array_equal(np.concatenate([[], *found]), arrays[name])


@given(numel=st.integers(0, 40), ranks=st.integers(1, 6))
def test_the_share_is_found_from_what_files_say(numel: int, ranks: int) -> None:
    share = -(-numel // (2 * ranks)) * 2
    real = [min(max(numel - rank * share, 0), share) for rank in range(ranks)]
    assert share_of(real, [share - each for each in real]) == share, "ZeRO-1 and 2 leave padding out of master copies"
    pad = [0] * (ranks - 1) + [share * ranks - numel]
    kept = share_of([share] * ranks, pad)
    assert kept is not None and kept >= numel if ranks == 1 else kept == share, (
        "BF16_Optimizer books it on the last rank"
    )


def test_ranks_that_contradict_each_other_have_no_share() -> None:
    assert share_of([4, 3, 4], [0, 0, 0]) is None
