"""A store in a folder of a POSIX file system."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from holdfast.backends.stores.file_reading import FileReading
from holdfast.backends.stores.folders import LAG_PAUSES, TEMPORARY_PREFIX, Folders, not_shown
from holdfast.backends.stores.local_upload import NEW, LocalUpload
from holdfast.backends.stores.oserrors import require_regular, translated
from holdfast.backends.stores.syscalls import UNSUPPORTED, Closing, Syscalls, close_quietly
from holdfast.base.clock import Clock, SystemClock
from holdfast.base.ports.keys import is_listed, is_part, may_lead_to_listed, split_key, split_prefix
from holdfast.base.ports.parts import PartLedger
from holdfast.base.ports.readable import StoreEntry
from holdfast.base.ports.store import Store
from holdfast.errors import ConflictError, MissingError, UnavailableError
from holdfast.settings import MIB, Settings

_log = logging.getLogger(__name__)

# O_NONBLOCK: opening a FIFO in place of an object must not block; for regular files the flag has no effect.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_REFUSED_LINKS = _NO_LINKS | {errno.EXDEV, errno.EACCES, errno.EOPNOTSUPP}
"""Errors of a hard link to an older file: too many links, another mount, a file of another user, no links at all."""
_WRITE_BYTES_MAX = 64 * MIB
"""Bytes of one write, far below the 2 GiB at which the system truncates a write."""

_Result = TypeVar("_Result")

Written = Callable[[int], None]
"""A function that writes the bytes of an object to the descriptor of a new hidden file."""

_FolderEntry = tuple[str, int, int]
"""Name, mode and bytes of an entry of a folder."""


class LocalStore(FileReading, Store):
    """Keys to files beneath a root folder.

    Files are created exclusively. No link below the root is followed; the root itself may be a link. When a call
    returns, what it stored is durable: the file, and every folder entry that leads to it unless the caller leaves these
    to `sync`. Reading creates nothing, not even the root.

    An upload writes under its final name from the start. So a listing shows it before it is complete, and still shows
    it after its process has died: garbage collection must see it. An object that no manifest names must not be trusted.
    Objects stored by `put` and `put_if_absent` appear whole or not at all.

    `delete` also removes folders that it leaves without objects, and the temporary files of dead processes in them.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        settings: Settings,
        mode_from: Sequence[str] = (),
        syscalls: Syscalls | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Set the root; does no I/O.

        Args:
            root: The folder; created with its parents at the first write.
            settings: Only `file_mode` is used; the process's umask applies to it.
            mode_from: Names of files in the root. Without a `file_mode`, the first that exists gives its permission
                bits to new files. If none exists, the umask alone counts.
            syscalls: The operating system; tests pass another.
            clock: Source of random names, and of pauses while the cache of this node lags behind another node.
        """
        root = os.path.abspath(os.fspath(root))
        self.url = root
        self._syscalls = syscalls or Syscalls()
        self._clock = clock or SystemClock()
        self._folders = Folders(root, self._syscalls, self._clock, settings.file_mode, mode_from)
        self._begin_upload: Callable[..., LocalUpload] = LocalUpload

    def found_mode(self) -> int | None:
        """Return the permission bits of the files that are there already; None if there are none that count."""
        with translated("look at", self.url):
            return self._folders.found_mode()

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole; another process may replace it meanwhile."""
        with translated("read", self._where(key)):
            return self._folders.again(split_key(key), lambda: self._get(key, bytes_max))

    def put(self, key: str, data: bytes | Written, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one; durable on return if `durable`.

        A function as `data` is called again with another file if another process has removed the folder.
        """
        self._store_whole(key, data, self._replace, durable=durable)

    def put_if_absent(self, key: str, data: bytes | Written, *, folders_durable: bool = True) -> None:
        """Store a small object whole unless the key exists; atomic, durable on return; its folders if wanted.

        A function as `data` is taken as by `put`.

        Raises:
            ConflictError: The key exists and what it holds is durable; it was not touched. If another process has
                removed it since, that is durable.
            UnavailableError: It failed. If the object got its name before that (a folder could not be synced), it is
                stored whole, but a power cut may lose it.
        """
        try:
            self._store_whole(key, data, self._give_name, folders_durable=folders_durable)
        except ConflictError:
            self._make_durable(key)
            raise

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> LocalUpload:
        """Begin an object that must not exist yet, and reserve its space."""
        parts, where = split_key(key), self._where(key)
        ledger = PartLedger(where, bytes_max=bytes_max, part_bytes=part_bytes)
        with translated("begin", where, writing=True):
            upload = self._in_folder(
                parts[:-1],
                lambda folder: self._begin_upload(
                    self._syscalls, self._folders, folder, parts, ledger, may_be_less=may_be_less
                ),
            )
        upload.makes_folders_durable = folders_durable
        return upload

    def sync(self, prefix: str) -> None:
        """Make durable the entries of a folder and of those above it, up to the root."""
        parts = split_prefix(prefix)
        with translated("make durable", self._where(prefix), writing=True):
            self._folders.sync(parts)

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        parts, where = split_key(key), self._where(key)
        with translated("look at", where), self._folders.opened(parts[:-1]) as folder:
            status = self._syscalls.stat(parts[-1], dir_fd=folder)
        require_regular(status, where)
        return status.st_size

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted."""
        return sorted(name for name, mode, _ in self._entries(split_prefix(prefix)) if stat.S_ISDIR(mode))

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix in the order of the keys, uploads not yet complete included.

        Anything that is not a regular file, or whose name no key can have, is left out. A page is a folder, of which
        only the files between `after` and `up_to` are looked at.
        """
        return self._walk(split_prefix(prefix), after, up_to)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; durable on return, so a power cut cannot undo one call but keep the effect of the next.

        Folders without objects are removed too. The temporary files of dead processes are removed from those folders
        and from the first folder above that stays. This happens for absent keys as well, so any key of a folder cleans
        it up.
        """
        touched: dict[tuple[str, ...], None] = {}
        for key in keys:
            parts, where = split_key(key), self._where(key)
            touched[parts[:-1]] = None
            with (
                translated("delete", where),
                suppress(FileNotFoundError, IsADirectoryError),  # No such object, perhaps a folder of that name.
                self._folders.opened(parts[:-1]) as folder,
            ):
                self._syscalls.unlink(parts[-1], dir_fd=folder)
        for parts in sorted(touched, key=len, reverse=True):
            with translated("clean up", self._where("/".join(parts))):
                self._folders.sweep(parts)
                self._sync_remaining(parts)

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key; durable on return."""
        parts, new_parts, where = split_key(key), split_key(new_key), self._where(key)
        with translated("move", where, writing=True):
            self._in_folder(new_parts[:-1], lambda folder: self._rename_into(folder, parts, new_parts[-1], where))
            # The new name first: a power cut in between leaves both names rather than none, where that can happen.
            # Another process may have removed the object there by now, and its folder.
            self._folders.sync(new_parts[:-1], may_be_removed=True)
            self._sync_remaining(parts[:-1])

    def link(self, key: str, new_key: str) -> bool:
        """Give an object one more key: a hard link; return False if the file system refuses it.

        Its name is durable after `sync`. The link needs no other call: the file is durable already.
        """
        parts, new_parts, where = split_key(key), split_key(new_key), self._where(key)
        with translated("link", where, writing=True):
            return self._in_folder(new_parts[:-1], lambda folder: self._link_into(folder, parts, new_parts[-1], where))

    def _link_into(self, new_folder: int, parts: tuple[str, ...], new_name: str, where: str) -> bool:
        try:
            with self._folders.opened(parts[:-1]) as folder:
                status = self._syscalls.stat(parts[-1], dir_fd=folder)
        except FileNotFoundError as absent:
            raise MissingError(f"{where}: no such object") from absent
        require_regular(status, where)
        # If this finds no file, one of the two folders or the object was removed: the caller tries again.
        with self._folders.opened(parts[:-1]) as folder:
            try:
                self._syscalls.link(parts[-1], new_name, dir_fd=folder, new_dir_fd=new_folder)
            except FileExistsError:
                # Another rank refers to the same pack, or a network file system repeated the call.
                if not os.path.samestat(status, self._syscalls.stat(new_name, dir_fd=new_folder)):
                    raise
            except OSError as refusal:
                if refusal.errno not in _REFUSED_LINKS:
                    raise
                _log.debug("%s gets no further name: %s", where, refusal)
                return False
        return True

    def identity(self, key: str) -> str:
        """Return a text that the keys of one object share: device and number of its inode."""
        parts, where = split_key(key), self._where(key)
        with translated("look at", where), self._folders.opened(parts[:-1]) as folder:
            status = self._syscalls.stat(parts[-1], dir_fd=folder)
        require_regular(status, where)
        return f"{status.st_dev}:{status.st_ino}"

    def _rename_into(self, new_folder: int, parts: tuple[str, ...], new_name: str, where: str) -> None:
        try:
            with self._folders.opened(parts[:-1]) as folder:
                status = self._syscalls.stat(parts[-1], dir_fd=folder)
        except FileNotFoundError as absent:
            # A network file system may repeat a call whose reply was lost. Nobody else uses the new name.
            with suppress(FileNotFoundError):
                self._syscalls.stat(new_name, dir_fd=new_folder)
                return
            raise MissingError(f"{where}: no such object") from absent
        require_regular(status, where)
        with self._folders.opened(parts[:-1]) as folder:
            # If this finds no file, one of the two folders or the object was removed: the caller tries again.
            self._syscalls.rename(parts[-1], new_name, dir_fd=folder, new_dir_fd=new_folder)

    def _make_durable(self, key: str) -> None:
        """Make durable an object of another process, which may have died before it did so; or that it is gone."""
        parts = split_key(key)
        with translated("make durable", self._where(key), writing=True):
            # Deleted meanwhile, perhaps with its folder. Or a folder has this name.
            with suppress(FileNotFoundError, MissingError), self._open_object(key) as (fd, _):
                self._syscalls.fsync(fd)
            self._folders.sync(parts[:-1], may_be_removed=True)

    def _sync_remaining(self, parts: tuple[str, ...]) -> None:
        """Make durable the deepest folder of a path that still exists."""
        for depth in range(len(parts), -1, -1):
            with suppress(FileNotFoundError), self._folders.opened(parts[:depth]) as fd:
                self._folders.sync_folder(fd)
                return

    def _store_whole(
        self,
        key: str,
        data: bytes | Written,
        publish: Callable[[int, int, str, str], None],
        *,
        durable: bool = True,
        folders_durable: bool = True,
    ) -> None:
        parts, where = split_key(key), self._where(key)

        def store(folder: int) -> None:
            temporary = TEMPORARY_PREFIX + self._clock.random_bytes(12).hex()
            fd = self._folders.create(temporary, NEW, folder=folder)
            try:
                data(fd) if callable(data) else self._write_all(fd, data)
                if durable:
                    self._syscalls.fsync(fd)
                publish(folder, fd, temporary, parts[-1])
            finally:
                self._discard(folder, fd, temporary)

        with translated("store", where, writing=True):
            self._in_folder(parts[:-1], store)
            if durable and folders_durable:
                self._folders.sync(parts[:-1])

    def _in_folder(self, parts: tuple[str, ...], act: Callable[[int], _Result]) -> _Result:
        """Call `act` with an open folder, created if missing.

        Try again if the folder is gone: another process removed it, or the cache of this node lags behind another node.
        """
        gone: OSError | None = None
        for pause in LAG_PAUSES:
            try:
                with self._folders.opened(parts, create=True) as folder:
                    try:
                        return act(folder)
                    except OSError as error:
                        if error.errno not in (errno.ENOENT, errno.ESTALE):
                            raise
                        gone = error
                    self._clock.sleep(pause)
            except MissingError:
                raise  # The object itself is absent.
            except FileNotFoundError:
                continue
        if gone is not None:
            raise not_shown("/".join((self.url, *parts)), f"a call in this folder fails ({gone.strerror})") from gone
        with self._folders.opened(parts, create=True) as folder:
            return act(folder)

    def _write_all(self, fd: int, data: bytes) -> None:
        view, done = memoryview(data), 0
        while done < len(data):
            done += self._syscalls.pwrite(fd, view[done : done + _WRITE_BYTES_MAX], done)

    def _replace(self, folder: int, fd: int, temporary: str, name: str) -> None:
        with suppress(FileNotFoundError, MissingError):  # No object, or a folder, on which `rename` fails by itself.
            require_regular(self._syscalls.stat(name, dir_fd=folder), name)
        self._syscalls.rename(temporary, name, dir_fd=folder)

    def _give_name(self, folder: int, fd: int, temporary: str, name: str) -> None:
        try:
            self._syscalls.link(temporary, name, dir_fd=folder)
        except FileExistsError:
            # A network file system may repeat a call whose reply was lost; then the link that exists is our own.
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
            if refusal.errno not in UNSUPPORTED:
                raise
            raise UnavailableError(
                f"{self.url}: this file system can neither link nor rename without replacing, so publishing is not "
                "safe; choose another file system"
            ) from refusal

    def _discard(self, folder: int, fd: int, temporary: str) -> None:
        """Close and remove a temporary file. No listing shows it, so failing to remove it fails no call."""
        try:
            self._syscalls.unlink(temporary, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("could not remove %s: %s; deleting the last object of its folder removes it", temporary, error)
        close_quietly(self._syscalls, fd)

    @contextmanager
    def _open_object(self, key: str) -> Iterator[tuple[int, int]]:
        """Open a regular file for reading: its descriptor and its real size in bytes."""
        with Closing(self._syscalls, self._folders.open_file(split_key(key), _READ)) as fd:
            status = self._syscalls.fstat(fd)
            require_regular(status, self._where(key))
            yield fd, status.st_size

    def _walk(self, top: tuple[str, ...], after: str, up_to: str | None) -> Iterator[StoreEntry]:
        waiting = [(top, stat.S_IFDIR, 0)]
        while waiting:
            parts, mode, size = waiting.pop()
            if stat.S_ISREG(mode):
                key = "/".join(parts)
                if is_listed(key, after, up_to):
                    yield StoreEntry(key, size)
            elif stat.S_ISDIR(mode):
                # The last one first, since the first one is taken next.
                entries = sorted(self._entries(parts, after, up_to), key=_place_in_listing, reverse=True)
                waiting += [((*parts, name), mode, size) for name, mode, size in entries]

    def _entries(self, parts: tuple[str, ...], after: str = "", up_to: str | None = None) -> Iterable[_FolderEntry]:
        """Return name, mode and bytes of the entries of a folder whose names a key of this part can have."""
        entries: list[_FolderEntry] = []
        with (
            translated("list", self._where("/".join(parts))),
            suppress(FileNotFoundError),  # No object has this prefix.
            self._folders.opened(parts) as fd,
        ):
            for name in filter(is_part, self._syscalls.listdir(fd)):
                if not may_lead_to_listed("/".join((*parts, name)), after, up_to):
                    continue
                with suppress(FileNotFoundError):  # Deleted after it was listed.
                    status = self._syscalls.stat(name, dir_fd=fd)
                    entries.append((name, status.st_mode, status.st_size))
        return entries


def _place_in_listing(entry: _FolderEntry) -> str:
    """Return what orders the entries of a folder as their keys are: a folder comes where the keys below it do."""
    name, mode, _ = entry
    return f"{name}/" if stat.S_ISDIR(mode) else name
