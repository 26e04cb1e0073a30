"""Sums of tensors: fingerprints that are the same on every layout, because sums over shards add up.

F(T) = Σ bits(i) · r(i div 4096) · c(i mod 4096) mod 2⁶⁴ over the row-major elements i of the global tensor. All r have
64 bits and all c have 32 bits; all are odd. Elements of 8 and 16 bytes count as words of 4 bytes.
A single changed element always changes the sum: r and c are odd, so no product of them with a difference is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from holdfast.backends.torch.local_shards import LocalPart, bytes_of
from holdfast.base.geometry.region import flat_run, region_boxes

_COLUMNS = 4096
_WORD_BYTES = 4
_ROWS_MAX = 1 << 10
"""Rows summed by one call: the widened copies of numpy stay small."""

_Words = NDArray[np.uint64]


def sum_of(parts: Iterable[LocalPart], global_shape: tuple[int, ...]) -> int:
    """Return the sum over the parts of a tensor that this rank holds.

    Args:
        parts: The held regions and their memory.
        global_shape: Shape of the whole tensor.
    """
    return sum([_sum_of_part(part, global_shape) for part in parts]) & 0xFFFF_FFFF_FFFF_FFFF


def _sum_of_part(part: LocalPart, global_shape: tuple[int, ...]) -> int:
    local = part.local
    if not local.numel():
        return 0
    words_each = max(local.itemsize // _WORD_BYTES, 1)
    # A copy where the memory is no run of bytes: conjugated views and other orders of dimensions.
    held = local.detach().cpu().resolve_conj().resolve_neg().contiguous()
    words = np.frombuffer(bytes_of(held), dtype=f"<u{min(held.itemsize, _WORD_BYTES)}")
    run = flat_run(part.region, global_shape)
    if run is not None:
        return _sum_of_run(words, run.start * words_each)
    numbers = np.concatenate(
        [_numbers(box.start, box.shape, global_shape) for box in region_boxes(part.region, global_shape)]
    )
    numbers = (numbers[:, None] * words_each + np.arange(words_each)).ravel()
    factors = _rows(numbers // _COLUMNS) * _FACTORS[numbers % _COLUMNS]
    return int((words * factors).sum(dtype=np.uint64))


def _sum_of_run(words: NDArray[np.generic], start: int) -> int:
    """Return the sum over consecutive words, the first of which has the number `start`."""
    first, offset = divmod(start, _COLUMNS)
    head = min(-offset % _COLUMNS, len(words))
    stop = head + (len(words) - head) // _COLUMNS * _COLUMNS
    total = 0
    for begin, end, column in ((0, head, offset), (stop, len(words), 0)):
        if begin < end:
            factors = _FACTORS[column : column + end - begin]
            total += _row((start + begin) // _COLUMNS) * int(np.dot(words[begin:end].astype(np.uint64), factors))
    whole = words[head:stop].reshape(-1, _COLUMNS)
    first += 1 if offset else 0
    for row in range(0, len(whole), _ROWS_MAX):
        block = whole[row : row + _ROWS_MAX]
        # einsum: the fastest of six ways in numpy, 4.6 GB a processor second.
        sums = np.einsum("ij,j->i", block, _FACTORS, dtype=np.uint64, casting="unsafe")
        total += int(np.dot(sums, _rows(np.arange(first + row, first + row + len(block)))))
    return total


def _numbers(start: Sequence[int], shape: Sequence[int], global_shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the row-major numbers of the elements of a box."""
    places = [np.arange(first, first + length) for first, length in zip(start, shape, strict=True)]
    return np.ravel_multi_index(np.meshgrid(*places, indexing="ij"), global_shape).ravel()


def _mixed(numbers: _Words) -> _Words:
    """Return the output of splitmix64 for each number of its sequence.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ (mixed >> np.uint64(31))


def _rows(numbers: NDArray[np.int64]) -> _Words:
    """Return r of some rows. Their numbers in the sequence come after those of the columns."""
    return _mixed(numbers.astype(np.uint64) + np.uint64(_COLUMNS)) | np.uint64(1)


@lru_cache(1 << 16)
def _row(number: int) -> int:
    # Of the first and the last row of a part: nearly all of them are the same few.
    return int(_rows(np.array([number]))[0])


_FACTORS: _Words = (_mixed(np.arange(_COLUMNS, dtype=np.uint64)) >> np.uint64(32)) | np.uint64(1)
"""c of each column."""


def slices_of(tensor_bytes: Mapping[str, int]) -> list[list[str]]:
    """Return sorted names in 64 slices of nearly equal bytes, some of them empty.

    Args:
        tensor_bytes: Bytes by name.
    """
    total, before = sum(tensor_bytes.values()), 0
    slices: list[list[str]] = [[] for _ in range(SLICES)]
    for fqn, count in sorted(tensor_bytes.items()):
        slices[min(before * SLICES // max(total, 1), SLICES - 1)].append(fqn)
        before += count
    return slices


SLICES = 64
"""Boundaries until the sum of each tensor was due."""
