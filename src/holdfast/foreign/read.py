"""Small parts of another system's files, read whole."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise

from holdfast.errors import CorruptError
from holdfast.ports.store import Readable
from holdfast.settings import PAGE_BYTES


def read_bytes(files: Readable, key: str, start: int, stop: int, bytes_max: int) -> bytes:
    """Return bytes `[start, stop)` of a file.

    Args:
        files: Where it lies.
        key: The file.
        start, stop: Half-open byte range.
        bytes_max: What such a part may be at most; nothing is allocated for more.
    Raises:
        CorruptError: The range is longer than that, or the file ends before it does.
        MissingError: There is no such file.
    """
    if not 0 <= start <= stop:
        raise CorruptError(f"{files.url}/{key}: states bytes {start}–{stop}; expected a range")
    if stop - start > bytes_max:
        raise CorruptError(
            f"{files.url}/{key}: bytes {start}–{stop} are to be read at once; expected at most {bytes_max}"
        )
    size = files.size(key)
    if stop > size:
        raise CorruptError(f"{files.url}/{key}: ends at byte {size}; expected bytes {start}–{stop}. Was it cut short?")
    if start == stop:
        return b""
    with mmap.mmap(-1, stop - start + 2 * PAGE_BYTES) as memory, memoryview(memory) as buffer:
        (found,) = files.get_ranges(key, [(start, stop)], [buffer])
        with found:
            return bytes(found)


def read_ranges(files: Readable, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return several byte ranges of a file, read with one call.

    Args:
        files: Where it lies.
        key: The file.
        ranges: Half-open and small, each known to lie in the file.
    """
    room = [(-(-(stop - start) // PAGE_BYTES) + 2) * PAGE_BYTES for start, stop in ranges]
    with mmap.mmap(-1, sum(room)) as memory, memoryview(memory) as whole, ExitStack() as views:
        bounds = accumulate(room, initial=0)
        buffers = [views.enter_context(whole[start:stop]) for start, stop in pairwise(bounds)]
        found = files.get_ranges(key, ranges, buffers)
        return [bytes(views.enter_context(each)) for each in found]
