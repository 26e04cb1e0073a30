"""Compares byte ranges of another system's files with the CRC-32s that the files hold of them."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterator

from holdfast.base.ports.ranges import read_range
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ForeignListing, StoredChecksum
from holdfast.core.engine.buffers import BufferPool
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.errors import CheckpointError, first_three
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.stored.checkpoint.verify import Damage

_READ_BYTES = 4 * MIB


class ChecksumComparison:
    """Reads every range that has a checksum, with several reads in flight, and counts them."""

    def __init__(self, listing: ForeignListing, files: Readable, settings: Settings) -> None:
        """Read nothing yet.

        Args:
            listing: The checkpoint's.
            files: The checkpoint's files.
            settings: Reads in flight.
        """
        self._listing, self._files, self._settings = listing, files, settings
        self._places: list[tuple[str, int, str]] = []
        self.ranges = 0
        """Ranges that were compared so far."""
        self.bytes = 0
        """Bytes of them."""

    def outcomes(self) -> Iterator[tuple[int, Damage | None]]:
        """Yield for each range its bytes, and its damage if any.

        Raises:
            CheckpointError: The checksums cannot be read.
        """
        buffers = BufferPool(self._settings._tuning.windows_in_flight, _READ_BYTES + PAGE_BYTES)

        def crc_of(stored: StoredChecksum) -> tuple[StoredChecksum, int | CheckpointError]:
            crc = 0
            with buffers.lent() as buffer:
                try:
                    for start in range(stored.start, stored.stop, _READ_BYTES):
                        stop = min(start + _READ_BYTES, stored.stop)
                        crc = zlib.crc32(read_range(self._files, stored.file, start, stop, buffer), crc)
                except CheckpointError as error:
                    return stored, error
            return stored, crc

        for stored, crc in ordered_parallel_map(crc_of, self._listing.checksums):
            count = stored.stop - stored.start
            self.ranges += 1
            self.bytes += count
            yield count, None if crc == stored.crc else self._damage(stored, crc)

    def _damage(self, stored: StoredChecksum, crc: int | CheckpointError) -> Damage:
        names = sorted(self._tensors_in(stored))
        text = str(crc)
        if isinstance(crc, int):
            text = f"entry {stored.name[:200]!r} has CRC-32 {crc:08x}; expected {stored.crc:08x}, as the file states"
        if len(names) > 1:
            text += f"; the range holds {first_three(names)}"
        return Damage(stored.file, stored.start, stored.stop, names[0] if len(names) == 1 else None, text)

    def _tensors_in(self, stored: StoredChecksum) -> set[str]:
        """Return the tensors with a piece that begins in a range."""
        if not self._places:
            listed = self._listing.pieces.items()
            self._places = sorted((piece.file, piece.offset, fqn) for fqn, pieces in listed for piece in pieces)
        first, last = (bisect_left(self._places, (stored.file, at, "")) for at in (stored.start, stored.stop))
        return {fqn for _, _, fqn in self._places[first:last]}
