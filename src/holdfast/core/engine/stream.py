"""One pass through a pack in file order: fill its windows, or hash them, or both at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from holdfast.base.geometry.chunking import TINY_BYTES_MAX, chunk_count, chunk_range
from holdfast.base.ports.framework import Source, Ticket
from holdfast.base.types.plan import PackItem, PackPlan
from holdfast.core.engine.nonfinite import NonFinite
from holdfast.core.format.digest import digest_of, new_digest


class BufferStream(Protocol):
    """The bytes of one pack, cut into windows."""

    def room(self) -> memoryview:
        """Return the unused rest of the current window; never empty."""
        ...

    def advance(self, count: int) -> None:
        """Mark the first bytes of `room` as used."""
        ...


class FilledWindows(BufferStream, Protocol):
    """Windows that may be passed on while copies into them are still under way."""

    def await_copy(self, ticket: Ticket) -> None:
        """Make the current window wait for a copy before it counts as whole."""
        ...


def fill(header: bytes, pack: PackPlan, windows: FilledWindows, sources: Sequence[Source]) -> None:
    """Copy a pack into windows in file order, without waiting for copies that a device makes.

    Args:
        header, pack: The pack.
        windows: Where its bytes go.
        sources: Where the bytes come from, by shard number.
    """
    _copy_header(header, windows)
    number = 0
    while number < len(pack.items):
        item = pack.items[number]
        if tiny := _tiny_from(pack.items, number, windows, TINY_BYTES_MAX):
            room = _room_for(tiny, windows)
            windows.await_copy(copy_together_into(tiny, room, sources))
            windows.advance(len(room))
            number += len(tiny)
            continue
        at = 0
        while at < item.bytes:
            # Windows begin on whole pages, so a cut never divides an element.
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
    """Hash a pack in one pass in file order; return the chunk digests of each item.

    Args:
        header, pack: The pack.
        windows: Where its bytes go, or where they are.
        chunk_bytes: Bytes per digest. Each chunk is hashed right after its copy, from the processor's cache. The
            digest is always of the copy, never of memory that training may change.
        sources: Where the bytes come from, by shard number; None if the windows are filled already.
        nonfinite: Counts NaN and infinite elements of the hashed bytes; None: not counted.
    """
    _copy_header(header, windows, is_there=sources is None)
    digests: list[bytes] = []
    tiny_bytes_max = min(TINY_BYTES_MAX, chunk_bytes)
    number = 0
    while number < len(pack.items):
        item = pack.items[number]
        tiny = _tiny_from(pack.items, number, windows, tiny_bytes_max)
        if tiny:
            digests += _copy_and_hash_together(tiny, windows, sources, nonfinite)
        else:
            source = None if sources is None else sources[item.shard_number]
            digests.append(b"".join(chunk_digests(item, windows, chunk_bytes, source, nonfinite)))
        number += len(tiny) or 1
    return tuple(digests)


def _copy_header(header: bytes, windows: BufferStream, *, is_there: bool = False) -> None:
    """Copy a pack's header to the front of its windows; if it is there already, only advance past it."""
    at = 0
    while at < len(header):
        room = windows.room()[: len(header) - at]
        if not is_there:
            room[:] = header[at : at + len(room)]
        windows.advance(len(room))
        at += len(room)


_PIECES_TOGETHER_MAX = 1024
"""Pieces copied at once: few enough to hash their bytes before these leave the processor's cache."""


def _tiny_from(items: Sequence[PackItem], first: int, windows: BufferStream, tiny_bytes_max: int) -> Sequence[PackItem]:
    """Return consecutive tiny pieces from `first` on that fit the rest of the current window."""
    if not 0 < items[first].bytes <= tiny_bytes_max:
        return ()
    last_offset = items[first].data_offset + len(windows.room())
    stop = first
    for item in islice(items, first, first + _PIECES_TOGETHER_MAX):
        if not 0 < item.bytes <= tiny_bytes_max or item.data_offset + item.bytes > last_offset:
            break
        stop += 1
    return items[first:stop]


def _room_for(items: Sequence[PackItem], windows: BufferStream) -> memoryview:
    """Return the part of the current window that consecutive pieces fill."""
    return windows.room()[: items[-1].data_offset + items[-1].bytes - items[0].data_offset]


def copy_together_into(items: Sequence[PackItem], room: memoryview, sources: Sequence[Source]) -> Ticket:
    """Copy whole pieces, one after the other, in one call."""
    item_sources = [sources[item.shard_number] for item in items]
    return item_sources[0].copy_together(item_sources, [item.region for item in items], room)


def _copy_and_hash_together(
    items: Sequence[PackItem], windows: BufferStream, sources: Sequence[Source] | None, nonfinite: NonFinite | None
) -> list[bytes]:
    """Copy and hash consecutive pieces of one chunk each, in one call; return their digests."""
    room, start = _room_for(items, windows), items[0].data_offset
    if sources is not None:
        copy_together_into(items, room, sources).wait()
    digests = [digest_of(room[item.data_offset - start :][: item.bytes]) for item in items]
    if nonfinite is not None:
        nonfinite.look_together(items, room)
    windows.advance(len(room))
    return digests


def chunk_digests(
    item: PackItem, windows: BufferStream, chunk_bytes: int, source: Source | None, nonfinite: NonFinite | None
) -> Iterator[bytes]:
    """Copy and hash a piece of any size; yield the digest of each chunk once it is hashed."""
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
        # The chunk spans windows. Windows begin on whole pages, so a cut never divides an element.
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
    """Windows whose bytes are only hashed, so one buffer serves for all of them."""

    def __init__(self, buffer: memoryview) -> None:
        """Begin at the front of `buffer`."""
        self._buffer, self._filled = buffer, 0

    def room(self) -> memoryview:
        """Return the rest of the buffer."""
        return self._buffer[self._filled :]

    def advance(self, count: int) -> None:
        """Mark bytes as used; start again at the front when the buffer is full."""
        self._filled = (self._filled + count) % len(self._buffer)
