"""The proof that pieces cover every tensor exactly once: it accepts what does, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.core.plan.cover import uncovered

SHAPES = st.lists(st.integers(1, 9), max_size=4).map(tuple)


def fault(shapes: Sequence[tuple[int, ...]], boxes: Sequence[Sequence[Box]], seed: int = 1) -> list[int]:
    tensor = np.array([n for n, each in enumerate(boxes) for _ in each], dtype=np.int64)
    start = np.array([at for each in boxes for box in each for at in box.start], dtype=np.int64)
    stop = np.array([at for each in boxes for box in each for at in box.stop], dtype=np.int64)
    return uncovered(shapes, tensor, start, stop, seed)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a shape exactly once, by cutting boxes in two again and again."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 12))):
        number = draw(st.integers(0, len(boxes) - 1))
        box = boxes[number]
        dims = [dim for dim, length in enumerate(box.shape) if length > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
        boxes[number : number + 1] = [with_stop(box, dim, cut), with_start(box, dim, cut)]
    return draw(st.permutations(boxes))


def with_start(box: Box, dim: int, at: int) -> Box:
    return Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop)


def with_stop(box: Box, dim: int, at: int) -> Box:
    return Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :]))


@st.composite
def covered(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[list[Box]]]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    return shapes, [draw(tilings(shape)) for shape in shapes]


@settings(max_examples=200, deadline=None)
@given(covered(), st.integers(0, 1 << 56))
def test_an_exact_cover_passes(case: tuple[list[tuple[int, ...]], list[list[Box]]], seed: int) -> None:
    shapes, boxes = case
    assert fault(shapes, boxes, seed) == []


@settings(max_examples=400, deadline=None)
@given(covered(), st.integers(0, 1 << 56), st.data())
def test_every_single_mutation_is_found(
    case: tuple[list[tuple[int, ...]], list[list[Box]]], seed: int, data: st.DataObject
) -> None:
    shapes, boxes = case
    tensor = data.draw(st.integers(0, len(shapes) - 1))
    mutated = data.draw(mutations(shapes[tensor], boxes[tensor]))
    assume(mutated is not None)
    count = np.zeros(shapes[tensor], dtype=np.int64)
    for box in mutated:
        count[box.relative_to((0,) * len(shapes[tensor]))] += 1
    wrong = not (count == 1).all()
    boxes[tensor] = mutated
    assert fault(shapes, boxes, seed) == ([tensor] if wrong else [])


@st.composite
def mutations(draw: st.DrawFn, shape: tuple[int, ...], boxes: list[Box]) -> list[Box] | None:
    number = draw(st.integers(0, len(boxes) - 1))
    box = boxes[number]
    rest = [*boxes[:number], *boxes[number + 1 :]]
    kind = draw(st.sampled_from(("drop", "duplicate", "shift", "grow", "shrink", "swap", "replace")))
    if kind == "drop":
        return rest
    if kind == "duplicate":
        return [*boxes, box]
    if kind == "replace":
        # Another box of the same tensor in its place: as many pieces, other elements.
        return [*rest, draw(st.sampled_from(boxes))]
    if not shape:
        return None
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "shift":
        if box.stop[dim] == shape[dim]:
            return None
        return [*rest, with_stop(with_start(box, dim, box.start[dim] + 1), dim, box.stop[dim] + 1)]
    if kind == "grow":
        if box.start[dim] == 0:
            return None
        return [*rest, with_start(box, dim, box.start[dim] - 1)]
    if kind == "shrink":
        return [*rest, with_stop(box, dim, box.stop[dim] - 1)]
    # The same volume elsewhere: what a sum of sizes would not notice.
    other = Box(
        tuple(n - b for n, b in zip(shape, box.stop, strict=True)),
        tuple(n - a for n, a in zip(shape, box.start, strict=True)),
    )
    return [*rest, other]


def test_sizes_that_add_up_do_not_suffice() -> None:
    assert fault([(4, 4)], [[Box((0, 0), (2, 4)), Box((1, 0), (3, 4))]]) == [0]
    assert fault([(2, 2)], [[Box((0, 0), (1, 1)), Box((0, 0), (1, 1)), Box((1, 0), (2, 2))]]) == [0]


@pytest.mark.parametrize("times", (0, 1, 2))
def test_a_tensor_without_dimensions(times: int) -> None:
    assert fault([()], [[Box((), ())] * times]) == ([] if times == 1 else [0])


@pytest.mark.parametrize("shape", ((0,), (0, 3), (3, 0)))
def test_an_empty_tensor_needs_no_piece_and_bears_empty_ones(shape: tuple[int, ...]) -> None:
    assert fault([shape], [[]]) == []
    assert fault([shape], [[Box.whole(shape)] * 3]) == []


def test_tensors_are_told_apart() -> None:
    whole = [Box.whole((3,)), Box.whole((2, 2)), Box((), ()), Box.whole((3,))]
    shapes = [(3,), (2, 2), (), (3,)]
    assert fault(shapes, [[each] for each in whole]) == []
    assert fault(shapes, [[whole[0]] * 2, [whole[1]], [], []]) == [0, 2, 3]
    assert fault(shapes, [[], [], [], []]) == [0, 1, 2, 3]


def test_no_tensors_at_all() -> None:
    assert fault([], []) == []


def test_coordinates_beyond_32_bits() -> None:
    n = (1 << 40) + 5
    assert fault([(n, 2)], [[Box((0, 0), (1 << 33, 2)), Box((1 << 33, 0), (n, 2))]]) == []
    assert fault([(n, 2)], [[Box((0, 0), (1 << 33, 2)), Box(((1 << 33) + 1, 0), (n, 2))]]) == [0]


def test_a_million_boxes() -> None:
    side = 1000
    rows, columns = (each.reshape(-1) for each in np.meshgrid(np.arange(side), np.arange(side), indexing="ij"))
    start = np.stack([rows * 3, columns * 5], axis=1)
    stop = start + np.array([3, 5])
    tensor = np.zeros(side * side, dtype=np.int64)
    assert uncovered([(3 * side, 5 * side)], tensor, start.reshape(-1), stop.reshape(-1), 7) == []
    stop[123_456, 1] += 1
    assert uncovered([(3 * side, 5 * side)], tensor, start.reshape(-1), stop.reshape(-1), 7) == [0]
