"""The abilities of one file system, probed once in a folder that decides nothing.

fsspec does not document guarantees per file system, so we probe them: whether two writers can create one name, whether
a rename replaces a file, whether the removal of a folder spares the files inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from holdfast.backends.stores.fsspec import placing
from holdfast.backends.stores.fsspec.file_systems import FileSystems
from holdfast.backends.stores.fsspec.files import (
    FileSystem,
    look,
    read_whole,
    remove_file,
    renames,
    store_whole,
    stores_whole,
    write_file,
)
from holdfast.backends.stores.fsspec.placing import Way, refuses_aloud, ways_of
from holdfast.backends.stores.remote.probe import probe_key, refuses_a_second_create
from holdfast.base.clock import Clock
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError, ConflictError

_Result = TypeVar("_Result")

_TWO_STEPS = ("fsspec.implementations.arrow",)
"""Modules of file systems (pyarrow) whose rename first removes the old file: for a moment there is no file."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The probed abilities of a file system."""

    way: Way
    """The way to store a file unless the name is taken."""

    replaces_at_once: bool
    """Whether a move replaces a file at once."""

    spares_full_folders: bool
    """Whether the removal of a folder removes empty folders only."""

    @property
    def is_exclusive(self) -> bool:
        """Whether exactly one of two writers that create one file succeeds."""
        return self.way is not Way.LOOK


_known: dict[str, Abilities] = {}
"""Abilities by URL that this process has probed."""

_TRIAL_SECONDS = 30.0
"""How long a thread waits for the trial of another thread, before a trial of its own."""


def abilities(url: str, systems: FileSystems, clock: Clock) -> Abilities:
    """Return the abilities of the file system of a store; probe the file system once in this process.

    Raises:
        CheckpointError: No file can be written there, or the server does not answer.
    """
    found = known_abilities(url)
    if found is not None:
        return found
    lock = systems.trial
    is_held = lock.acquire(timeout=_TRIAL_SECONDS)
    try:
        found = known_abilities(url)
        if found is None:
            found = _known[url] = _Trial(url, systems, probe_key(clock)).abilities()
        return found
    finally:
        if is_held:
            lock.release()


def known_abilities(url: str) -> Abilities | None:
    """Return the abilities of the file system of a store; None if this process has not probed the file system."""
    return _known.get(url)


class _Trial:
    """One trial: its files, and the abilities that the files show."""

    def __init__(self, url: str, systems: FileSystems, folder: str) -> None:
        self.url = url
        self._systems, self._folder = systems, folder
        self._way = Way.LOOK
        self._made: set[str] = set()

    def abilities(self) -> Abilities:
        spares = False
        try:
            # First in the plainest way: a failure here is not a question of ways.
            self._ask(lambda system: self._require_stored(system, "plain"))
            way = next((way for way in self._ask(ways_of) if self._is_exclusive(way)), Way.LOOK)
            if way is Way.QUIET_RENAME and self._ask(self._refuses_aloud):
                way = Way.RENAME
            replaces = self._ask(self._replaces_at_once)
            spares = self._ask(self._spares_full_folders)
            return Abilities(way, replaces, spares)
        finally:
            with suppress(CheckpointError):
                self._ask(lambda system: self._clean_up(system, spares))

    def _ask(self, call: Callable[[FileSystem], _Result]) -> _Result:
        return self._systems.use("write to", f"{self.url}/{self._folder}", call, writes=True)

    def _path(self, name: str) -> str:
        path = self._systems.path(f"{self._folder}/{name}")
        self._made.add(path)
        return path

    def _require_stored(self, system: FileSystem, name: str) -> None:
        path = self._path(name)
        (store_whole if stores_whole(system) else write_file)(system, path, memoryview(b"first"))
        if read_whole(system, path) != b"first":
            raise OSError("a stored file cannot be read back")

    def _is_exclusive(self, way: Way) -> bool:
        self._way = way
        name = f"by-{way.name.lower()}"
        try:
            if not refuses_a_second_create(self, name):
                return False
        except TemporaryError:
            raise
        except CheckpointError:
            return False  # The file system does not know this way.
        path = self._path(name)
        return bool(self._ask(lambda system: read_whole(system, path)) == b"first")

    def create(self, key: str, data: memoryview) -> None:
        path, hidden = self._path(key), self._path(f".tmp-{key}")
        way = self._way
        if not self._ask(lambda system: placing.create(system, way, path, data, hidden)):
            raise ConflictError(f"{path} exists")

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            self._ask(lambda system, path=path: remove_file(system, path))  # type: ignore[misc]

    def _refuses_aloud(self, system: FileSystem) -> bool:
        return refuses_aloud(system, self._path("plain"), self._path("hidden"))

    def _replaces_at_once(self, system: FileSystem) -> bool:
        if not renames(system):
            return stores_whole(system)
        if type(system).__module__ in _TWO_STEPS:
            return False
        old, new = self._path("old"), self._path("new")
        write_file(system, old, memoryview(b"old"))
        write_file(system, new, memoryview(b"new"))
        with suppress(Exception):
            system.mv(new, old)
        return look(system, new) is None and read_whole(system, old) == b"new"

    def _spares_full_folders(self, system: FileSystem) -> bool:
        path = self._path("plain")
        with suppress(Exception):
            system.rmdir(self._systems.path(self._folder))
        return look(system, path) is not None

    def _clean_up(self, system: FileSystem, spares: bool) -> None:
        for path in sorted(self._made):
            remove_file(system, path)
        folder = self._folder
        while spares and folder:
            # The trial may have created the folder above, too.
            with suppress(Exception):
                system.rmdir(self._systems.path(folder))
            folder = folder.rpartition("/")[0]
