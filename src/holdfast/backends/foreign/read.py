"""Reads small byte ranges of a foreign file into memory."""

from __future__ import annotations

import mmap
from itertools import accumulate

from holdfast.base.ports.ranges import view_for_range
from holdfast.base.ports.readable import ByteRanges, Readable
from holdfast.errors import CorruptError
from holdfast.settings import PAGE_BYTES


def read_bytes(files: Readable, key: str, start: int, stop: int, bytes_max: int) -> bytes:
    """Return bytes `[start, stop)` of a file.

    Args:
        files: The folder.
        key: The file.
        start, stop: Half-open byte range.
        bytes_max: Largest length of the range. It is checked before any memory is allocated.
    Raises:
        CorruptError: The range is longer than `bytes_max`, or reaches beyond the end of the file.
        MissingError: The file does not exist.
    """
    if not 0 <= start <= stop:
        raise CorruptError(f"{files.url}/{key}: states bytes {start}–{stop}; expected a range. Read another copy")
    if stop - start > bytes_max:
        raise CorruptError(f"{files.url}/{key}: states bytes {start}–{stop}; expected at most {bytes_max} of them")
    size = files.size(key)
    if stop > size:
        raise CorruptError(f"{files.url}/{key}: ends at byte {size}; expected bytes {start}–{stop}. Was it cut short?")
    return read_ranges(files, key, [(start, stop)])[0] if start < stop else b""


def read_ranges(files: Readable, key: str, ranges: ByteRanges) -> list[bytes]:
    """Return several byte ranges of a file, read with one call.

    Args:
        files: The folder.
        key: The file.
        ranges: Half-open, small, not empty, and inside the file.
    """
    if not ranges:
        return []
    alignment = files.traits.read_alignment
    capacities = [-(-(stop - start + alignment - 1) // PAGE_BYTES) * PAGE_BYTES for start, stop in ranges]
    memory = memoryview(mmap.mmap(-1, sum(capacities)))
    buffers = [
        view_for_range(memory[first:], start, stop, alignment)
        for first, (start, stop) in zip(accumulate(capacities, initial=0), ranges, strict=False)
    ]
    files.read_into(key, ranges, buffers)
    return [bytes(buffer) for buffer in buffers]
