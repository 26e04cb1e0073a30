"""The coordinates that a plain tensor carries itself, as attributes.

The attributes are those of PyTorch's protocol `CheckpointableTensor` (main branch, July 2026). One tensor in memory
holds several boxes of a larger tensor. What no box covers is padding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import SupportsIndex

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.overlap import first_overlap
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError

COORDINATES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Names of the attributes."""

DECIDING = frozenset(COORDINATES[1:])
"""A tensor with one of these attributes carries coordinates. Other systems may set `global_shape` alone."""

_Numbers = tuple[int, ...]
Boxes = tuple[tuple[Box, Box], ...]
"""Boxes of a whole tensor, each with its box in the local tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Located(Sharded):
    """A tensor with coordinates: `start` has the `global_offsets`, one for each box.

    Other ranks may hold the same boxes. These ranks are replicas, and rank 0 finds them when a save begins.
    """

    local_offsets: object = ()
    """First coordinate of each box in the local tensor."""

    local_sizes: object = ()
    """Shape of each box."""

    @property
    def is_empty(self) -> bool:
        """Whether every box of this rank is empty, although the whole tensor has elements."""
        shape, sizes = whole_numbers(self.global_shape), _all_numbers(self.local_sizes)
        if shape is None or sizes is None:
            return False  # It is refused with the numbers.
        return 0 not in shape and not any(map(math.prod, sizes))

    def boxes(self, local_shape: tuple[int, ...], where: str) -> tuple[tuple[int, ...], Boxes]:
        """Return the shape of the whole tensor, and the boxes of it, each with its box in the local tensor.

        A local tensor with fewer dimensions has the leading ones merged into rows. Then a box is a run of whole rows.

        Args:
            local_shape: Shape of the local tensor.
            where: The tensor and the rank, for the message.
        Raises:
            InvalidError: The coordinates are no integers, are outside of a tensor, or overlap in the local tensor.
        """
        key = (self.global_shape, self.start, self.local_offsets, self.local_sizes, local_shape)
        try:
            found: tuple[_Numbers, Boxes] | str = _known(key)
        except (TypeError, ValueError):  # Lists have no hash.
            found = _found(key)
        if isinstance(found, str):
            raise InvalidError(f"{where}: {found}. Correct the attributes where they are set on the tensor")
        return found


def whole_numbers(stated: object) -> _Numbers | None:
    """Return a sequence of integers as a tuple; None for anything else, such as fractions or text."""
    if not isinstance(stated, Sequence) or isinstance(stated, str | bytes):
        return None
    if any(isinstance(number, bool) or not isinstance(number, SupportsIndex) for number in stated):
        return None
    return tuple(operator.index(number) for number in stated)


def _all_numbers(stated: object) -> tuple[_Numbers, ...] | None:
    if not isinstance(stated, Sequence) or isinstance(stated, str | bytes):
        return None
    found = tuple(numbers for each in stated if (numbers := whole_numbers(each)) is not None)
    return found if len(found) == len(stated) else None


def _found(key: tuple[object, object, object, object, _Numbers]) -> tuple[_Numbers, Boxes] | str:
    """Return shape and boxes, or what is wrong with them.

    Args:
        key: The attributes, and the shape of the local tensor.
    """
    *stated, local_shape = key
    shape, (offsets, local_offsets, sizes) = whole_numbers(key[0]), map(_all_numbers, key[1:4])
    if shape is None or min(shape, default=0) < 0 or offsets is None or local_offsets is None or sizes is None:
        texts = (f"{name}={str(value)[:80]}" for name, value in zip(COORDINATES, stated, strict=True))
        return f"{', '.join(texts)}; expected integers: a shape, and one tuple for each box"
    if not len(offsets) == len(local_offsets) == len(sizes):
        return (
            f"has {len(offsets)} global_offsets, {len(local_offsets)} local_offsets and {len(sizes)} local_sizes; "
            "expected one of each for each box"
        )
    found = []
    for number, (offset, local_offset, size) in enumerate(zip(offsets, local_offsets, sizes, strict=True)):
        outer = _box_in(shape, offset, size)
        inner = _box_in(local_shape, local_offset, _local_size(size, local_shape))
        if outer is None or inner is None:
            text = f"global_offsets[{number}]={offset}" if outer is None else f"local_offsets[{number}]={local_offset}"
            whole = f"global_shape {shape}" if outer is None else f"the local tensor, which has shape {local_shape}"
            return f"{text} with local_sizes[{number}]={size}; expected a box inside {whole}"
        found.append((outer, inner))
    if (shared := first_overlap([inner for _, inner in found])) is not None:
        texts = (f"local_offsets[{at}]={local_offsets[at]} with local_sizes[{at}]={sizes[at]}" for at in shared)
        return f"{' and '.join(texts)} overlap; expected elements of its own for each box"
    # Replicas list their boxes in one order.
    return shape, tuple(sorted(found, key=lambda each: each[0].start))


@lru_cache(maxsize=1 << 14)
def _known(key: tuple[object, object, object, object, _Numbers]) -> tuple[_Numbers, Boxes]:
    """Return what `_found` does: a save asks for the same coordinates as the save before it.

    Raises:
        ValueError: Something is wrong. That is not kept, for 4 and 4.0 are one key.
    """
    found = _found(key)
    if isinstance(found, str):
        raise ValueError
    return found


def _box_in(shape: _Numbers, offset: _Numbers, size: _Numbers | None) -> Box | None:
    """Return a box inside a tensor; None if it is outside, or has other dimensions."""
    if size is None or not len(shape) == len(offset) == len(size) or min((*offset, *size), default=0) < 0:
        return None
    box = Box(offset, tuple(map(operator.add, offset, size)))
    return box if Box.whole(shape).contains(box) else None


def _local_size(size: _Numbers, local_shape: _Numbers) -> _Numbers | None:
    """Return the shape of a box in the local tensor; None if the box is no run of whole rows of merged dimensions."""
    merged = len(size) - len(local_shape) + 1
    if merged < 2 or not local_shape:
        return size
    return (math.prod(size[:merged]), *size[merged:]) if size[merged:] == local_shape[1:] else None
