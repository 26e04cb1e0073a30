"""What is read to compare two copies: everything that differs, nothing that digests settle, each element once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region, region_boxes
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import Piece
from holdfast.core.plan.compare import CompareWindow, batches, sampled, unsettled, windows_of

CHUNK = 16
"""Bytes; far smaller than any real chunk, so that small tensors have many."""


def elements_of(region: Region, numbers: np.ndarray) -> np.ndarray:
    if isinstance(region, FlatRange):
        return numbers.reshape(-1)[region.start : region.stop]
    return numbers[region.relative_to((0,) * numbers.ndim)].reshape(-1)


def hashed(spec: TensorSpec, region: Region, content: np.ndarray) -> Piece:
    """A piece of a content, with true digests of its chunks."""
    data = np.ascontiguousarray(elements_of(region, content)).tobytes()
    digests = b"".join(hashlib.md5(data[at : at + CHUNK]).digest() for at in range(0, len(data), CHUNK))
    return Piece(spec, region, "pack", 0, digests, CHUNK)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Regions that cover a tensor: flat ranges, or buffers along one dimension."""
    if not shape or draw(st.booleans()):
        numel = math.prod(shape)
        at = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
        return [FlatRange(a, b) for a, b in pairwise([0, *at, numel])]
    dim = draw(st.integers(0, len(shape) - 1))
    at = sorted(draw(st.sets(st.integers(0, shape[dim]), max_size=3)) | {0, shape[dim]})
    return [
        Box(tuple(a if d == dim else 0 for d in range(len(shape))), (*shape[:dim], b, *shape[dim + 1 :]))
        for a, b in pairwise(at)
    ]


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[Piece], list[Piece], np.ndarray, np.ndarray]:
    shape = draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
    spec = TensorSpec("w", "int32", shape)
    a = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    b = a.copy()
    for at in draw(st.lists(st.integers(0, a.size - 1), max_size=3)):
        b.reshape(-1)[at] += 1000
    pieces = [hashed(spec, region, a) for region in draw(cuts(shape))]
    regions = [each.region for each in pieces] if draw(st.booleans()) else draw(cuts(shape))
    return pieces, [hashed(spec, region, b) for region in regions], a, b


def met(windows: list[CompareWindow], shape: tuple[int, ...]) -> np.ndarray:
    """How often each element is read."""
    count = np.zeros(shape, dtype=int)
    for window in windows:
        for box in window.boxes:
            count[box.relative_to((0,) * len(shape))] += 1
    return count


@settings(max_examples=400, deadline=None)
@given(copies())
def test_what_differs_is_read_once_and_what_is_settled_is_the_same(case: tuple[list[Piece], ...]) -> None:
    ours, theirs, a, b = case
    windows, settled_bytes = unsettled(3, ours, theirs)
    count = met(windows, a.shape)
    assert set(np.unique(count)) <= {0, 1}
    assert ((count == 1) | (a == b)).all(), "everything that differs is read"
    assert settled_bytes == (count == 0).sum() * 4
    assert {each.number for each in windows} <= {3}
    assert sum(each.bytes for each in windows) + settled_bytes == a.size * 4


@settings(max_examples=200, deadline=None)
@given(copies())
def test_of_equal_regions_only_the_chunks_that_differ_are_read(case: tuple[list[Piece], ...]) -> None:
    ours, theirs, a, b = case
    if [each.region for each in ours] != [each.region for each in theirs]:
        return
    windows, _ = unsettled(0, ours, theirs)
    for window in windows:
        own = np.concatenate([a[box.relative_to((0,) * a.ndim)].reshape(-1) for box in window.boxes])
        other = np.concatenate([b[box.relative_to((0,) * b.ndim)].reshape(-1) for box in window.boxes])
        assert (own != other).any()


def test_chunks_are_known_again_whoever_held_them() -> None:
    """Two rows a rank and four rows a rank: cut on chunk boundaries, their chunks hold the same elements."""
    spec = TensorSpec("w", "int32", (8, 4))
    content = np.arange(32, dtype=np.int32).reshape(8, 4)
    two = [hashed(spec, Box((row, 0), (row + 2, 4)), content) for row in (0, 2, 4, 6)]
    four = [hashed(spec, FlatRange(start, start + 16), content) for start in (0, 16)]
    assert unsettled(0, two, four) == ([], 128)


def test_without_digests_nothing_is_settled() -> None:
    spec = TensorSpec("w", "int32", (8, 4))
    unhashed = [Piece(spec, Box.whole((8, 4)), "file", 3, b"", CHUNK)]
    windows, settled_bytes = unsettled(0, unhashed, unhashed)
    assert (met(windows, (8, 4)) == 1).all()
    assert settled_bytes == 0


class Walked(list[Piece]):
    """Pieces, with a count of the walks over all of them."""

    walks = 0

    def __iter__(self) -> Iterator[Piece]:
        self.walks += 1
        return super().__iter__()


def test_a_copy_without_digests_is_not_walked_for_each_piece_of_the_other() -> None:
    """A tensor of 2,000 ranks took 35 s to compare with another system's copy in as many pieces."""
    spec = TensorSpec("w", "uint8", (40,))
    rows = [Box((row,), (row + 1,)) for row in range(40)]
    a = [hashed(spec, row, np.zeros(40, dtype=np.uint8)) for row in rows]
    b = Walked(Piece(spec, row, "pack", 0, b"", CHUNK) for row in rows)
    windows, settled_bytes = unsettled(0, a, b)
    assert (len(windows), settled_bytes) == (40, 0)
    assert b.walks <= 2


def test_windows_come_by_where_they_begin_in_the_tensor() -> None:
    spec = TensorSpec("w", "int32", (6, 8))
    columns = [Piece(spec, Box((0, at), (6, at + 4)), "file", 0, b"", CHUNK) for at in (0, 4)]
    windows, _ = unsettled(0, columns, ())
    assert [each.boxes[0].start for each in windows] == [(row, at) for row in range(6) for at in (0, 4)]


@given(st.lists(st.lists(st.integers(1, 40), max_size=6), max_size=8), st.integers(1, 64))
def test_batches_keep_order_and_size(sizes: list[list[int]], bytes_max: int) -> None:
    spec = TensorSpec("w", "uint8", (100,))
    piece = Piece(spec, Box.whole((100,)), "file", 0, b"", 128)
    groups = [[CompareWindow(at, piece, 0, size) for size in group] for at, group in enumerate(sizes)]
    found = list(batches(groups, bytes_max))
    assert [each for batch in found for each in batch] == [each for group in groups for each in group]
    for batch in found:
        assert len(batch) == 1 or sum(each.bytes for each in batch) <= bytes_max
    for number, group in enumerate(groups):
        if sum(each.bytes for each in group) <= bytes_max:
            assert sum(any(each.number == number for each in batch) for batch in found) <= 1


@given(st.integers(0, 5000), st.integers(1, 20), st.sampled_from(["uint8", "float32", "complex128"]))
def test_samples_hold_both_ends_and_stay_inside(numel: int, blocks: int, dtype: str) -> None:
    piece = Piece(TensorSpec("w", dtype, (numel,)), Box.whole((numel,)), "file", 0, b"", 4096)
    windows = list(sampled(0, piece, blocks, 64))
    count = met(windows, (numel,))
    if numel:
        assert count[0] and count[-1]
    assert sum(each.bytes for each in windows) <= max(blocks, 2) * 64
    assert all(0 <= each.start < each.stop <= numel for each in windows)


@pytest.mark.parametrize("region", [Box((1, 0), (3, 7)), Box((0, 2), (4, 5)), FlatRange(3, 25)])
def test_chunks_of_a_piece_are_its_windows(region: Region) -> None:
    piece = Piece(TensorSpec("w", "int32", (4, 7)), region, "file", 0, b"", CHUNK)
    count = met(list(windows_of(0, piece)), (4, 7))
    expected = np.zeros((4, 7), dtype=int)
    for box in region_boxes(region, (4, 7)):
        expected[box.relative_to((0, 0))] += 1
    assert (count == expected).all()
