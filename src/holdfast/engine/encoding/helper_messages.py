"""What an encoder and its helper processes say to each other, and the memory that both map."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence

import msgspec

from holdfast.format.coded_chunks import PAIR_RATIO

# Not an import: what the package offers imports this room.
READY = f"holdfast {sys.modules['holdfast'].__version__}, slots of layout 1".encode()
"""The first message of a helper. One that says something else began after another version was installed."""

MESSAGE_BYTES_MAX = 64 << 10

SLOTS = 6
"""Units that a helper holds: one that it encodes, and others that wait for it or to be written."""


class UnitRequest(msgspec.Struct, array_like=True, frozen=True):
    """A unit to be encoded."""

    slot: int
    """Where it lies."""

    dtype: str
    """Element type."""

    codec: str
    """The codec that is tried first."""

    sizes: list[int]
    """Bytes of each of its chunks."""

    weight: tuple[str, bytes] | None
    """Element type and digest of the chunk of a weight that it was perhaps rounded to."""


class StoredChunk(msgspec.Struct, array_like=True, frozen=True):
    """A chunk that was encoded."""

    digest: bytes
    """Digest of its raw bytes."""

    codec: str
    """Its codec; empty if it is stored raw."""

    start: int
    stop: int
    """Where its stored form lies in the memory."""

    nonfinite: int
    """NaN and infinite elements in it; 0 if they are not counted."""


class UnitReply(msgspec.Struct, array_like=True, frozen=True):
    """What became of a unit."""

    slot: int
    """Where it lies."""

    chunks: list[StoredChunk] | None
    """Its chunks; None: it was taken back, or could not be encoded."""

    seconds: float
    """Processor seconds that it took."""

    elapsed_seconds: float
    """Seconds that passed meanwhile."""


class SlotMemory:
    """Memory of two processes. A slot has room for the raw chunks of a unit, and behind it for their stored forms.

    Behind the slots, a byte of each says whether its unit was taken back.
    """

    def __init__(self, descriptor: int, slots: int, chunk_bytes: int) -> None:
        """Map the memory of a descriptor.

        Args:
            descriptor: An open file of `slots` slots.
            slots: How many there are.
            chunk_bytes: Raw bytes of a chunk at most.
        """
        self.descriptor = descriptor
        """Maps the memory in another process. Whoever opened it closes it."""
        self.raw_bytes_max = PAIR_RATIO * chunk_bytes
        """Raw bytes of a unit at most."""
        self._bytes = memoryview(mmap.mmap(descriptor, 0))
        self._taken_back = len(self._bytes) - slots

    @classmethod
    def new(cls, slots: int, chunk_bytes: int) -> SlotMemory:
        """Return new memory.

        Raises:
            OSError: There is none.
        """
        descriptor = os.memfd_create("holdfast-encode")
        try:
            # Not `ftruncate`: a page that is not there when it is first touched would kill the process.
            os.posix_fallocate(descriptor, 0, slots * (2 * PAIR_RATIO * chunk_bytes + 1))
            return cls(descriptor, slots, chunk_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    def raw(self, slot: int, sizes: Sequence[int]) -> list[memoryview]:
        """Return the room of raw chunks."""
        at, rooms = slot * 2 * self.raw_bytes_max, []
        for size in sizes:
            rooms.append(self._bytes[at : at + size])
            at += size
        return rooms

    def stored_room(self, slot: int) -> tuple[int, memoryview]:
        """Return where the room for stored forms begins, and the room."""
        start = (slot * 2 + 1) * self.raw_bytes_max
        return start, self._bytes[start : start + self.raw_bytes_max]

    def is_taken_back(self, slot: int) -> bool:
        """Return whether the unit of a slot was taken back."""
        return self._bytes[self._taken_back + slot] == 1

    def note_taken_back(self, slot: int, is_so: bool) -> None:
        """Say whether it was. The helper perhaps encodes it all the same: it has begun."""
        self._bytes[self._taken_back + slot] = int(is_so)

    def stored(self, chunk: StoredChunk) -> memoryview:
        """Return the stored form of a chunk."""
        return self._bytes[chunk.start : chunk.stop]
