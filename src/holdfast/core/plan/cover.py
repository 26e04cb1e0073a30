"""Proof that boxes cover every tensor exactly once, in linear time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import sub

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box, flat_range_boxes
from holdfast.base.geometry.region import Region, region_boxes

Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]

PRIME = (1 << 31) - 1
"""Products of two residues stay below 2**62, and sums of a billion residues below 2**61: both fit 64 bits."""

_PRIME = np.uint64(PRIME)

_BLOCK = 1 << 17
"""Pieces per numpy call: many enough to amortise the call, few enough to keep temporary arrays small."""


def uncovered(shapes: Sequence[tuple[int, ...]], tensor: Ints, start: Ints, stop: Ints, seed: int) -> list[int]:
    """Return the tensors whose pieces do not cover them exactly once.

    With a random function R_d over the coordinates of each dimension, the sum over boxes of
    Π_d (R_d[stop_d] − R_d[start_d]) equals Π_d (R_d[length_d] − R_d[0]) for an exact cover. For anything
    else the two are equal only with a probability of about ndim/2³¹ per key. Two keys are tried.

    Args:
        shapes: Global shape of each tensor.
        tensor: For each piece the number of its tensor, ascending; shape (pieces,).
        start, stop: Coordinates of all pieces, concatenated; one number per dimension of the tensor. The caller has
            checked `0 <= start <= stop <= length`.
        seed: Any number; the same seed gives the same answer.
    Returns:
        Numbers of the tensors that are not covered exactly once, ascending.
    Source: polynomial identity testing of the indicator function of a disjoint union of boxes.
    """
    ndims = np.array([len(shape) for shape in shapes], dtype=np.int64)
    first_coordinate = np.concatenate(([0], np.cumsum(ndims[tensor]))).astype(np.int64)
    wrong = np.zeros(len(shapes), dtype=bool)
    for ndim in np.unique(ndims):
        members = np.flatnonzero(ndims == ndim)
        pieces = np.flatnonzero(ndims[tensor] == ndim)
        lengths = np.array([shapes[member] for member in members.tolist()], dtype=np.int64).reshape(len(members), ndim)
        number_of = np.full(len(shapes), -1, dtype=np.int64)
        number_of[members] = np.arange(len(members))
        for salt in (0, 1):
            key = 2 * seed + salt
            sums = np.zeros(len(members), dtype=np.uint64)
            for block in np.split(pieces, range(_BLOCK, len(pieces), _BLOCK)):
                columns = first_coordinate[block][:, None] + np.arange(ndim)
                np.add.at(sums, number_of[tensor[block]], volumes(start[columns], stop[columns], key))
            wanted = volumes(np.zeros_like(lengths), lengths, key)
            wrong[members] |= sums % _PRIME != wanted
    return [int(number) for number in np.flatnonzero(wrong)]


def uncovered_tensors(
    ndims: Ints, lengths: Ints, tensor: Ints, flat: NDArray[np.bool_], start: Ints, stop: Ints, seed: int
) -> list[int]:
    """Return the tensors whose pieces, boxes and flat ranges alike, do not cover them exactly once.

    Args:
        ndims: Dimensions of each tensor.
        lengths: Global shapes, concatenated.
        tensor: For each piece the number of its tensor, ascending.
        flat: Whether a piece is a flat range.
        start, stop: Coordinates of all pieces, concatenated: one number for a flat range, for a box one per dimension
            of its tensor. The caller has checked that each piece is inside its tensor.
        seed: As for `uncovered`.
    Returns:
        Numbers of the tensors that are not covered exactly once, ascending.
    """
    widths = np.where(flat, 1, ndims[tensor])
    count = np.bincount(tensor, minlength=len(ndims))
    flats = np.bincount(tensor[flat], minlength=len(ndims))
    doubtful = np.ones(len(ndims), dtype=bool)
    doubtful[_whole_in_concatenated(ndims, lengths, tensor, (count == 1) & (flats == 0), widths, start, stop)] = False
    chosen = np.flatnonzero(doubtful)
    if not len(chosen):
        return []
    ends = np.cumsum(ndims)
    shapes = {
        number: tuple(lengths[ends[number] - ndims[number] : ends[number]].tolist()) for number in chosen.tolist()
    }
    # If all pieces of a tensor are flat ranges, it is checked as a one-dimensional tensor. If only some are, those are
    # converted to boxes.
    lines, mixed = flats == count, (flats > 0) & (flats < count)
    taken = doubtful[tensor] & ~(flat & mixed[tensor])
    at = np.repeat(taken, widths)
    tensors, starts, stops = [tensor[taken]], [start[at]], [stop[at]]
    first = np.cumsum(widths) - widths
    for piece in np.flatnonzero(flat & mixed[tensor]).tolist():
        shape = shapes[int(tensor[piece])]
        boxes = list(flat_range_boxes(shape, int(start[first[piece]]), int(stop[first[piece]])))
        tensors.append(np.full(len(boxes), tensor[piece]))
        starts.append(np.array([coordinate for box in boxes for coordinate in box.start], dtype=np.int64))
        stops.append(np.array([coordinate for box in boxes for coordinate in box.stop], dtype=np.int64))
    number_of = np.cumsum(doubtful) - 1
    wrong = uncovered(
        [
            (math.prod(shapes[number]),) if line and count[number] else shapes[number]
            for number, line in zip(chosen.tolist(), lines[chosen].tolist(), strict=True)
        ],
        number_of[_concatenated(tensors)],
        _concatenated(starts),
        _concatenated(stops),
        seed,
    )
    return chosen[wrong].tolist() if wrong else []


def uncovered_boxes(wanted: Sequence[tuple[tuple[int, ...], Box, Sequence[Region]]], seed: int) -> list[int]:
    """Return the numbers of boxes that are not covered exactly once; parts of regions outside a box are ignored.

    Args:
        wanted: For each box the global shape of its tensor, the box, and the regions that may overlap it.
        seed: As for `uncovered`.
    """
    numbers: list[int] = []
    start: list[int] = []
    stop: list[int] = []
    for number, (shape, box, regions) in enumerate(wanted):
        for region in regions:
            for region_box in region_boxes(region, shape):
                part = region_box.intersect(box)
                if part is not None:
                    numbers.append(number)
                    start += map(sub, part.start, box.start)
                    stop += map(sub, part.stop, box.start)
    shapes = [box.shape for _, box, _ in wanted]
    tensor, starts, stops = (np.array(column, dtype=np.int64) for column in (numbers, start, stop))
    return uncovered(shapes, tensor, starts, stops, seed)


def _concatenated(columns: Sequence[Ints]) -> Ints:
    """Return columns concatenated, without a copy if there is only one."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _whole_in_concatenated(
    ndims: Ints,
    lengths: Ints,
    tensor: Ints,
    alone: NDArray[np.bool_],
    widths: Ints,
    start: Ints,
    stop: Ints,
) -> Ints:
    """Return the tensors among `alone` whose single piece, a box, is the whole tensor: nearly all small tensors are."""
    of_one = alone[tensor]
    at = np.repeat(of_one, widths)
    numbers = np.repeat(tensor[of_one], widths[of_one])
    short = (start[at] != 0) | (stop[at] != lengths[np.repeat(alone, ndims)])
    whole = alone.copy()
    whole[numbers[short]] = False
    return np.flatnonzero(whole)


def volumes(start: Ints, stop: Ints, key: int) -> _Words:
    """Return Π_d (R_d[stop_d] − R_d[start_d]) modulo the prime for each row."""
    product = np.ones(len(start), dtype=np.uint64)
    for dim in range(start.shape[1]):
        length = (_residue(stop[:, dim], dim, key) + _PRIME - _residue(start[:, dim], dim, key)) % _PRIME
        product = product * length % _PRIME
    return product


def _residue(coordinate: Ints, dim: int, key: int) -> _Words:
    """Return R_d at each coordinate: splitmix64 of (coordinate, dimension, key), modulo the prime."""
    word = coordinate.astype(np.uint64)
    word = word + np.uint64((0x9E3779B97F4A7C15 * (64 * key + dim + 1)) & 0xFFFFFFFFFFFFFFFF)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (word ^ (word >> np.uint64(31))) % _PRIME
