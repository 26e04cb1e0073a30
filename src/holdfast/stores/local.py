"""A store in a folder of a POSIX file system."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from holdfast.clock import Clock, SystemClock
from holdfast.errors import ConflictError, InvalidError, MissingError, UnavailableError
from holdfast.ports.store import Entry
from holdfast.settings import MIB, Settings
from holdfast.stores.file_reading import FileReading
from holdfast.stores.folders import TEMPORARY_PREFIX, TRIES, Folders
from holdfast.stores.keys import is_part, split_key, split_prefix
from holdfast.stores.local_upload import LocalUpload
from holdfast.stores.oserrors import translated
from holdfast.stores.parts import PartLedger
from holdfast.stores.syscalls import Syscalls, close_quietly

_log = logging.getLogger(__name__)

_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
# O_NONBLOCK: a FIFO put in place of an object must not hold the reader; it changes nothing for regular files.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_WRITE_BYTES_MAX = 64 * MIB
"""Bytes of one write, far below what the system would cut short."""

_Result = TypeVar("_Result")


class LocalStore(FileReading):
    """Keys to files beneath a root folder.

    Files are created exclusively and links below the root never followed; the root itself may be a link. What a
    call stored is durable when it returns: the file, and every folder entry that leads to it. Using the store only
    for reading creates nothing, not even the root.

    An upload writes at its final name from the start, so a listing shows it before it is complete, and still does
    after its process died: whoever cleans up must be able to see it. Nothing may trust an object that no manifest
    names. Objects stored by `put` and `put_if_absent` appear whole or not at all.

    `delete` also removes the folders it leaves without any object, together with the temporary files that dead
    processes left in them.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        settings: Settings,
        syscalls: Syscalls | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Remember where; touches nothing.

        Args:
            root: The folder; made with its parents at the first write.
            settings: `file_mode` counts, lessened by the process's umask as for every file.
            syscalls: The operating system; tests pass another.
            clock: Where random names come from.
        """
        self._root = os.path.abspath(os.fspath(root))
        self._mode = settings.file_mode
        self._syscalls = syscalls or Syscalls()
        self._clock = clock or SystemClock()
        self._folders = Folders(self._root, self._syscalls, settings.file_mode)

    @property
    def url(self) -> str:
        """Return `file://` and the absolute path of the root."""
        return f"file://{self._root}"

    @property
    def failed_calls_are_over(self) -> bool:
        """Return True: every call is carried out before it returns."""
        return True

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing what was there; durable on return unless that is not asked for."""
        self._store_whole(key, data, self._replace, durable=durable)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Store a small object whole unless the key exists; atomic, durable on return.

        Raises:
            ConflictError: The key exists and what it holds is durable; it was not touched.
            UnavailableError: It failed. If that was after the name was given (a folder could not be synced), the
                object is there and whole, but may be lost in a power cut.
        """
        try:
            self._store_whole(key, data, self._give_name)
        except ConflictError:
            self._make_durable(key)
            raise

    def upload(self, key: str, total_bytes: int, part_bytes: int) -> LocalUpload:
        """Begin an object that must not exist yet, and reserve room for it."""
        parts, where = split_key(key), self._where(key)
        ledger = PartLedger(where, total_bytes=total_bytes, part_bytes=part_bytes)

        def begin(folder: int) -> LocalUpload:
            return LocalUpload.begin(
                self._syscalls, self._folders, folder, parts, mode=self._mode, total_bytes=total_bytes,
                ledger=ledger, where=where,
            )  # fmt: skip

        with translated("begin", where, writing=True):
            return self._in_folder(parts[:-1], begin)

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        parts, where = split_key(key), self._where(key)
        with translated("look at", where), self._folders.opened(parts[:-1]) as folder:
            found = self._syscalls.stat(parts[-1], dir_fd=folder)
        _require_regular(found, where)
        return found.st_size

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted."""
        return sorted(name for name, mode, _ in self._entries(split_prefix(prefix)) if stat.S_ISDIR(mode))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield every object under a prefix, uploads not yet complete included.

        What is no regular file or has a name that no key can have is left out.
        """
        return self._walk(split_prefix(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; durable on return, so that what one call removes is gone before what the next one does.

        Folders that are left without any object go too; in these, and in the first folder above that stays, the
        temporary files of dead processes as well.
        A key that is absent still has its folder looked at, so any key of a folder cleans up its leftovers.
        """
        touched: dict[tuple[str, ...], None] = {}
        for key in keys:
            parts, where = split_key(key), self._where(key)
            touched[parts[:-1]] = None
            with translated("delete", where):
                try:
                    with self._folders.opened(parts[:-1]) as folder:
                        self._syscalls.unlink(parts[-1], dir_fd=folder)
                except (FileNotFoundError, IsADirectoryError):
                    continue
        for parts in sorted(touched, key=len, reverse=True):
            with translated("clean up", self._where("/".join(parts))):
                self._folders.sweep(parts)
                self._sync_remaining(parts)

    def _make_durable(self, key: str) -> None:
        """Make an object durable that somebody else stored, and perhaps died before doing so."""
        parts = split_key(key)
        with translated("make durable", self._where(key), writing=True):
            try:
                with self._open_object(key) as (fd, _):
                    self._syscalls.fsync(fd)
            except MissingError:
                return  # Deleted since, or a folder; either way nothing of it is promised.
            self._folders.sync(parts[:-1])

    def _sync_remaining(self, parts: tuple[str, ...]) -> None:
        """Make durable the deepest folder on the way that still exists."""
        for depth in range(len(parts), -1, -1):
            try:
                with self._folders.opened(parts[:depth]) as fd:
                    self._folders.sync_folder(fd)
                return
            except FileNotFoundError:
                continue

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _store_whole(
        self, key: str, data: bytes, publish: Callable[[int, int, str, str], None], *, durable: bool = True
    ) -> None:
        parts, where = split_key(key), self._where(key)

        def store(folder: int) -> None:
            temporary = TEMPORARY_PREFIX + self._clock.random_bytes(12).hex()
            fd = self._syscalls.open(temporary, os.O_WRONLY | _NEW, self._mode, dir_fd=folder)
            try:
                self._write_all(fd, data)
                if durable:
                    self._syscalls.fsync(fd)
                publish(folder, fd, temporary, parts[-1])
            finally:
                self._discard(folder, fd, temporary)

        with translated("store", where, writing=True):
            self._in_folder(parts[:-1], store)
            if durable:
                self._folders.sync(parts[:-1])

    def _in_folder(self, parts: tuple[str, ...], act: Callable[[int], _Result]) -> _Result:
        """Do something in a folder, made if missing, and again when another process removed it meanwhile."""
        for left in range(TRIES - 1, -1, -1):
            try:
                with self._folders.opened(parts, create=True) as folder:
                    return act(folder)
            except FileNotFoundError:
                if not left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _write_all(self, fd: int, data: bytes) -> None:
        view, done = memoryview(data), 0
        while done < len(data):
            done += self._syscalls.pwrite(fd, view[done : done + _WRITE_BYTES_MAX], done)

    def _replace(self, folder: int, fd: int, temporary: str, name: str) -> None:
        try:
            _require_regular(self._syscalls.stat(name, dir_fd=folder), name)
        except (FileNotFoundError, MissingError):
            pass  # Nothing there, or a folder, which the renaming refuses by itself.
        self._syscalls.rename(temporary, name, dir_fd=folder)

    def _give_name(self, folder: int, fd: int, temporary: str, name: str) -> None:
        try:
            self._syscalls.link(temporary, name, dir_fd=folder)
        except FileExistsError:
            # A network file system may repeat a call whose reply was lost, and then meet its own link.
            if not os.path.samestat(self._syscalls.fstat(fd), self._syscalls.stat(name, dir_fd=folder)):
                raise
        except OSError as refusal:
            if refusal.errno not in _NO_LINKS:
                raise
            self._give_name_by_renaming(folder, temporary, name)

    def _give_name_by_renaming(self, folder: int, temporary: str, name: str) -> None:
        try:
            self._syscalls.rename_noreplace(temporary, name, dir_fd=folder)
        except OSError as refusal:
            if refusal.errno not in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
                raise
            raise UnavailableError(
                f"{self.url}: this file system can neither link nor rename without replacing, so nothing can "
                "be published there safely; choose another place"
            ) from refusal

    def _discard(self, folder: int, fd: int, temporary: str) -> None:
        """Close and remove a temporary file. It is hidden, so one that stays harms nobody and never fails a call."""
        try:
            self._syscalls.unlink(temporary, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("left %s behind: %s; deleting its folder's last object removes it", temporary, error)
        close_quietly(self._syscalls, fd)

    @contextmanager
    def _open_object(self, key: str) -> Iterator[tuple[int, int]]:
        """Open a regular file for reading: its descriptor and its real size in bytes."""
        parts = split_key(key)
        with self._folders.opened(parts[:-1]) as folder:
            fd = self._syscalls.open(parts[-1], _READ, dir_fd=folder)
        try:
            found = self._syscalls.fstat(fd)
            _require_regular(found, self._where(key))
            yield fd, found.st_size
        finally:
            close_quietly(self._syscalls, fd)

    def _walk(self, top: tuple[str, ...]) -> Iterator[Entry]:
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            for name, mode, size in self._entries(folder):
                if stat.S_ISDIR(mode):
                    waiting.append((*folder, name))
                elif stat.S_ISREG(mode):
                    yield Entry("/".join((*folder, name)), size)

    def _entries(self, parts: tuple[str, ...]) -> Iterable[tuple[str, int, int]]:
        """Return name, mode and bytes of what lies in a folder under names that a key can have."""
        found: list[tuple[str, int, int]] = []
        with translated("list", self._where("/".join(parts))):
            try:
                with self._folders.opened(parts) as fd:
                    for name in filter(is_part, self._syscalls.listdir(fd)):
                        try:
                            status = self._syscalls.stat(name, dir_fd=fd)
                        except FileNotFoundError:
                            continue  # Deleted while we looked.
                        found.append((name, status.st_mode, status.st_size))
            except FileNotFoundError:
                pass  # A prefix under which nothing lies.
        return found


def _require_regular(found: os.stat_result, where: str) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise MissingError(f"{where}: no such object, but a folder of that name")
    kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
    raise InvalidError(f"{where}: it is {kind}; expected a regular file; remove it")
