"""A store in the memory of this process that behaves like an object store."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from holdfast.base.interrupts import GUARD
from holdfast.base.ports.keys import Split, is_key, is_listed, split_key, split_name, split_prefix
from holdfast.base.ports.parts import CollectedUpload, PartLedger
from holdfast.base.ports.ranges import check_buffers
from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, StoreEntry, StoreTraits
from holdfast.base.ports.store import Store
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError

_numbers = count()


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A complete object."""

    data: memoryview
    """Its bytes."""
    number: int = field(default_factory=_numbers.__next__)
    """No other object has it, before or after."""


_contents: dict[str, dict[str, _Kept]] = {}
"""By name, the complete objects of the stores of that name, by key. Read and changed under GUARD."""


class MemoryStore(Store):
    """Keys to bytes in memory: for tests, and for checkpoints that need not outlive the process.

    Stores of one name in one process share their content, which lives until the process ends.
    """

    def __init__(self, name: str, *, object_bytes_max: int | None = None) -> None:
        """Open the content called `name`; it is empty at the first use.

        Args:
            name: Of the content.
            object_bytes_max: Largest object that `upload` takes, as object stores have a limit. None: no limit, as in a
                file system.
        """
        self.url = f"memory://{name}"
        is_limited = object_bytes_max is not None
        self.traits = StoreTraits(
            object_bytes_max=object_bytes_max, appears_whole=is_limited, failed_calls_are_over=True
        )
        self._split: Split = split_key
        with GUARD:
            self._objects = _contents.setdefault(name, {})

    def with_any_names(self) -> MemoryStore:
        """Return the same content for keys of any printable characters."""
        view = copy.copy(self)
        view._split = split_name
        return view

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store an object whole, replacing what was there."""
        self._split(key)
        with GUARD:
            self._objects[key] = _Kept(memoryview(bytes(data)))

    def replace(self, key: str, data: bytes, seen: bytes | None, *, durable: bool = True) -> None:
        """Store a small object whole in place of one that the caller has read."""
        self._split(key)
        with GUARD:
            held = self._objects.get(key)
            if (None if held is None else held.data) not in (seen, data):
                raise self._conflict(key)
            self._objects[key] = _Kept(memoryview(bytes(data)))

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store an object whole unless the key exists."""
        self.keep(key, memoryview(bytes(data)))

    def keep(self, key: str, data: memoryview) -> None:
        """Store memory as an object, without a copy, unless the key exists."""
        self._split(key)
        with GUARD:
            if key in self._objects:
                raise self._conflict(key)
            self._objects[key] = _Kept(data)

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> CollectedUpload:
        """Begin an object that must not exist yet; it is invisible until complete."""
        self._split(key)
        ledger = PartLedger(f"{self.url}/{key}", bytes_max=bytes_max, part_bytes=part_bytes)
        largest = self.traits.object_bytes_max
        if largest is not None and bytes_max > largest:
            raise InvalidError(f"{self.url}/{key}: an object of up to {bytes_max} bytes; expected at most {largest}")
        with GUARD:
            if key in self._objects:
                raise self._conflict(key)
        return CollectedUpload(ledger, partial(self.keep, key))

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return len(self._object(key))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        data = self._object(key)
        if len(data) > bytes_max:
            raise CorruptError(f"{self.url}/{key}: {len(data)} bytes; expected at most {bytes_max}. Read another copy")
        return bytes(data)

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object, each into a buffer of its length; `on_range` gets the object's memory."""
        data = self._object(key)
        self.hand_out(key, len(data), ranges, buffers, on_range, lambda start, stop: data[start:stop])

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Return 0: an object store caches nothing, and this store behaves like one."""
        check_buffers(f"{self.url}/{key}", len(self._object(key)), start, buffers)
        return 0

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every complete object under a prefix, in the order of the keys."""
        split_prefix(prefix, self._split)
        with GUARD:
            sizes = {key: len(kept.data) for key, kept in self._objects.items() if key.startswith(prefix)}
        sizes = {key: size for key, size in sizes.items() if is_key(key, self._split)}
        return (StoreEntry(key, sizes[key]) for key in sorted(sizes) if is_listed(key, after, up_to))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent keys are no error."""
        for key in keys:
            self._split(key)
            with GUARD:
                self._objects.pop(key, None)

    def link(self, key: str, new_key: str) -> bool:
        """Give an object one more key."""
        kept = self._kept(key)
        self._split(new_key)
        with GUARD:
            if self._objects.setdefault(new_key, kept) is not kept:
                raise self._conflict(new_key)
        return True

    def identity(self, key: str) -> str:
        """Return a text that the keys of one object share."""
        return str(self._kept(key).number)

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key."""
        self._split(key)
        self._split(new_key)
        with GUARD:
            if key not in self._objects:
                raise self._missing(key)
            self._objects[new_key] = self._objects.pop(key)

    def _object(self, key: str) -> memoryview:
        return self._kept(key).data

    def _kept(self, key: str) -> _Kept:
        self._split(key)
        with GUARD:
            kept = self._objects.get(key)
        if kept is None:
            raise self._missing(key)
        return kept

    def _missing(self, key: str) -> MissingError:
        return MissingError(f"{self.url}/{key}: no such object")

    def _conflict(self, key: str) -> ConflictError:
        return ConflictError(f"{self.url}/{key}: another writer stored it; it was not touched")
