"""Regions: boxes and flat ranges, each against its elements counted one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region, contains, elements_spanned, region_boxes, run_boxes

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))


@st.composite
def ranges_in(draw: st.DrawFn, shape: tuple[int, ...]) -> FlatRange:
    return FlatRange(*sorted((draw(st.integers(0, math.prod(shape))), draw(st.integers(0, math.prod(shape))))))


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    shape = draw(SHAPES)
    return shape, draw(st.one_of(boxes_in(shape), ranges_in(shape)))


def elements_of(region: Region, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the row-major numbers of a region's elements, in the region's own order."""
    numbers = np.arange(math.prod(shape), dtype=np.int64)
    if isinstance(region, FlatRange):
        return numbers[region.start : region.stop]
    return numbers.reshape(shape)[region.relative_to((0,) * len(shape))].reshape(-1)


def joined(boxes: list[Box], shape: tuple[int, ...]) -> list[int]:
    return [int(number) for box in boxes for number in elements_of(box, shape)]


@settings(max_examples=600, deadline=None)
@given(regions(), st.data())
def test_a_run_of_a_region_is_its_boxes_in_order(case: tuple[tuple[int, ...], Region], data: st.DataObject) -> None:
    shape, region = case
    own = elements_of(region, shape)
    assert region.numel == len(own)
    start, stop = sorted((data.draw(st.integers(0, len(own))), data.draw(st.integers(0, len(own)))))
    boxes = list(run_boxes(region, shape, start, stop))
    assert joined(boxes, shape) == own[start:stop].tolist()
    assert all(len(box.start) == len(shape) for box in boxes)
    if stop > start:
        assert all(box.numel for box in boxes)
        assert len(boxes) <= max(2 * len(shape) - 1, 1)


@settings(max_examples=400, deadline=None)
@given(regions())
def test_a_region_is_its_boxes(case: tuple[tuple[int, ...], Region]) -> None:
    shape, region = case
    boxes = region_boxes(region, shape)
    assert joined(list(boxes), shape) == elements_of(region, shape).tolist()
    if isinstance(region, Box):
        assert boxes == (region,)
    else:
        assert len(boxes) <= max(2 * len(shape) - 1, 1)


@settings(max_examples=1000, deadline=None)
@given(regions(), st.data())
def test_the_run_that_a_box_may_meet_holds_every_common_element(
    case: tuple[tuple[int, ...], Region], data: st.DataObject
) -> None:
    shape, region = case
    wanted = data.draw(boxes_in(shape))
    own = elements_of(region, shape)
    common = np.flatnonzero(np.isin(own, elements_of(wanted, shape)))
    first, last = elements_spanned(region, shape, wanted)
    assert 0 <= first <= last <= len(own)
    assert set(common.tolist()) <= set(range(first, last))
    if isinstance(region, Box):
        # Exactly the run from the first to the last common one; a flat range may add the box's own first and last rows.
        assert (first, last) == ((int(common[0]), int(common[-1]) + 1) if len(common) else (0, 0))
    elif wanted.numel:
        spanned = elements_of(wanted, shape)
        within = np.flatnonzero((own >= spanned[0]) & (own <= spanned[-1]))
        assert (first, last) == ((int(within[0]), int(within[-1]) + 1) if len(within) else (0, 0))
    else:
        assert (first, last) == (0, 0)


@settings(max_examples=400, deadline=None)
@given(regions(), st.data())
def test_contains_agrees_with_elements_within_one_kind(
    case: tuple[tuple[int, ...], Region], data: st.DataObject
) -> None:
    shape, outer = case
    inner = data.draw(boxes_in(shape) if isinstance(outer, Box) else ranges_in(shape))
    if inner.numel:
        assert contains(outer, inner) == (
            set(joined([inner], shape) if isinstance(inner, Box) else elements_of(inner, shape).tolist())
            <= set(elements_of(outer, shape).tolist())
        )
    other = Box.whole(shape) if isinstance(outer, FlatRange) else FlatRange(0, math.prod(shape))
    assert not contains(outer, other), "a piece is of the kind of what it is cut from"
    assert not contains(other, outer)


@pytest.mark.parametrize(
    ("region", "shape", "boxes"),
    [
        (FlatRange(0, 1), (), [Box((), ())]),
        (FlatRange(0, 0), (), []),
        (FlatRange(0, 0), (0, 3), []),
        (FlatRange(4, 9), (3, 4), [Box((1, 0), (2, 4)), Box((2, 0), (3, 1))]),
        (FlatRange(1, 11), (3, 4), [Box((0, 1), (1, 4)), Box((1, 0), (2, 4)), Box((2, 0), (3, 3))]),
    ],
)
def test_ranges_as_boxes(region: FlatRange, shape: tuple[int, ...], boxes: list[Box]) -> None:
    assert list(region_boxes(region, shape)) == boxes
