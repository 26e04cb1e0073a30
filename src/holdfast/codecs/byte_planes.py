"""Planes: runs of bytes of one kind, each stored as it is or as a zstd frame, whichever is shorter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.codecs.scratch import scratch
from holdfast.codecs.sections import bytes_of, joined, split
from holdfast.codecs.zstd import decode_frame, huffman_frame
from holdfast.errors import CorruptError

Bytes = NDArray[np.uint8]

BLOCK = 64 << 10
"""Elements that one pass of several operations covers: what they hand on stays in the processor's cache."""

_SAMPLE_PLACES, _SAMPLE_RUN = 16, 256
"""A sample is so many runs of so many bytes, evenly spaced: 4 KiB show the entropy of a plane to 0.05 bits."""

_WORTH_CODING_BITS = 7.7
"""Planes of more bits a byte than this are stored as they are: coding would take time for next to nothing."""


def coded_plane(plane: Bytes, *, sampled: bool = True) -> memoryview:
    """Return a plane as it is stored: a frame, or the memory of the plane.

    Args:
        plane: Contiguous bytes.
        sampled: Whether to look at a sample first.
    """
    whole = bytes_of(plane)
    if sampled and not _is_worth_coding(plane):
        return whole
    frame = huffman_frame(whole)
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
    if not any(_is_worth_coding(rest[:, lane]) for lane in range(width)):
        return bytes_of(rest)
    lanes = joined([coded_plane(np.ascontiguousarray(rest[:, lane])) for lane in range(width)])
    together = b"".join(lanes)
    return memoryview(together) if len(together) < count * width else bytes_of(rest)


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


def _is_worth_coding(plane: Bytes) -> bool:
    """Return whether a sample has few enough bits a byte."""
    apart = len(plane) // _SAMPLE_PLACES
    if apart > _SAMPLE_RUN:
        sample = plane[: apart * _SAMPLE_PLACES].reshape(_SAMPLE_PLACES, apart)[:, :_SAMPLE_RUN].reshape(-1)
    else:
        sample = plane
    counts = np.bincount(sample, minlength=256)
    counts = counts[counts > 0]
    bits = np.log2(len(sample)) - float(counts @ np.log2(counts)) / len(sample)
    return bool(bits < _WORTH_CODING_BITS)
