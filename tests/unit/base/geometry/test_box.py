"""Boxes, and runs of row-major elements as boxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box, flat_range_boxes
from holdfast.base.geometry.chunking import chunk_count, chunk_range
from holdfast.errors import InvalidError

SHAPES = st.lists(st.integers(0, 6), max_size=5).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@settings(max_examples=600, deadline=None)
@given(runs())
def test_a_flat_range_is_its_boxes_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(flat_range_boxes(shape, start, stop))
    found = [int(n) for box in boxes for n in numbers[box.relative_to((0,) * len(shape))].reshape(-1)]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(box.numel for box in boxes)
    assert all(len(box.start) == len(shape) for box in boxes)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))

    def box() -> Box:
        edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))

    return shape, box(), box()


@settings(max_examples=400, deadline=None)
@given(pairs())
def test_intersect_and_contains_agree_with_elements(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, first, second = case
    origin = (0,) * len(shape)
    one, two = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    one[first.relative_to(origin)] = True
    two[second.relative_to(origin)] = True
    both = np.zeros(shape, dtype=bool)
    overlap = first.intersect(second)
    if overlap is not None:
        both[overlap.relative_to(origin)] = True
        assert overlap.numel > 0
        assert first.contains(overlap)
        assert second.contains(overlap)
    assert (both == (one & two)).all()
    assert second.intersect(first) == overlap
    if second.numel:
        assert first.contains(second) == (two <= one).all()


def test_a_box_without_dimensions() -> None:
    box = Box((), ())
    assert (box.shape, box.numel) == ((), 1)
    assert box.intersect(box) == box
    assert box.contains(box)
    assert list(flat_range_boxes((), 0, 1)) == [box]
    assert list(flat_range_boxes((), 0, 0)) == []


def test_dimensions_must_fit() -> None:
    with pytest.raises(InvalidError):
        Box((0,), (1, 2))
    with pytest.raises(InvalidError):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_chunks_follow_each_other_without_gap(piece_bytes: int, chunk_bytes: int) -> None:
    ranges = [chunk_range(piece_bytes, chunk_bytes, n) for n in range(chunk_count(piece_bytes, chunk_bytes))]
    assert [a for a, _ in ranges] == list(range(0, piece_bytes, chunk_bytes))
    assert [b for _, b in ranges] == [*[a for a, _ in ranges[1:]], piece_bytes][: len(ranges)]
    assert all(a < b for a, b in ranges)
