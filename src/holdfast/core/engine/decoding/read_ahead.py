"""Reads pieces front to back, and asks a store that caches nothing for more than is needed at the moment."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.base.ports.packs import Stored
from holdfast.base.ports.ranges import read_range
from holdfast.base.types.plan import Piece
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.settings import MIB

_AHEAD_BYTES_MAX = 32 * MIB
"""Most bytes of a piece that are asked for together where nothing is cached: the store reads them side by side."""

_AHEAD_BYTES_MIN = MIB
"""Bytes that are asked for at least there: small pieces are neighbours, and each request takes its time."""


class ReadAhead:
    """Reads for one thread. It keeps what it has asked for too early."""

    def __init__(self, pack_bytes: Mapping[str, int]) -> None:
        """Read nothing yet.

        Args:
            pack_bytes: Size of each pack, by name.
        """
        self._pack_bytes = pack_bytes
        self._ahead: tuple[str, int, memoryview] | None = None
        """Name of a pack, and bytes of it from a place on, where a store caches nothing."""

    def read(self, stored: Stored, piece: Piece, start: int, stop: int, buffer: memoryview) -> memoryview:
        """Return bytes `[start, stop)` of the pack of a piece; the buffer takes them, and a page more."""
        if stored.files.traits.read_alignment > 1:  # A file: the system reads ahead.
            return read_range(stored.files, stored.key, start, stop, buffer)
        if self._ahead is not None:
            pack, first, held = self._ahead
            if pack == piece.pack and first <= start and stop <= first + len(held):
                return held[start - first : stop - first]
        end = min(max(piece.offset + piece.stored_bytes, start + _AHEAD_BYTES_MIN), start + _AHEAD_BYTES_MAX)
        self._ahead = None  # Its memory is not needed beside that of the next.
        end = max(min(end, self._pack_bytes[piece.pack]), stop)
        memory = allocate_aligned(end - start)
        self._ahead = piece.pack, start, read_range(stored.files, stored.key, start, end, memory)
        return self._ahead[2][: stop - start]
