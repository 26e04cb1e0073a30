"""The near tier and the root of one run, as one store: how epochs, loads and lists see the run.

Both are whole roots: a step has the same keys and bytes wherever the step lies. So a read looks near first, and a list
joins both. A write goes to the root first, and then near: a writer that dies in between has decided nothing that the
near tier alone knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, StoreEntry
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Fence
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, run_fields_of_manifest
from holdfast.core.format.names import (
    MANIFEST_FILE,
    SUPERSEDED_FOLDER,
    manifest_key,
    step_of_folder,
    superseded_in,
    superseded_key,
)
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.stored.repository.catalog import step_folders
from holdfast.stored.repository.epochs import current_fence
from holdfast.stored.repository.publish import get_or_none, holds
from holdfast.stored.repository.tags import TAGS_FOLDER
from holdfast.stored.repository.timeline_records import TIMELINES_FOLDER

_Result = TypeVar("_Result")

_OF_ROOT = TAGS_FOLDER, TIMELINES_FOLDER
"""What is read from the root alone: a near tier that was away has some that were removed since."""


class TwoRoots(Store):
    """Both places of a run. Steps are saved into one of the two, never through this store."""

    def __init__(self, near: Store, root: Store) -> None:
        """Do no I/O."""
        self.near, self.root = near, root
        self.url = root.url
        self.traits = replace(root.traits, maps_files=False)
        self.read_bytes = near.read_bytes

    def holding(self, key: str, data: bytes) -> Sequence[tuple[int, str]]:
        """Return the places that hold a manifest, near tier (0) and root (1), each with the key there.

        A manifest that one place has moved to `superseded/` may be in the folder of its step in the other.
        """
        keys = dict.fromkeys((key, manifest_key(moved[0]) if (moved := superseded_in(key)) else key))
        found = (next((each for each in keys if holds(store, each, data)), None) for store in (self.near, self.root))
        return [(number, each) for number, each in enumerate(found) if each is not None]

    # ------------------------------------------------------------------------------------------------- reads

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return self._first(key, lambda store: store.size(key))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole. Of two manifests of one step, the one that is the step."""
        step, moved = _step_of_manifest(key), superseded_in(key)
        if step is not None and (found := self._manifests_of(step)):
            return found[0]
        try:
            return self._first(key, lambda store: store.get(key, bytes_max))
        except MissingError:
            for data in self._manifests_of(moved[0])[1:] if moved is not None else ():
                if _moved_key(data) == key:
                    return data
            raise

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object."""
        self._first(key, lambda store: store.read_into(key, ranges, buffers, on_range))

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read what is in memory already."""
        return self._first(key, lambda store: store.get_cached(key, start, buffers, on_bytes))

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders under a prefix, in either place."""
        return sorted({*self.near.folders(prefix), *self.root.folders(prefix)})

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix, in either place, in the order of the keys."""
        places = (self.root,) if prefix in _OF_ROOT else (self.root, self.near)
        both = (store.list(prefix, after=after, up_to=up_to) for store in places)
        entries = {entry.key: entry for entry in chain.from_iterable(both)}
        if prefix == SUPERSEDED_FOLDER:
            # One place has saved the step again, and the other does not know.
            for step in {*step_folders(self.near)} & {*step_folders(self.root)}:
                for data in self._manifests_of(step)[1:]:
                    if key := _moved_key(data):
                        entries.setdefault(key, StoreEntry(key, len(data)))
        yield from (entries[key] for key in sorted(entries))

    def identity(self, key: str) -> str:
        """Return a text that the keys of one object share."""
        return self._first(key, lambda store: store.identity(key))

    # ------------------------------------------------------------------------------------------------ writes

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole in both places."""
        self.root.put(key, data, durable=durable)
        self.near.put(key, data, durable=durable)

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object whole in both places, unless either has another one there. The root decides."""
        is_of_root = key.startswith(_OF_ROOT)
        for store in (self.root,) if is_of_root else (self.root, self.near):
            try:
                store.put_if_absent(key, data, folders_durable=folders_durable)
            except ConflictError:
                if not holds(store, key, data):
                    raise
        if is_of_root:
            self.near.put(key, data)

    def replace(self, key: str, data: bytes, seen: bytes | None, *, durable: bool = True) -> None:
        """Store a small object whole in both places, in place of one that the root has."""
        self.root.replace(key, data, seen, durable=durable)
        self.near.put(key, data, durable=durable)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects from both places."""
        listed = tuple(keys)
        self.root.delete(listed)
        self.near.delete(listed)

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key, wherever it is."""
        moved = [store for store in (self.root, self.near) if self._moves(store, key, new_key)]
        if not moved:
            raise MissingError(f"{self.url}/{key}: no such object, neither near nor in the root")

    def sync(self, prefix: str) -> None:
        """Make durable the names in a folder, in both places."""
        self.root.sync(prefix)
        self.near.sync(prefix)

    def for_operation(self, name: str, rank: int, world_size: int) -> Store:
        """Return both places as one save or load sees them."""
        return TwoRoots(*(store.for_operation(name, rank, world_size) for store in (self.near, self.root)))

    # ------------------------------------------------------------------------------------------------ inside

    def _first(self, key: str, call: Callable[[Store], _Result]) -> _Result:
        """Return what the first place answers that has the object. Only the root's records decide."""
        if key.startswith(_OF_ROOT):
            return call(self.root)
        order = (self.near, self.root) if _is_of_step(key) else (self.root, self.near)
        try:
            return call(order[0])
        except MissingError as missing:
            try:
                return call(order[1])
            except MissingError:
                raise missing from None

    def _manifests_of(self, step: int) -> Sequence[bytes]:
        """Return the different manifests in the folders of a step; first the one that is the step."""
        key, found = manifest_key(step), dict[bytes, None]()
        for store in (self.near, self.root):
            with suppress(CorruptError):  # Too large for a manifest.
                data = get_or_none(store, key, MANIFEST_BYTES_MAX)
                found |= {} if data is None else {data: None}
        if len(found) < 2:
            return [*found]
        fence = current_fence(self)
        return sorted(found, key=lambda data: _rank(data, fence), reverse=True)

    def _moves(self, store: Store, key: str, new_key: str) -> bool:
        with suppress(MissingError):
            store.move(key, new_key)
            return True
        return False


def places_of(run: Store) -> tuple[Store, ...]:
    """Return the places of a run; the root first."""
    return (run.root, run.near) if isinstance(run, TwoRoots) else (run,)


def _rank(data: bytes, fence: Fence) -> tuple[bool, int, str]:
    """Return the rank of a manifest: a whole one that counts, of the newest epoch, of the greatest digest."""
    try:
        fields = run_fields_of_manifest(data, "")
    except (CorruptError, InvalidError):
        return False, -1, ""
    counts = fields.step is not None and fence.admits(fields.step, fields.epoch, fields.digest)
    return counts, fields.epoch, fields.digest


def _moved_key(data: bytes) -> str | None:
    """Return the key that a manifest gets under `superseded/`; None if it cannot be read."""
    with suppress(CorruptError, InvalidError):
        fields = run_fields_of_manifest(data, "")
        return None if fields.step is None else superseded_key(fields.step, fields.digest)
    return None


def _is_of_step(key: str) -> bool:
    return step_of_folder(key.partition("/")[0]) is not None


def _step_of_manifest(key: str) -> int | None:
    folder, _, name = key.partition("/")
    return step_of_folder(folder) if name == MANIFEST_FILE else None
