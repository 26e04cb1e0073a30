"""Proof that boxes cover every tensor exactly once, in linear time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.spec.box import flat_range_boxes

Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]

_PRIME = np.uint64((1 << 31) - 1)
"""Products of two residues stay below 2**62, sums of a billion residues below 2**61."""


def uncovered(shapes: Sequence[tuple[int, ...]], tensor: Ints, start: Ints, stop: Ints, seed: int) -> list[int]:
    """Return the tensors that their pieces do not cover exactly once.

    With a random function R_d over the coordinates of each dimension, the sum over boxes of
    Π_d (R_d[stop_d] − R_d[start_d]) equals Π_d (R_d[length_d] − R_d[0]) for an exact cover; for anything else
    the two differ but with a chance of about ndim/2³¹ per seed. Two seeds are tried.

    Args:
        shapes: Global shape of each tensor.
        tensor: For each piece the number of its tensor, ascending; shape (pieces,).
        start, stop: Coordinates of all pieces one after the other, each as long as its tensor has
            dimensions; within `0 <= start <= stop <= length` (the caller has checked).
        seed: Any number; the same seed gives the same answer.
    Returns:
        Numbers of the tensors at fault, ascending.
    Source: polynomial identity testing of the indicator function of a disjoint union of boxes.
    """
    ndims = np.array([len(shape) for shape in shapes], dtype=np.int64)
    first_coordinate = np.concatenate(([0], np.cumsum(ndims[tensor]))).astype(np.int64)
    wrong = np.zeros(len(shapes), dtype=bool)
    for ndim in np.unique(ndims):
        members = np.flatnonzero(ndims == ndim)
        pieces = np.flatnonzero(ndims[tensor] == ndim)
        columns = first_coordinate[pieces][:, None] + np.arange(ndim)
        lengths = np.array([shapes[member] for member in members.tolist()], dtype=np.int64).reshape(len(members), ndim)
        number_of = np.full(len(shapes), -1, dtype=np.int64)
        number_of[members] = np.arange(len(members))
        for salt in (0, 1):
            key = 2 * seed + salt
            volumes = _volumes(start[columns], stop[columns], key)
            sums = np.zeros(len(members), dtype=np.uint64)
            np.add.at(sums, number_of[tensor[pieces]], volumes)
            wanted = _volumes(np.zeros_like(lengths), lengths, key)
            wrong[members] |= sums % _PRIME != wanted
    return [int(number) for number in np.flatnonzero(wrong)]


def uncovered_tensors(
    shapes: Sequence[tuple[int, ...]], tensor: Ints, flat: NDArray[np.bool_], start: Ints, stop: Ints, seed: int
) -> list[int]:
    """Return the tensors that their pieces, boxes and flat ranges alike, do not cover exactly once.

    Args:
        shapes: Global shape of each tensor.
        tensor: For each piece the number of its tensor, ascending.
        flat: Whether a piece is a flat range.
        start, stop: Coordinates of all pieces one after the other: one for a flat range, for a box as many as its
            tensor has dimensions. Each piece lies inside its tensor (the caller has checked).
        seed: As for `uncovered`.
    Returns:
        Numbers of the tensors at fault, ascending.
    """
    ndims = np.array([len(shape) for shape in shapes], dtype=np.int64)
    widths = np.where(flat, 1, ndims[tensor])
    count = np.bincount(tensor, minlength=len(shapes))
    flats = np.bincount(tensor[flat], minlength=len(shapes))
    doubtful = np.ones(len(shapes), dtype=bool)
    doubtful[_whole_in_one(shapes, tensor, (count == 1) & (flats == 0), widths, start, stop)] = False
    chosen = np.flatnonzero(doubtful)
    if not len(chosen):
        return []
    # Where all pieces are flat ranges, the tensor is a line; where some are, these become boxes.
    lines, mixed = flats == count, (flats > 0) & (flats < count)
    taken = doubtful[tensor] & ~(flat & mixed[tensor])
    at = np.repeat(taken, widths)
    tensors, starts, stops = [tensor[taken]], [start[at]], [stop[at]]
    first = np.cumsum(widths) - widths
    for piece in np.flatnonzero(flat & mixed[tensor]).tolist():
        shape = shapes[int(tensor[piece])]
        boxes = list(flat_range_boxes(shape, int(start[first[piece]]), int(stop[first[piece]])))
        tensors.append(np.full(len(boxes), tensor[piece]))
        starts.append(np.array([each for box in boxes for each in box.start], dtype=np.int64))
        stops.append(np.array([each for box in boxes for each in box.stop], dtype=np.int64))
    number_of = np.cumsum(doubtful) - 1
    wrong = uncovered(
        [
            (math.prod(shapes[number]),) if line and count[number] else shapes[number]
            for number, line in zip(chosen.tolist(), lines[chosen].tolist(), strict=True)
        ],
        number_of[np.concatenate(tensors)],
        np.concatenate(starts),
        np.concatenate(stops),
        seed,
    )
    return chosen[wrong].tolist() if wrong else []


def _whole_in_one(
    shapes: Sequence[tuple[int, ...]],
    tensor: Ints,
    alone: NDArray[np.bool_],
    widths: Ints,
    start: Ints,
    stop: Ints,
) -> Ints:
    """Return those of the tensors with a single piece, a box, of which it is the whole: nearly all that are small."""
    of_one = alone[tensor]
    at = np.repeat(of_one, widths)
    numbers = np.repeat(tensor, widths)[at]
    lengths = [length for number in np.flatnonzero(alone).tolist() for length in shapes[number]]
    short = (start[at] != 0) | (stop[at] != np.array(lengths, dtype=np.int64))
    whole = alone.copy()
    whole[numbers[short]] = False
    return np.flatnonzero(whole)


def _volumes(start: Ints, stop: Ints, key: int) -> _Words:
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
