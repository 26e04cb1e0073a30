"""Planes: runs of bytes of one kind, each stored as it is or as a zstd frame, whichever is shorter."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.backends.codecs.float_halves import LowHalves, fill_lower_halves
from holdfast.backends.codecs.scratch import lent, scratch
from holdfast.backends.codecs.sections import bytes_of, joined, split
from holdfast.backends.codecs.zstd import decode_frame, huffman_frame
from holdfast.base.ports.codec import StoredPart
from holdfast.errors import CorruptError

Bytes = NDArray[np.uint8]

_Element = TypeVar("_Element", bound=np.generic)

BLOCK = 128 << 10
"""Elements that one pass of several operations covers.

Few enough that what they hand on stays in the processor's cache, and enough that calls take little of the time.
"""

_SAMPLE_PLACES, _SAMPLE_RUN = 8, 128
"""A sample is so many runs of so many bytes, evenly spaced: 1 KiB shows the entropy of a plane to 0.2 bits."""

_COUNTS = np.arange(_SAMPLE_PLACES * (_SAMPLE_RUN + 1) + 1)

_COUNT_BITS = _COUNTS * np.log2(np.maximum(_COUNTS, 1))
"""n · log₂ n for each count n of a byte in a sample."""

_EQUAL_WORDS_PER_RUN_MAX = 32
"""Fewer equal words than one in so many are not worth the search for runs, which takes half as long as the codes."""

WORTH_CODING_BITS = 7.7
"""Planes of more bits a byte than this are stored as they are: coding would take time for next to nothing."""


def coded_plane(plane: Bytes, *, sampled: bool = True) -> memoryview:
    """Return a plane as it is stored: a frame, or the memory of the plane.

    Args:
        plane: Contiguous bytes.
        sampled: Whether to look at a sample first.
    """
    whole = bytes_of(plane)
    sample = _sample(plane)
    if sampled and _bits(sample) >= WORTH_CODING_BITS:
        return whole
    frame = huffman_frame(whole, has_runs=_has_runs(sample))
    return frame if len(frame) < len(whole) else whole


def plane_of(section: memoryview, plane_bytes: int, what: str) -> Bytes:
    """Return the plane of a section: read-only, or memory of this thread until it asks for the same plane again.

    Args:
        section: As stored.
        plane_bytes: Bytes of the plane.
        what: Names the plane.
    Raises:
        CorruptError: The section holds no plane of so many bytes.
    """
    if len(section) > plane_bytes:
        raise CorruptError(f"{what}: {len(section)} bytes; expected at most {plane_bytes}")
    if len(section) == plane_bytes:
        return np.frombuffer(section, np.uint8)
    plane = scratch(what, plane_bytes)
    decode_frame(section, plane.data, what)
    return plane


def coded_rest(rest: Bytes) -> memoryview:
    """Return the low bytes of elements as they are stored: together, or byte by byte if one of them is worth coding.

    Args:
        rest: Contiguous; a row for each element, its lowest byte first.
    """
    count, width = rest.shape
    if not _is_worth_coding(_sample(rest)):
        return bytes_of(rest)
    lanes = joined([coded_plane(np.ascontiguousarray(rest[:, lane])) for lane in range(width)])
    together = b"".join(lanes)
    return memoryview(together) if len(together) < count * width else bytes_of(rest)


def coded_low_halves(elements: NDArray[np.uint32]) -> StoredPart:
    """Return the two low bytes of elements as they are stored, as `coded_rest` does; uncoded ones are not copied."""
    sample = np.ascontiguousarray(_sample(elements)).astype(np.uint16).view(np.uint8).reshape(-1, 2)
    if not _is_worth_coding(sample):
        return LowHalves(elements)
    rest = lent(2 * len(elements))
    fill_lower_halves(elements, rest.view(np.uint16))
    return coded_rest(rest.reshape(-1, 2))


def rest_of(section: memoryview, count: int, width: int, what: str) -> Bytes:
    """Return the low bytes of elements: a row for each, its lowest byte first; memory as of `plane_of`.

    Raises:
        CorruptError: The section does not hold them.
    """
    if len(section) > count * width:
        raise CorruptError(f"{what}: {len(section)} bytes; expected at most {count * width}")
    if len(section) == count * width:
        return np.frombuffer(section, np.uint8).reshape(count, width)
    lanes, beyond = split(section, width, what)
    if len(beyond):
        raise CorruptError(f"{what}: {len(beyond)} bytes after the last plane; expected none")
    planes = [plane_of(lane, count, f"{what}, byte {number}") for number, lane in enumerate(lanes)]
    rest = scratch(what, count * width).reshape(count, width)
    if width == 2:
        # As 16-bit numbers: writing every other byte takes three times as long.
        pairs = rest.reshape(-1).view(np.uint16)
        np.multiply(planes[1], 256, out=pairs, dtype=np.uint16)
        np.bitwise_or(pairs, planes[0], out=pairs)
    else:
        for number, plane in enumerate(planes):
            rest[:, number] = plane
    return rest


def sampled_bits(plane: Bytes) -> float:
    """Return the entropy of a sample of a plane, in bits a byte."""
    return _bits(_sample(plane))


def _bits(sample: Bytes) -> float:
    """Return the entropy of a sample, in bits a byte."""
    counts = np.bincount(sample, minlength=256)
    return math.log2(len(sample)) - float(_COUNT_BITS.take(counts).sum()) / len(sample)


def _is_worth_coding(rows: Bytes) -> bool:
    """Return whether any byte of a row is worth coding as a plane."""
    return any(_bits(rows[:, lane]) < WORTH_CODING_BITS for lane in range(rows.shape[1]))


def _has_runs(sample: Bytes) -> bool:
    """Return whether a sample has enough runs of one byte, as rows of zeros have: eight bytes often equal the next."""
    words = sample[: len(sample) // 8 * 8].view(np.uint64)
    return int(np.count_nonzero(words[1:] == words[:-1])) * _EQUAL_WORDS_PER_RUN_MAX > len(words)


def _sample(rows: NDArray[_Element]) -> NDArray[_Element]:
    """Return some elements of a plane, or some rows of several; all of a short one."""
    apart = len(rows) // _SAMPLE_PLACES
    if apart <= _SAMPLE_RUN:
        return rows
    runs = rows[: apart * _SAMPLE_PLACES].reshape(_SAMPLE_PLACES, apart, *rows.shape[1:])[:, :_SAMPLE_RUN]
    return runs.reshape(-1, *rows.shape[1:])
