"""Converts DeepSpeed's affine maps to slices.

For every tensor-parallel rank, a map lists the blocks of the whole parameter that the rank holds. A block is given as
the arguments of `torch.as_strided` on both sides. A block that is a box on both sides becomes a slice; any other block
is refused.

Source: `deepspeed/checkpoint/affine.py` of 0.19.8, version 1 of the map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import add
from typing import Annotated

import msgspec

from holdfast.backends.foreign.messages import CONVERT, shown
from holdfast.backends.foreign.pickles.tensors import row_major_strides
from holdfast.backends.foreign.slices.pieces import Slice
from holdfast.backends.foreign.typed_values import Count, Shape
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import coordinate_at
from holdfast.base.types.inspected import inspected
from holdfast.errors import InvalidError

VERSION_MAX = 1
_BLOCKS_MAX = 1 << 16


class ScaledError(Exception):
    """A rank holds a block multiplied by a number, so its bytes are not those of the parameter."""


class _Block(msgspec.Struct):
    """A strided part of the parameter that some ranks hold."""

    shape: Shape
    """Elements along each dimension."""

    source: tuple[Count, Shape]
    """Offset and strides in the whole parameter, in elements."""

    dest: tuple[Count, Shape]
    """Offset and strides in the tensor of the rank, in elements."""

    locations: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    """Ranks that hold the block."""

    scale: object = 1.0
    """Factor by which the ranks multiplied the block."""


class _Shard(msgspec.Struct):
    """The part of the parameter that one rank holds."""

    shard_shape: Shape
    pieces: Annotated[list[_Block], msgspec.Meta(max_length=_BLOCKS_MAX)]


class _AffineMap(msgspec.Struct):
    """The map of one parameter."""

    ranks: dict[int | str, _Shard]
    """By number of the tensor-parallel rank, as int or as text."""

    logical_shape: Shape
    """Shape of the whole parameter."""


def slices_of_map(
    value: object, local_shapes: Sequence[tuple[int, ...]], where: str
) -> tuple[tuple[int, ...], tuple[tuple[Slice, ...], ...]]:
    """Return the shape of a whole parameter, and the slices that each tensor-parallel rank holds.

    Args:
        value: The entry of the parameter in `affine_map`.
        local_shapes: Shape of the tensor that each rank stores.
        where: File and parameter, for messages.
    Raises:
        InvalidError: The map is malformed, contradicts the shapes, or contains a block that is not a box.
        ScaledError: A rank multiplied a block by a number.
    """
    try:
        stated = msgspec.convert(value, inspected(_AffineMap, msgspec.msgpack.Decoder))
    except msgspec.ValidationError as error:
        raise _unfit(where, f"a value of a wrong type ({error})") from error
    slices = []
    for rank, local_shape in enumerate(local_shapes):
        shard = stated.ranks.get(rank, stated.ranks.get(str(rank)))
        if shard is None:
            raise _unfit(where, f"no blocks for rank {rank} of {len(local_shapes)}")
        if shard.shard_shape != local_shape:
            raise _unfit(where, f"shape {list(shard.shard_shape)} for rank {rank}, which holds {list(local_shape)}")
        slices.append(tuple(_slice(block, rank, local_shape, stated.logical_shape, where) for block in shard.pieces))
        if sum(cut.local.numel for cut in slices[-1]) != math.prod(local_shape):
            raise _unfit(where, f"blocks for rank {rank} that do not add up to its {list(local_shape)}")
    if len(stated.ranks) != len(local_shapes):
        raise _unfit(where, f"{len(stated.ranks)} ranks; there are {len(local_shapes)}")
    return stated.logical_shape, tuple(slices)


def _slice(block: _Block, rank: int, local_shape: tuple[int, ...], global_shape: tuple[int, ...], where: str) -> Slice:
    if rank not in block.locations:
        raise _unfit(where, f"a block of rank {rank} that is on ranks {list(block.locations[:3])} only")
    if block.scale != 1.0:
        raise ScaledError(f"rank {rank} stores it multiplied by {shown(block.scale)}")
    source, dest = _box(block.shape, *block.source, global_shape), _box(block.shape, *block.dest, local_shape)
    if source is None or dest is None:
        whole = global_shape if source is None else local_shape
        raise _unfit(where, f"a block {list(block.shape)} of rank {rank} that is no box of {list(whole)}")
    # Several ranks may hold the same block. The lowest rank is read, the others are copies.
    return Slice(dest, source.start, copy=rank != min(block.locations))


def _box(shape: tuple[int, ...], offset: int, strides: tuple[int, ...], whole: tuple[int, ...]) -> Box | None:
    """Return the box of `whole` that equals a strided view of its row-major elements; None if there is none."""
    steps = row_major_strides(whole)
    if not len(shape) == len(strides) == len(steps):
        return None
    if any(length > 1 and stride != step for length, stride, step in zip(shape, strides, steps, strict=True)):
        return None
    if 0 in shape:
        return Box((0,) * len(shape), (0,) * len(shape))
    if offset >= math.prod(whole):
        return None
    start = coordinate_at(offset, whole)
    box = Box(start, tuple(map(add, start, shape)))
    return box if Box.whole(whole).contains(box) else None


def _unfit(where: str, stated: str) -> InvalidError:
    return InvalidError(
        f"{where}: its affine_map states {stated}; expected blocks that are boxes of the whole and of the rank's "
        f"tensor. {CONVERT}"
    )
