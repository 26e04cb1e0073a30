"""Finds two boxes that share an element."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.base.geometry.box import Box

_PAIRS_MAX = 1_000_000
"""Most pairs that the search compares: a message must not take hours."""


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the numbers of two boxes that share an element; None if none is found."""
    filled = [number for number, box in enumerate(boxes) if box.numel]
    if len(filled) < 2:
        return None
    if not boxes[filled[0]].start:
        return filled[0], filled[1]
    # Sort along the dimension that separates most boxes, and compare a box only with those that begin before its end.
    dim = max(range(len(boxes[filled[0]].start)), key=lambda dim: len({boxes[number].start[dim] for number in filled}))
    filled.sort(key=lambda number: boxes[number].start[dim])
    pairs_left = _PAIRS_MAX
    for place, number in enumerate(filled):
        for other in filled[place + 1 :]:
            pairs_left -= 1
            if boxes[other].start[dim] >= boxes[number].stop[dim] or not pairs_left:
                break
            if boxes[number].intersect(boxes[other]) is not None:
                return number, other
        if not pairs_left:
            break
    return None
