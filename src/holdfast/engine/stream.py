"""One pass through a pack in file order: windows are filled, and hashed in the same pass or in a later one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from holdfast.ports.framework import Source
from holdfast.repository.digest import digest_of, new_digest
from holdfast.spec.chunking import chunk_count, chunk_range
from holdfast.spec.plan import PackItem, PackPlan


class Windows(Protocol):
    """The stream of one pack, cut into windows."""

    def room(self) -> memoryview:
        """Return the rest of the current window, never empty."""
        ...

    def advance(self, count: int) -> None:
        """Count bytes of `room` that are done with."""
        ...


def stream(
    header: bytes,
    pack: PackPlan,
    windows: Windows,
    chunk_bytes: int,
    sources: Sequence[Source] | None,
    *,
    digesting: bool,
) -> tuple[bytes, ...]:
    """Go through a pack in file order once; return the chunk digests of each item if they are asked for.

    Args:
        header, pack: The pack.
        windows: Where its bytes go, or where they are.
        chunk_bytes: What one digest is of.
        sources: What fills the windows; None if they are filled already.
        digesting: Whether chunks are hashed, each as soon as it is copied and still in the processor's cache. The
            digest is always of the copy, never of memory that training may change.
    """
    at = 0
    while at < len(header):
        room = windows.room()
        count = min(len(header) - at, len(room))
        if sources is not None:
            room[:count] = header[at : at + count]
        windows.advance(count)
        at += count
    found: list[bytes] = []
    tiny_bytes_max = min(_TINY_BYTES_MAX, chunk_bytes)
    number = 0
    while number < len(pack.items):
        item = pack.items[number]
        tiny: Sequence[PackItem] = ()
        if 0 < item.bytes <= tiny_bytes_max:
            tiny = _tiny_from(pack.items, number, len(windows.room()), tiny_bytes_max)
        if tiny:
            found += _together(tiny, windows, sources, digesting=digesting)
        else:
            source = None if sources is None else sources[item.shard_number]
            found.append(_chunk_by_chunk(item, windows, chunk_bytes, source, digesting=digesting))
        number += len(tiny) or 1
    return tuple(found)


_TINY_BYTES_MAX = 4096
_TOGETHER_MAX = 1024
"""Pieces copied at once: their bytes are hashed before they leave the processor's cache."""


def _tiny_from(items: Sequence[PackItem], first: int, room_bytes: int, tiny_bytes_max: int) -> Sequence[PackItem]:
    """Return the tiny pieces, neighbours from `first` on, that the rest of a window holds."""
    last_offset = items[first].data_offset + room_bytes
    stop = first
    for item in islice(items, first, first + _TOGETHER_MAX):
        if not 0 < item.bytes <= tiny_bytes_max or item.data_offset + item.bytes > last_offset:
            break
        stop += 1
    return items[first:stop]


def _together(
    items: Sequence[PackItem], windows: Windows, sources: Sequence[Source] | None, *, digesting: bool
) -> list[bytes]:
    """Copy and hash neighbouring pieces of one chunk each, in one go; return their digests."""
    start, stop = items[0].data_offset, items[-1].data_offset + items[-1].bytes
    room = windows.room()[: stop - start]
    if sources is not None:
        own = [sources[item.shard_number] for item in items]
        own[0].copy_together(own, [item.region for item in items], room).wait()
    digests = [b""] * len(items)
    if digesting:
        digests = [digest_of(room[item.data_offset - start :][: item.bytes]) for item in items]
    windows.advance(stop - start)
    return digests


def _chunk_by_chunk(
    item: PackItem, windows: Windows, chunk_bytes: int, source: Source | None, *, digesting: bool
) -> bytes:
    """Copy and hash a piece of any size; return its digests."""
    digests: list[bytes] = []
    for number in range(chunk_count(item.bytes, chunk_bytes)):
        start, stop = chunk_range(item.bytes, chunk_bytes, number)
        chunk = windows.room()[: stop - start]
        if len(chunk) == stop - start:
            if source is not None:
                source.copy_into(item.region, start, stop, chunk).wait()
            if digesting:
                digests.append(digest_of(chunk))
            windows.advance(stop - start)
            continue
        # Windows begin on whole pages, so that no element is cut in two.
        state = new_digest()
        while start < stop:
            part = windows.room()[: stop - start]
            if source is not None:
                source.copy_into(item.region, start, start + len(part), part).wait()
            if digesting:
                state.update(part)
            windows.advance(len(part))
            start += len(part)
        digests.append(state.digest())
    return b"".join(digests)
