"""Planes of even bytes, as of numbers without a sign: eight bytes in seven, without a pass over single bits."""

from __future__ import annotations

import numpy as np

from holdfast.backends.codecs.byte_planes import Bytes
from holdfast.backends.codecs.scratch import lent, scratch
from holdfast.errors import CorruptError

_RUNS = 7


def packed_evens(plane: Bytes) -> Bytes:
    """Return a plane of even bytes in seven eighths of its bytes.

    The plane is cut into eight runs, the last one filled up with zeros. Each bit of the eighth run but the lowest goes
    into the free lowest bit of one of the other runs.
    """
    run_bytes = -(-len(plane) // 8)
    whole = plane
    if len(plane) < 8 * run_bytes:
        whole = np.zeros(8 * run_bytes, np.uint8)
        whole[: len(plane)] = plane
    runs = whole.reshape(8, run_bytes)
    packed = lent(_RUNS * run_bytes).reshape(_RUNS, run_bytes)
    # Eight bytes at once, if runs are whole words.
    lowest_bits = np.uint8(0x01) if run_bytes % 8 else np.uint64(0x0101010101010101)
    words, bits = runs.view(lowest_bits.dtype), packed.view(lowest_bits.dtype)
    for number in range(_RUNS):
        np.right_shift(words[_RUNS], number + 1, out=bits[number])
    np.bitwise_and(bits, lowest_bits, out=bits)
    np.bitwise_or(bits, words[:_RUNS], out=bits)
    return packed.reshape(-1)


def evens_of(section: memoryview, plane_bytes: int, what: str) -> Bytes:
    """Return the plane of a section: memory of this thread.

    Raises:
        CorruptError: The section has another length.
    """
    run_bytes = -(-plane_bytes // 8)
    if len(section) != _RUNS * run_bytes:
        raise CorruptError(f"{what}: {len(section)} bytes; expected {_RUNS * run_bytes}")
    packed = np.frombuffer(section, np.uint8).reshape(_RUNS, run_bytes)
    plane = scratch(what, 8 * run_bytes)
    runs = plane.reshape(8, run_bytes)
    np.bitwise_and(packed, 0xFE, out=runs[:_RUNS])
    last, bit = runs[_RUNS], scratch("one bit", run_bytes)
    last.fill(0)
    for number in reversed(range(_RUNS)):
        np.bitwise_and(packed[number], 1, out=bit)
        np.bitwise_or(last, bit, out=last)
        # Doubled seven times in all, so that the lowest bit is free again.
        np.add(last, last, out=last)
    return plane[:plane_bytes]
