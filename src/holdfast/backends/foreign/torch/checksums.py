"""Lists the CRC-32s that archives of `torch.save` hold of their entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.backends.foreign.torch.zip_reader import zip_entries
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import StoredChecksum


class ArchiveChecksums:
    """The checksums of several archives, read from their directories at each iteration."""

    def __init__(self, files: Readable, archives: Mapping[str, Sequence[int]]) -> None:
        """Read nothing yet.

        Args:
            files: The checkpoint.
            archives: By file: the first byte and the byte past the end of each archive, one after the other.
        """
        self._files, self._archives = files, archives

    def __iter__(self) -> Iterator[StoredChecksum]:
        for key, bounds in self._archives.items():
            for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
                for entry in zip_entries(self._files, key, start, stop).values():
                    # torch.save stores 0 if it computes none: `set_crc32_options(False)`, `skip_data`.
                    if entry.checksum:
                        yield StoredChecksum(key, entry.name, entry.offset, entry.offset + entry.bytes, entry.checksum)
