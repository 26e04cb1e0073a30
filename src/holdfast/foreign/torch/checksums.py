"""Lists the CRC-32s that archives of `torch.save` hold of their entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.foreign.torch.zip_reader import zip_entries
from holdfast.ports.store import Readable
from holdfast.types.listing import StoredChecksum


class ArchiveChecksums:
    """The checksums of several archives, read from their directories at each iteration."""

    def __init__(self, files: Readable, archives: Sequence[tuple[str, int, int]]) -> None:
        """Read nothing yet.

        Args:
            files: The checkpoint.
            archives: File, first byte and byte past the end of each archive.
        """
        self._files, self._archives = files, archives

    def __iter__(self) -> Iterator[StoredChecksum]:
        for key, start, stop in self._archives:
            for entry in zip_entries(self._files, key, start, stop).values():
                # torch.save stores 0 if it computes none: `set_crc32_options(False)`, `skip_data`.
                if entry.checksum:
                    yield StoredChecksum(key, entry.name, entry.offset, entry.offset + entry.bytes, entry.checksum)
