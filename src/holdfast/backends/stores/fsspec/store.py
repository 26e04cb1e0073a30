"""A store in a folder of any file system that fsspec knows."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from holdfast.backends.stores.folders import TEMPORARY_PREFIX
from holdfast.backends.stores.fsspec import placing
from holdfast.backends.stores.fsspec.abilities import Abilities, abilities, known_abilities
from holdfast.backends.stores.fsspec.address import file_system_address
from holdfast.backends.stores.fsspec.files import FileSystem, look, remove_file
from holdfast.backends.stores.fsspec.folders import sweep
from holdfast.backends.stores.fsspec.reading import FileSystemReading
from holdfast.backends.stores.remote.memory import BytesInFlight, ObjectUpload
from holdfast.backends.stores.remote.probe import takes_both
from holdfast.base.clock import Clock, SystemClock
from holdfast.base.ports.parts import PartLedger
from holdfast.base.ports.readable import StoreTraits
from holdfast.base.ports.store import Store
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError
from holdfast.settings import Settings

_OBJECT_BYTES_MAX = 5 << 30
"""Largest object: an upload has its object in memory."""

REQUESTS_IN_FLIGHT_MAX = 8
"""Most calls that move packs or ranges at a time, and most others. Each may have a connection of its own, of which
servers such as sshd take few."""

_HIDDEN_BYTES = 12


class FileSystemStore(FileSystemReading, Store):
    """Keys to files beneath a folder of a file system.

    An object appears whole or not at all: it is stored at once, or written under a hidden name and then linked or
    renamed (`placing.py`). Before the first create the file system is tried (`abilities.py`). Durable is what the file
    system makes durable when a file is closed: fsspec can ask for no more.

    A process that is killed leaves hidden files. `delete` removes those in the folders of its keys, and folders that it
    leaves without objects.
    """

    def __init__(self, url: str, *, settings: Settings, clock: Clock | None = None) -> None:
        """Remember where; does no I/O.

        Args:
            url: Protocol, host and folder.
            settings: Time limits, the memory for uploads, and whether one writer is promised.
            clock: Source of random names.
        Raises:
            InvalidError: It is no such URL, has credentials, or fsspec is not installed.
        """
        super().__init__(file_system_address(url), settings)
        self.traits = StoreTraits(object_bytes_max=_OBJECT_BYTES_MAX, appears_whole=True)
        self._in_flight = BytesInFlight(settings.object_store.bytes_in_flight_max)
        self._clock = clock or SystemClock()
        self._is_alone = settings.object_store.single_writer

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one."""
        path, hidden = self._paths(key)
        # Not worth a trial: a process that only reads stores a lease and a report.
        known = known_abilities(self.url)
        is_at_once = known is not None and known.replaces_at_once
        self.systems.use(
            "store",
            self.where(key),
            lambda system: placing.replace(system, path, memoryview(data), hidden, is_at_once=is_at_once),
            writes=True,
        )

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object whole unless the key exists; atomic.

        An object of the same content counts as this one: the reply to an earlier try may have been lost.

        Raises:
            ConflictError: The key exists with other content; it was not touched.
            UnavailableError: It failed, and may take effect later.
        """
        self.create(key, memoryview(data))

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> ObjectUpload:
        """Begin an object that must not exist yet; it is invisible until complete, and uses memory of its size."""
        self._split(key)
        where = self.where(key)
        ledger = PartLedger(where, bytes_max=bytes_max, part_bytes=part_bytes)
        if bytes_max > _OBJECT_BYTES_MAX:
            raise InvalidError(
                f"{where}: an object of {bytes_max} bytes; {self.address.protocol}:// takes at most "
                f"{_OBJECT_BYTES_MAX}, which is collected in memory. Save from more ranks, so that each one writes "
                "less"
            )
        return ObjectUpload(ledger, self._in_flight, lambda memory: self._create_in_time(key, memory))

    def _create_in_time(self, key: str, data: memoryview) -> None:
        self.systems.in_time(self.where(key), data.nbytes, lambda: self.create(key, data))

    def create(self, key: str, data: memoryview) -> None:
        """Store an object unless its key exists; an object of the same content counts as this one.

        Raises:
            ConflictError: The key exists with other content.
            InvalidError: The file system lets two writers create one object.
            UnavailableError: It failed, and may take effect later.
        """
        path, hidden = self._paths(key)
        way = self._abilities().way
        is_stored = self.systems.use(
            "store", self.where(key), lambda system: placing.create(system, way, path, data, hidden), writes=True
        )
        if is_stored:
            return
        conflict = ConflictError(f"{self.where(key)}: another writer stored it; it was not touched")
        try:
            if self.holds(key, data):
                return
        except MissingError:
            raise TemporaryError(
                f"could not store {self.where(key)}: the server says that it exists, and has no such object",
                may_take_effect=True,
            ) from conflict
        raise conflict

    def _abilities(self) -> Abilities:
        """Return what the file system can do.

        Raises:
            InvalidError: It lets two writers create one object, and nobody has promised that there is one.
        """
        found = abilities(self.url, self.systems, self._clock)
        if not found.is_exclusive and not self._is_alone:
            raise takes_both(self.url, "can create a file on condition that it does not exist")
        return found

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent keys are no error. Then sweep their folders."""
        touched: dict[tuple[str, ...], None] = {}
        for key in keys:
            parts = self._split(key)
            touched[parts[:-1]] = None
            path = self.systems.path(key)
            self.systems.use("delete", self.where(key), lambda system, path=path: remove_file(system, path))  # type: ignore[misc]
        if not touched:
            return
        removes_folders = False
        # The trial writes, which may fail where a deletion is to make room. Then empty folders stay.
        with suppress(CheckpointError):
            removes_folders = abilities(self.url, self.systems, self._clock).spares_full_folders
        for parts in sorted(touched, key=len, reverse=True):
            sweep(self.systems, self.where, parts, removes_folders=removes_folders)

    def identity(self, key: str) -> str:
        """Return a text that no other key shares: an object has one key."""
        self._split(key)
        path = self.systems.path(key)

        def ask(system: FileSystem) -> str:
            found = look(system, path)
            if found is None or found.is_folder:
                raise FileNotFoundError
            return f"{path} {found.marks}"

        return self.systems.use("look at", self.where(key), ask)

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key: rename it, or copy it and delete the original if it is still the same."""
        self._split(key)
        self._split(new_key)
        path, new_path = self.systems.path(key), self.systems.path(new_key)
        replaces = self._abilities().replaces_at_once
        self.systems.use(
            "move", self.where(key), lambda system: placing.move(system, path, new_path, replaces=replaces)
        )

    def require_replacing_moves(self) -> None:
        """Require that `move` replaces at once what is at the new key.

        Raises:
            InvalidError: A rename here is refused, or begins with a removal, if something is at the new name.
        """
        if not self._abilities().replaces_at_once:
            raise InvalidError(
                f"{self.url}: this file system cannot replace a file at once, so a crash could leave neither the old "
                "nor the new checkpoint; expected overwrite=False. Save to another path, or delete the old checkpoint "
                "first"
            )

    def _paths(self, key: str) -> tuple[str, str]:
        """Return the path of an object, and a hidden one beside it that nobody else uses."""
        parts = self._split(key)
        name = TEMPORARY_PREFIX + self._clock.random_bytes(_HIDDEN_BYTES).hex()
        return self.systems.path(key), self.systems.path("/".join((*parts[:-1], name)))
