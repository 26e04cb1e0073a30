"""One pass through a pack in file order: windows are filled, or hashed, or both in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from holdfast.engine.nonfinite import NonFinite
from holdfast.format.digest import digest_of, new_digest
from holdfast.geometry.chunking import TINY_BYTES_MAX, chunk_count, chunk_range
from holdfast.ports.framework import Source, Ticket
from holdfast.types.plan import PackItem, PackPlan


class BufferStream(Protocol):
    """The stream of one pack, cut into windows."""

    def room(self) -> memoryview:
        """Return the rest of the current window, never empty."""
        ...

    def advance(self, count: int) -> None:
        """Count bytes of `room` that are done with."""
        ...


class FilledWindows(BufferStream, Protocol):
    """Windows into which copies may still be under way when they are passed on."""

    def await_copy(self, ticket: Ticket) -> None:
        """Note that the current window is not whole before a copy is complete."""
        ...


def fill(header: bytes, pack: PackPlan, windows: FilledWindows, sources: Sequence[Source]) -> None:
    """Copy a pack into windows in file order; nobody waits here for a copy that a device makes.

    Args:
        header, pack: The pack.
        windows: Where its bytes go.
        sources: Bytes by shard number.
    """
    at = 0
    while at < len(header):
        room = windows.room()[: len(header) - at]
        room[:] = header[at : at + len(room)]
        windows.advance(len(room))
        at += len(room)
    number = 0
    while number < len(pack.items):
        item = pack.items[number]
        if tiny := _tiny_from(pack.items, number, windows, TINY_BYTES_MAX):
            room = _room_for(tiny, windows)
            windows.await_copy(_copied_together(tiny, room, sources))
            windows.advance(len(room))
            number += len(tiny)
            continue
        at = 0
        while at < item.bytes:
            # Windows begin on whole pages, so that no element is cut in two.
            room = windows.room()[: item.bytes - at]
            windows.await_copy(sources[item.shard_number].copy_into(item.region, at, at + len(room), room))
            windows.advance(len(room))
            at += len(room)
        number += 1


def stream(
    header: bytes,
    pack: PackPlan,
    windows: BufferStream,
    chunk_bytes: int,
    sources: Sequence[Source] | None,
    nonfinite: NonFinite | None = None,
) -> tuple[bytes, ...]:
    """Go through a pack in file order once, hashing it; return the chunk digests of each item.

    Args:
        header, pack: The pack.
        windows: Where its bytes go, or where they are.
        chunk_bytes: What one digest is of. Each chunk is hashed as soon as it is copied and still in the processor's
            cache. The digest is always of the copy, never of memory that training may change.
        sources: What fills the windows; None if they are filled already.
        nonfinite: Looks at what is hashed.
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
    tiny_bytes_max = min(TINY_BYTES_MAX, chunk_bytes)
    number = 0
    while number < len(pack.items):
        item = pack.items[number]
        tiny = _tiny_from(pack.items, number, windows, tiny_bytes_max)
        if tiny:
            found += _together(tiny, windows, sources, nonfinite)
        else:
            source = None if sources is None else sources[item.shard_number]
            found.append(b"".join(chunk_digests(item, windows, chunk_bytes, source, nonfinite)))
        number += len(tiny) or 1
    return tuple(found)


_TOGETHER_MAX = 1024
"""Pieces copied at once: their bytes are hashed before they leave the processor's cache."""


def _tiny_from(items: Sequence[PackItem], first: int, windows: BufferStream, tiny_bytes_max: int) -> Sequence[PackItem]:
    """Return the tiny pieces, neighbours from `first` on, that the rest of a window holds."""
    if not 0 < items[first].bytes <= tiny_bytes_max:
        return ()
    last_offset = items[first].data_offset + len(windows.room())
    stop = first
    for item in islice(items, first, first + _TOGETHER_MAX):
        if not 0 < item.bytes <= tiny_bytes_max or item.data_offset + item.bytes > last_offset:
            break
        stop += 1
    return items[first:stop]


def _room_for(items: Sequence[PackItem], windows: BufferStream) -> memoryview:
    """Return what of the current window neighbouring pieces fill."""
    return windows.room()[: items[-1].data_offset + items[-1].bytes - items[0].data_offset]


def _copied_together(items: Sequence[PackItem], room: memoryview, sources: Sequence[Source]) -> Ticket:
    own = [sources[item.shard_number] for item in items]
    return own[0].copy_together(own, [item.region for item in items], room)


def _together(
    items: Sequence[PackItem], windows: BufferStream, sources: Sequence[Source] | None, nonfinite: NonFinite | None
) -> list[bytes]:
    """Copy and hash neighbouring pieces of one chunk each, in one go; return their digests."""
    room, start = _room_for(items, windows), items[0].data_offset
    if sources is not None:
        _copied_together(items, room, sources).wait()
    digests = [digest_of(room[item.data_offset - start :][: item.bytes]) for item in items]
    if nonfinite is not None:
        nonfinite.look_together(items, room)
    windows.advance(len(room))
    return digests


def chunk_digests(
    item: PackItem, windows: BufferStream, chunk_bytes: int, source: Source | None, nonfinite: NonFinite | None
) -> Iterator[bytes]:
    """Copy and hash a piece of any size; yield the digest of each chunk as soon as it is known."""
    for number in range(chunk_count(item.bytes, chunk_bytes)):
        start, stop = chunk_range(item.bytes, chunk_bytes, number)
        chunk = windows.room()[: stop - start]
        if len(chunk) == stop - start:
            if source is not None:
                source.copy_into(item.region, start, stop, chunk).wait()
            digest = digest_of(chunk)
            if nonfinite is not None:
                nonfinite.look(item, chunk)
            windows.advance(stop - start)
            yield digest
            continue
        # Windows begin on whole pages, so that no element is cut in two.
        state = new_digest()
        while start < stop:
            part = windows.room()[: stop - start]
            if source is not None:
                source.copy_into(item.region, start, start + len(part), part).wait()
            state.update(part)
            if nonfinite is not None:
                nonfinite.look(item, part)
            windows.advance(len(part))
            start += len(part)
        yield state.digest()


class Scratch:
    """Windows that nobody keeps."""

    def __init__(self, buffer: memoryview) -> None:
        """Begin at the front of a buffer, which is filled again and again."""
        self._buffer, self._filled = buffer, 0

    def room(self) -> memoryview:
        """Return the rest of the buffer."""
        return self._buffer[self._filled :]

    def advance(self, count: int) -> None:
        """Count bytes that are done with; at its end the buffer begins anew."""
        self._filled = (self._filled + count) % len(self._buffer)
