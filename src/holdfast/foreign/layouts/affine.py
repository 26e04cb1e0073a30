"""DeepSpeed's affine maps, lowered to slices.

A map says for every tensor-parallel rank which blocks of the whole parameter it holds, each as the arguments of
`torch.as_strided` on both sides. Blocks that are boxes on both sides become slices; others are refused.

Source: `deepspeed/checkpoint/affine.py` of 0.19.8, version 1 of the map.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from holdfast.errors import InvalidError
from holdfast.foreign.layouts.pieces import Slice
from holdfast.foreign.pickles.tensors import row_major_strides
from holdfast.foreign.wording import CONVERT, shown
from holdfast.geometry.box import Box

VERSION_MAX = 1
_BLOCKS_MAX = 1 << 16


class ScaledError(Exception):
    """A rank holds a block multiplied by something: its bytes are not those of the parameter."""


def slices_of_map(
    stated: object, local_shapes: Sequence[tuple[int, ...]], where: str
) -> tuple[tuple[int, ...], tuple[tuple[Slice, ...], ...]]:
    """Return the shape of a whole parameter, and by tensor-parallel rank the slices that it holds.

    Args:
        stated: What `affine_map` holds for the parameter.
        local_shapes: Shape of what each rank really holds.
        where: File and parameter, for messages.
    Raises:
        InvalidError: It is no such map, does not fit the shapes, or a block is no box.
        ScaledError: A block is kept multiplied by a number.
    """
    ranks = stated.get("ranks") if isinstance(stated, Mapping) else None
    global_shape = _counts(stated.get("logical_shape")) if isinstance(stated, Mapping) else None
    if not isinstance(ranks, Mapping) or global_shape is None:
        raise _unfit(where, "no ranks and logical_shape")
    found = []
    for rank, local_shape in enumerate(local_shapes):
        entry = ranks.get(rank, ranks.get(str(rank)))
        blocks = entry.get("pieces") if isinstance(entry, Mapping) else None
        if not isinstance(blocks, Sequence) or isinstance(blocks, str) or len(blocks) > _BLOCKS_MAX:
            raise _unfit(where, f"no blocks for rank {rank} of {len(local_shapes)}")
        shape = _counts(entry.get("shard_shape")) if isinstance(entry, Mapping) else None
        if shape is None or math.prod(shape) != math.prod(local_shape):
            raise _unfit(where, f"{shown(entry.get('shard_shape'))} for rank {rank}, which holds {list(local_shape)}")
        if shape != local_shape:
            raise _unfit(where, f"shape {list(shape)} for rank {rank}, which holds {list(local_shape)}")
        slices = tuple(_slice(block, rank, shape, global_shape, where) for block in blocks)
        if sum(each.local.numel for each in slices) != math.prod(shape):
            raise _unfit(where, f"blocks for rank {rank} that do not add up to its {list(shape)}")
        found.append(slices)
    if len(ranks) != len(local_shapes):
        raise _unfit(where, f"{len(ranks)} ranks; there are {len(local_shapes)}")
    return global_shape, tuple(found)


def _slice(block: object, rank: int, local_shape: tuple[int, ...], global_shape: tuple[int, ...], where: str) -> Slice:
    shape = _counts(block.get("shape")) if isinstance(block, Mapping) else None
    sides = [_side(block.get(name)) for name in ("source", "dest")] if isinstance(block, Mapping) else []
    locations = _counts(block.get("locations")) if isinstance(block, Mapping) else None
    if shape is None or not locations or not isinstance(block, Mapping) or len(shape) != len(global_shape):
        raise _unfit(where, f"a block of rank {rank} without shape, sides and locations")
    if rank not in locations:
        raise _unfit(where, f"a block of rank {rank} said to lie on ranks {list(locations)}")
    if block.get("scale", 1.0) != 1.0:
        raise ScaledError(f"rank {rank} keeps it multiplied by {shown(block.get('scale'))}")
    boxes = []
    for side, whole in zip(sides, (global_shape, local_shape), strict=True):
        box = None if side is None else _box(shape, *side, whole)
        if box is None:
            raise _unfit(where, f"a block {list(shape)} of rank {rank} that is no box of {list(whole)}")
        boxes.append(box)
    return Slice(boxes[1], boxes[0].start, copy=rank != min(locations))


def _box(shape: tuple[int, ...], offset: int, strides: tuple[int, ...], whole: tuple[int, ...]) -> Box | None:
    """Return the box of `whole` that a strided view of its row-major elements is, None where it is none."""
    steps = row_major_strides(whole)
    if len(strides) != len(shape):
        return None
    if any(length > 1 and stride != step for length, stride, step in zip(shape, strides, steps, strict=True)):
        return None
    if 0 in shape:
        return Box((0,) * len(shape), (0,) * len(shape))
    start, left = [], offset
    for step in steps:
        start.append(left // step if step else 0)
        left -= start[-1] * step
    box = Box(tuple(start), tuple(at + length for at, length in zip(start, shape, strict=True)))
    return box if not left and Box.whole(whole).contains(box) else None


def _side(stated: object) -> tuple[int, tuple[int, ...]] | None:
    if not isinstance(stated, list | tuple) or len(stated) != 2 or type(stated[0]) is not int or stated[0] < 0:
        return None
    strides = _counts(stated[1])
    return None if strides is None else (stated[0], strides)


def _counts(stated: object) -> tuple[int, ...] | None:
    return tuple(stated) if _are_counts(stated) else None


def _are_counts(stated: object) -> TypeGuard[Sequence[int]]:
    return isinstance(stated, list | tuple) and all(type(each) is int and 0 <= each < 1 << 62 for each in stated)


def _unfit(where: str, what: str) -> InvalidError:
    return InvalidError(
        f"{where}: its affine_map states {what}; expected blocks that are boxes of the whole and of what the rank "
        f"holds. {CONVERT}"
    )
