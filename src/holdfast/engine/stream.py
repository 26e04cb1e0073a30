"""One pass through a pack in file order: fill its windows, or hash them, or both at once.

`LentMemory` are windows that need no filling: a pack as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from holdfast.engine.buffers import QUARANTINED
from holdfast.engine.nonfinite import NonFinite
from holdfast.errors import InvalidError
from holdfast.format.digest import digest_of, new_digest
from holdfast.geometry.chunking import TINY_BYTES_MAX, chunk_count, chunk_range
from holdfast.ports.framework import Source, Ticket
from holdfast.types.plan import PackItem, PackPlan


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
            windows.await_copy(_copy_together(tiny, room, sources))
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


def _copy_together(items: Sequence[PackItem], room: memoryview, sources: Sequence[Source]) -> Ticket:
    item_sources = [sources[item.shard_number] for item in items]
    return item_sources[0].copy_together(item_sources, [item.region for item in items], room)


def _copy_and_hash_together(
    items: Sequence[PackItem], windows: BufferStream, sources: Sequence[Source] | None, nonfinite: NonFinite | None
) -> list[bytes]:
    """Copy and hash consecutive pieces of one chunk each, in one call; return their digests."""
    room, start = _room_for(items, windows), items[0].data_offset
    if sources is not None:
        _copy_together(items, room, sources).wait()
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


class LentMemory:
    """One pack as it lies in memory: large pieces where their sources have them, the rest copied, in file order.

    Its windows are pieces of memory. What lies in memory of the state may be changed by another thread, so it is hashed
    again once it has been sent.
    """

    @classmethod
    def of(cls, header: bytes, pack: PackPlan, sources: Sequence[Source]) -> LentMemory | None:
        """Return a pack, with copies of its small pieces; None if most of it would have to be copied.

        Args:
            header, pack: The pack.
            sources: Where the bytes come from, by shard number.
        """
        memories = [
            sources[item.shard_number].memory(item.region) if item.bytes > TINY_BYTES_MAX else None
            for item in pack.items
        ]
        if 2 * sum(memory.nbytes for memory in memories if memory is not None) <= pack.data_bytes:
            return None
        return cls(header, pack, memories, sources)

    def __init__(
        self, header: bytes, pack: PackPlan, memories: Sequence[memoryview | None], sources: Sequence[Source]
    ) -> None:
        """Copy what is not lent."""
        self.parts: list[memoryview] = []
        """All bytes of the pack."""
        self._lent: list[tuple[int, memoryview]] = []
        """Number and bytes of each piece that is not copied."""
        self._items = pack.items
        before, copied = header, list[PackItem]()
        for number, memory in enumerate(memories):
            if memory is None:
                copied.append(pack.items[number])
                continue
            self._add_copies(before, copied, sources)
            before, copied = b"", []
            self.parts.append(memory)
            self._lent.append((number, memory))
        self._add_copies(before, copied, sources)
        self._number = self._used = 0

    def _add_copies(self, before: bytes, items: Sequence[PackItem], sources: Sequence[Source]) -> None:
        items = [item for item in items if item.bytes]
        if not before and not items:
            return
        memory = memoryview(bytearray(len(before) + sum(item.bytes for item in items)))
        memory[: len(before)] = before
        if items:
            try:
                _copy_together(items, memory[len(before) :], sources).wait()
            except BaseException:
                QUARANTINED.append(memory)  # A device may still be copying into it.
                raise
        self.parts.append(memory)

    def room(self) -> memoryview:
        """Return the rest of the current piece of memory."""
        return self.parts[self._number][self._used :]

    def advance(self, count: int) -> None:
        """Go on behind the first bytes of `room`."""
        self._used += count
        if self._used == len(self.parts[self._number]):
            self._number, self._used = self._number + 1, 0

    def require_unchanged(self, digests: Sequence[bytes], chunk_bytes: int) -> None:
        """Require that the pieces which were not copied are still those that were hashed.

        Args:
            digests: What `stream` returned for the pack.
            chunk_bytes: As for `stream`.
        Raises:
            InvalidError: Another thread or process has changed one.
        """
        for number, memory in self._lent:
            item = self._items[number]
            if b"".join(chunk_digests(item, Scratch(memory), chunk_bytes, None, None)) != digests[number]:
                raise InvalidError(
                    f"{item.tensor.fqn}: changed while it was saved; expected no change before save() returns. Nothing "
                    "was committed. Let no other thread or process write to it meanwhile, or save with async_save and "
                    "staging='copy', which copies it first"
                )

    def forget(self) -> None:
        """Refer to no memory any more."""
        self.parts.clear()
        self._lent.clear()
