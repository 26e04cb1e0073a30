"""Reading files of a file system of fsspec: the half of the store that changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Self

from holdfast.backends.stores.fsspec.address import FileSystemAddress
from holdfast.backends.stores.fsspec.file_systems import FileSystems
from holdfast.backends.stores.fsspec.files import FileSystem, children, look, read_ranges, read_whole
from holdfast.backends.stores.fsspec.folders import is_name, listed, size_of
from holdfast.backends.stores.fsspec.refusals import is_absent
from holdfast.backends.stores.remote.reads import Batch, batches_of, cut, read_by_batches
from holdfast.base.ports.keys import Split, split_key, split_name, split_prefix
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange, Readable, StoreEntry
from holdfast.errors import CorruptError
from holdfast.settings import Settings


class FileSystemReading(Readable):
    """Reads files beneath a folder."""

    def __init__(self, address: FileSystemAddress, settings: Settings) -> None:
        """Remember where; does no I/O."""
        self.address = address
        self.url = address.url
        self.systems = FileSystems(address, settings)
        self._split: Split = split_key

    def with_any_names(self) -> Self:
        """Return the same store, with the same connections and memory, for keys of any printable characters."""
        view = copy.copy(self)
        view._split = split_name
        return view

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        self._split(key)
        return size_of(self.systems, self.where, key)

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole. One that is too large is refused before its content is read."""
        self._split(key)
        where, path = self.where(key), self.systems.path(key)

        def read(system: FileSystem) -> bytes:
            found = look(system, path)
            if found is None:
                raise FileNotFoundError
            if found.is_folder:
                raise IsADirectoryError
            # Read whole, and not up to this size: another writer may put a longer one there in between.
            if found.bytes is None or found.bytes <= bytes_max:
                data = read_whole(system, path)
                if len(data) <= bytes_max:
                    return data
            raise CorruptError(f"{where}: {found.bytes} bytes; expected at most {bytes_max}. Read another copy")

        return self.systems.use("read", where, read)

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object: neighbours together, through memory of the file system."""
        self._split(key)
        where = self.where(key)
        read_by_batches(
            where,
            ranges,
            buffers,
            on_range,
            size=lambda: self._size_in_time(key),
            batch_bytes=lambda batch: self._batch_bytes(key, batch),
        )

    def _size_in_time(self, key: str) -> int:
        """Return the bytes of an object for a read, which nobody gives up from outside."""
        return self.systems.in_time(self.where(key), 0, lambda: self.size(key))

    def _batch_bytes(self, key: str, batch: Batch) -> Sequence[memoryview] | None:
        """Return the bytes of the requests of a batch; None if the object ends before one does."""
        if not batch.requests:
            return []
        requests = batch.requests
        where = f"{self.where(key)} bytes [{requests[0][0]}, {requests[-1][1]})"

        def read(system: FileSystem) -> list[bytes]:
            path = self.systems.path(key)
            try:
                return read_ranges(system, path, requests)
            except Exception as error:
                if is_absent(error):
                    raise
                # Some servers open a folder like a file.
                found = look(system, path)
                if found is None or found.is_folder:
                    raise FileNotFoundError from error
                raise

        total = sum(stop - start for start, stop in requests)
        held = self.systems.use_in_time("read", where, total, read)
        views = [memoryview(each) for each in held]
        if any(view.nbytes != stop - start for view, (start, stop) in zip(views, requests, strict=True)):
            return None
        return views

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted."""
        path = self.systems.path("/".join(split_prefix(prefix, self._split)))
        found = self.systems.use("list", self.where(prefix), lambda system: list(children(system, path)))
        return sorted(each.name for each in found if each.is_folder and is_name(each.name, self._split))

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix whose name a key can have, in order, folder by folder."""
        return listed(self.systems, self.where, split_prefix(prefix, self._split), after, up_to, self._split)

    def holds(self, key: str, data: memoryview) -> bool:
        """Return whether exactly these bytes are stored.

        Raises:
            MissingError: Nothing is stored there.
        """
        if self.size(key) != data.nbytes:
            return False
        for batch in batches_of([(0, data.nbytes)]):
            held = self._batch_bytes(key, batch)
            if held is None:
                return False
            if any(cut(batch, held, piece) != data[piece.start : piece.stop] for piece in batch.pieces):
                return False
        return True

    def where(self, key: str) -> str:
        """Return store and key, for messages."""
        return f"{self.url}/{key}"
