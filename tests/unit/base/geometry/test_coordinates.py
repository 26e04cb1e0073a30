"""The coordinates that a tensor carries: what they mean, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.coordinates import Located
from holdfast.base.geometry.overlap import first_overlap
from holdfast.errors import InvalidError


def located(shape: Any, offsets: Any, local_offsets: Any, sizes: Any) -> Located:
    return Located(object(), shape, start=offsets, local_offsets=local_offsets, local_sizes=sizes)


def test_boxes_come_in_the_order_of_the_whole_tensor() -> None:
    given = located((8, 4), ((6, 0), (0, 1)), ((0, 0), (2, 1)), ((2, 4), (3, 2)))
    shape, boxes = given.boxes((5, 4), "w")
    assert shape == (8, 4)
    assert boxes == ((Box((0, 1), (3, 3)), Box((2, 1), (5, 3))), (Box((6, 0), (8, 4)), Box((0, 0), (2, 4))))


def test_lists_mean_the_same_as_tuples() -> None:
    given = located([8], [[2], [5]], [[0], [1]], [[1], [3]])
    assert given.boxes((4,), "w") == located((8,), ((2,), (5,)), ((0,), (1,)), ((1,), (3,))).boxes((4,), "w")


def test_rows_may_merge_the_leading_dimensions() -> None:
    given = located((4, 3, 5), ((2, 0, 0), (0, 1, 0)), ((1, 0), (7, 0)), ((2, 3, 5), (1, 2, 5)))
    _, boxes = given.boxes((9, 5), "w")
    assert boxes == (
        (Box((0, 1, 0), (1, 3, 5)), Box((7, 0), (9, 5))),
        (Box((2, 0, 0), (4, 3, 5)), Box((1, 0), (7, 5))),
    )


def test_empty_boxes_share_nothing() -> None:
    _, boxes = located((4, 4), ((0, 0), (2, 2)), ((0, 0), (0, 0)), ((0, 1), (1, 1))).boxes((1, 1), "w")
    assert [box.numel for box, _ in boxes] == [0, 1]
    assert located((4,), (), (), ()).is_empty and located((4,), ((1,),), ((0,),), ((0,),)).is_empty
    assert not located((0,), (), (), ()).is_empty


REFUSED: dict[str, tuple[tuple[Any, Any, Any, Any], tuple[int, ...], str]] = {
    "outside of the whole": (
        ((8,), ((6,),), ((0,),), ((3,),)),
        (3,),
        "global_offsets[0]=(6,) with local_sizes[0]=(3,)",
    ),
    "outside of the tensor": (
        ((8,), ((0,),), ((2,),), ((3,),)),
        (4,),
        "local_offsets[0]=(2,) with local_sizes[0]=(3,)",
    ),
    "larger than the tensor": (((8,), ((0,),), ((0,),), ((5,),)), (4,), "the local tensor, which has shape (4,)"),
    "negative offset": (((8,), ((-1,),), ((0,),), ((3,),)), (3,), "global_offsets[0]=(-1,)"),
    "negative local offset": (((8,), ((0,),), ((-1,),), ((3,),)), (3,), "local_offsets[0]=(-1,)"),
    "negative size": (((8,), ((1,),), ((0,),), ((-1,),)), (3,), "local_sizes[0]=(-1,)"),
    "negative shape": (((-8,), ((0,),), ((0,),), ((1,),)), (1,), "global_shape=(-8,)"),
    "fewer dimensions": (((8, 4), ((0,),), ((0, 0),), ((3, 4),)), (3, 4), "global_offsets[0]=(0,)"),
    "more sizes": (((8, 4), ((0, 0),), ((0, 0),), ((3, 4, 1),)), (3, 4), "local_sizes[0]=(3, 4, 1)"),
    "more dimensions in the tensor": (((8,), ((0,),), ((0, 0),), ((3,),)), (3, 4), "has shape (3, 4)"),
    "rows that do not merge": (((2, 3, 5), ((0, 0, 0),), ((0, 0),), ((1, 3, 4),)), (3, 5), "local_sizes[0]=(1, 3, 4)"),
    "columns of merged rows": (((2, 3, 5), ((0, 0, 0),), ((0, 1),), ((1, 3, 5),)), (4, 5), "local_offsets[0]=(0, 1)"),
    "a fraction": (((8.5,), ((0,),), ((0,),), ((3,),)), (3,), "global_shape=(8.5,)"),
    "a fraction as offset": (((8,), ((1.5,),), ((0,),), ((3,),)), (3,), "global_offsets=((1.5,),)"),
    "text": (((8,), (("0",),), ((0,),), ((3,),)), (3,), "expected integers"),
    "offsets not in a list": (((8,), (0,), ((0,),), ((3,),)), (3,), "global_offsets=(0,)"),
    "no list at all": (((8,), 0, ((0,),), ((3,),)), (3,), "global_offsets=0"),
    "one offset for two boxes": (((8,), ((0,),), ((0,), (1,)), ((1,), (1,))), (2,), "has 1 global_offsets, 2 local"),
    "overlap in memory": (
        ((8,), ((0,), (4,)), ((0,), (2,)), ((3,), (2,))),
        (4,),
        "local_offsets[0]=(0,) with local_sizes[0]=(3,) and local_offsets[1]=(2,) with local_sizes[1]=(2,) overlap",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_coordinates_are_refused_with_their_numbers(name: str) -> None:
    attributes, local_shape, text = REFUSED[name]
    for _ in range(2):  # The second answer is remembered.
        with pytest.raises(InvalidError, match=re.escape(text)) as refused:
            located(*attributes).boxes(local_shape, "w: on rank 3")
        assert str(refused.value).startswith("w: on rank 3: ") and "expected" in str(refused.value)
        assert "Correct the attributes" in str(refused.value)


@pytest.mark.parametrize(
    ("boxes", "found"),
    [
        ([], None),
        ([Box((), ())], None),
        ([Box((), ()), Box((), ())], (0, 1)),
        ([Box((0, 0), (2, 2)), Box((2, 0), (4, 2)), Box((0, 2), (4, 3))], None),
        ([Box((0, 0), (2, 2)), Box((5, 5), (5, 9)), Box((1, 1), (3, 3))], (0, 2)),
        ([Box((n,), (n + 1,)) for n in range(500)] + [Box((250,), (252,))], (250, 500)),
    ],
)
def test_the_first_overlap(boxes: list[Box], found: tuple[int, int] | None) -> None:
    assert first_overlap(boxes) == found
