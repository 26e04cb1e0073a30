"""Proof that boxes cover every tensor exactly once, in linear time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.spec.box import Box
from holdfast.spec.plan import Piece
from holdfast.spec.region import region_boxes
from holdfast.spec.tensor import TensorSpec

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


def uncovered_names(tensors: Iterable[TensorSpec], pieces_of: Callable[[str], Sequence[Piece]], seed: int) -> list[str]:
    """Return the FQNs of the tensors that their pieces do not cover exactly once.

    Args:
        tensors: The tensors to prove.
        pieces_of: Pieces of an FQN, each inside its tensor (the caller has checked).
        seed: As for `uncovered`; one that nobody can foretell proves it of crafted pieces too.
    """
    doubtful: list[TensorSpec] = []
    boxes: list[tuple[int, Box]] = []
    for tensor in tensors:
        pieces = pieces_of(tensor.fqn)
        if len(pieces) == 1 and pieces[0].region == Box.whole(tensor.global_shape):
            continue
        boxes += ((len(doubtful), box) for piece in pieces for box in region_boxes(piece.region, tensor.global_shape))
        doubtful.append(tensor)
    if not doubtful:
        return []
    wrong = uncovered(
        [tensor.global_shape for tensor in doubtful],
        np.array([number for number, _ in boxes], dtype=np.int64),
        np.array([at for _, box in boxes for at in box.start], dtype=np.int64),
        np.array([at for _, box in boxes for at in box.stop], dtype=np.int64),
        seed,
    )
    return [doubtful[number].fqn for number in wrong]


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
