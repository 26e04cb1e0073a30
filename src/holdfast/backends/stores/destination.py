"""The destination of an export in a file system: files of another system that appear at a path all at once.

The work is in a hidden folder beside the path. It passes through these states; a process that dies leaves the work in
its state, and the next process continues from there:

    absent -> claimed (`claimed`: the folder exists and is locked) -> begun (`begin`: files at full length)
    begun -> written (`open`, `note`, `journal`) -> published (`publish`: files renamed to the path) -> absent
    claimed, begun or written -> claimed (`clear`)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from holdfast.backends.stores.folders import LAG_PAUSES, modes_of, not_shown
from holdfast.backends.stores.oserrors import translated
from holdfast.backends.stores.syscalls import (
    UNSUPPORTED,
    Closing,
    Syscalls,
    close_quietly,
    reserve_space,
    switch_to_direct,
)
from holdfast.base.clock import SystemClock
from holdfast.base.ports.keys import path_beneath
from holdfast.base.ports.parts import is_page_aligned
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError
from holdfast.settings import PAGE_BYTES

_FILES = "files"
"""In the work: what is renamed to the destination, a folder or a single file."""

_NOTE = "plan.json"
_NEW = ".new"
"""Suffix of a file that will be renamed over another."""

_PUBLISHED = "published.json"
"""The note, and names, sizes and times of the files just before they were published."""


_SYSCALLS = Syscalls()


class LocalDestination:
    """A path of a file system; implements `offline.export.destination.Destination`."""

    def __init__(self, path: str | os.PathLike[str], *, file_mode: int | None = None) -> None:
        """Set the path; does no I/O.

        Args:
            path: The path to create. Its parent folder must exist.
            file_mode: Permission bits of new files, less those that the umask takes; None for all that it leaves.
        """
        self._path = os.path.abspath(os.fspath(path))
        self._parent, self._name = os.path.split(self._path)
        self._work = os.path.join(self._parent, f".{self._name}.holdfast-export")
        self._mode, self._folder_mode = modes_of(file_mode)
        self.url = self._path
        self.work_url = self._work
        """Place of the unfinished work, for messages."""

    @property
    def exists(self) -> bool:
        """Whether the path exists."""
        return os.path.lexists(self._path)

    @property
    def is_moved(self) -> bool:
        """Whether there is work whose files are gone."""
        return os.path.isdir(self._work) and not os.path.lexists(os.path.join(self._work, _FILES))

    def require_outside(self, source: str) -> None:
        """Require a path outside the exported checkpoint.

        Raises:
            InvalidError: The path is the source, or inside it.
        """
        into = os.path.join(os.path.realpath(self._parent), self._name) + "/"
        # Another place than a folder is a URL, which is no absolute path.
        if os.path.isabs(source) and into.startswith(os.path.realpath(source).rstrip("/") + "/"):
            raise InvalidError(f"{self.url}: is inside {source}, which is exported; expected a path outside it")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the work against other processes for the length of a block."""
        with translated("begin", self.work_url, writing=True):
            if not os.path.isdir(self._parent):
                raise InvalidError(f"{self.url}: the folder {self._parent} does not exist; make it first")
            fd = self._locked()
        try:
            yield
        finally:
            if self._is_work(fd):
                with suppress(OSError):  # Not empty: there is work to keep.
                    os.rmdir(self._work)
            os.close(fd)

    def is_begun(self, sizes: dict[str, int]) -> bool:
        """Return whether every file exists and has its full length."""
        return all(self._length(name) == size for name, size in sizes.items())

    def begin(self, sizes: dict[str, int]) -> None:
        """Create every file, by name, and reserve its space; if that fails, leave nothing."""
        try:
            with translated("make room for", self.work_url, writing=True):
                needed = sum(sizes.values())
                status = os.statvfs(self._work)
                free = status.f_bavail * status.f_frsize
                if needed > free:
                    raise UnavailableError(
                        f"{self.url}: needs {needed} more bytes, and the file system has {free} free. Free space "
                        "there, or choose another place"
                    )
                if "" not in sizes:
                    os.makedirs(os.path.join(self._work, _FILES), self._folder_mode, exist_ok=True)
                for name, size in sizes.items():
                    self._reserve(name, size)
        except BaseException:
            with suppress(CheckpointError):  # The first error is the one to report.
                self.clear()
            raise

    def open(self, name: str) -> LocalOutputFile:
        """Open a file that `begin` created."""
        return LocalOutputFile(self._file(name), f"{self.work_url}/{_FILES}/{name}".rstrip("/"))

    def note(self, data: bytes) -> None:
        """Store a few bytes beside the work, replacing earlier ones."""
        with translated("note", self.work_url, writing=True):
            self._write_small(_NOTE, data)

    def noted(self) -> bytes | None:
        """Return what `note` stored; None if nothing was stored."""
        return self._read_small(_NOTE)

    def journals(self) -> Mapping[str, bytes]:
        """Return the content of all journals, by name."""
        with translated("list", self.work_url):
            names = [name for name in os.listdir(self._work) if name not in (_FILES, _NOTE, _PUBLISHED)]
        return {name: self._read_small(name) or b"" for name in sorted(names) if not name.endswith(_NEW)}

    def _read_small(self, name: str) -> bytes | None:
        with translated("read", f"{self.work_url}/{name}"):
            try:
                with open(os.path.join(self._work, name), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                return None

    def journal(self, name: str) -> LocalJournal:
        """Open a journal to append to; create it if needed."""
        with translated("begin", f"{self.work_url}/{name}", writing=True):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            fd = os.open(os.path.join(self._work, name), flags, self._mode)
            _sync_folder(self._work)
        return LocalJournal(fd, f"{self.work_url}/{name}")

    def clear(self) -> None:
        """Remove unfinished work, notes and journals, but not the locked folder."""
        with translated("remove", self.work_url, writing=True):
            # The note goes first: without it no process takes the rest for work to continue. The record of the
            # publication goes last: as long as it exists, another process can clear the rest.
            order = {_NOTE: -1, _FILES: 1, _PUBLISHED: 2}
            for name in sorted(os.listdir(self._work), key=lambda name: order.get(name, 0)):
                path = os.path.join(self._work, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
            _sync_folder(self._work)

    def publish(self) -> None:
        """Make the files appear at the path, all at once and durable; then remove notes and journals."""
        files = os.path.join(self._work, _FILES)
        with translated("publish", self.url, writing=True):
            if not self.is_moved:
                for folder, _, _ in os.walk(files):
                    _sync_folder(folder)
                note = (self.noted() or b"").decode()
                self._write_small(_PUBLISHED, json.dumps({"note": note, "look": _look(files)}).encode())
                self._move(files)
            _sync_folder(self._parent)
        self.clear()
        with translated("remove", self.work_url, writing=True):
            os.rmdir(self._work)
            _sync_folder(self._parent)

    def published(self) -> bytes | None:
        """Return the note of published work, if the path still holds those files."""
        data = self._read_small(_PUBLISHED)
        if data is None or not self.is_moved:
            return None
        try:
            record = json.loads(data)
            note, look = str(record["note"]), record["look"]
        except (ValueError, KeyError, TypeError):
            return None  # Without a valid record it is unknown.
        with translated("look at", self.url):
            return note.encode() if look == _look(self._path) else None

    def _locked(self) -> int:
        """Return a descriptor of the work's folder, created if needed, with the lock held."""
        for pause in LAG_PAUSES:
            with suppress(FileExistsError):
                os.mkdir(self._work, self._folder_mode)
            try:
                fd = os.open(self._work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                # Another process has just removed it, or the cache of this node does not show it yet.
                SystemClock().sleep(pause)
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_work(fd):
                    return fd
            except BlockingIOError as error:
                os.close(fd)
                raise ConflictError(
                    f"{self.url}: another process is exporting to it; wait for it, or end it"
                ) from error
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # The folder was replaced between opening and locking it.
        raise not_shown(self._work, "the folder cannot be opened and locked")

    def _is_work(self, fd: int) -> bool:
        """Return whether a descriptor is still that of the work's folder."""
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self._work))
        except FileNotFoundError:
            return False

    def _write_small(self, name: str, data: bytes) -> None:
        path = os.path.join(self._work, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with Closing(_SYSCALLS, os.open(path + _NEW, flags, self._mode)) as fd:
            _write_all(fd, data)
            os.fsync(fd)
        os.rename(path + _NEW, path)
        _sync_folder(self._work)

    def _move(self, files: str) -> None:
        try:
            with Closing(_SYSCALLS, os.open(self._parent, os.O_RDONLY | os.O_DIRECTORY)) as parent:
                _SYSCALLS.rename_noreplace(os.path.relpath(files, self._parent), self._name, dir_fd=parent)
        except OSError as error:
            if error.errno == errno.EEXIST or (error.errno in UNSUPPORTED and self.exists):
                raise ConflictError(
                    f"{self.url}: something appeared there meanwhile; it was not touched. The export is in {files}. "
                    "Move the export elsewhere, or move the other away and run the same command again"
                ) from error
            if error.errno not in UNSUPPORTED:
                raise
            os.rename(files, self._path)

    def _file(self, name: str) -> str:
        return path_beneath(os.path.join(self._work, _FILES), name, self.url)

    def _length(self, name: str) -> int | None:
        """Return the bytes of a regular file; None if there is none."""
        try:
            status = os.lstat(self._file(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _reserve(self, name: str, size: int) -> None:
        path = self._file(name)
        os.makedirs(os.path.dirname(path), self._folder_mode, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with Closing(_SYSCALLS, os.open(path, flags, self._mode)) as fd:
            reserve_space(_SYSCALLS, fd, size)
            os.ftruncate(fd, size)
            os.fsync(fd)
        _sync_folder(os.path.dirname(path))


class LocalOutputFile:
    """A file whose whole pages are written with direct I/O, if the file system supports it."""

    def __init__(self, path: str, where: str) -> None:
        """Open the file twice: for whole pages, and for partial ones."""
        self._where = where
        with translated("open", where, writing=True):
            self._pages = _SYSCALLS.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                self._rest = _SYSCALLS.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            except BaseException:
                close_quietly(_SYSCALLS, self._pages)
                raise
            if not stat.S_ISREG(os.fstat(self._pages).st_mode):
                raise InvalidError(f"{where}: it is not a regular file; expected one")
            switch_to_direct(_SYSCALLS, self._pages)

    def write(self, offset: int, data: memoryview) -> None:
        """Write a range of the file."""
        body = 0
        if offset % PAGE_BYTES == 0 and len(data) and is_page_aligned(data):
            body = len(data) - len(data) % PAGE_BYTES
        with translated("write", f"{self._where} bytes [{offset}, {offset + len(data)})", writing=True):
            try:
                done = self._write(self._pages, offset, data[:body])
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                done = 0
            self._write(self._rest, offset + done, data[done:])

    def sync(self) -> None:
        """Make durable what was written so far."""
        with translated("make durable", self._where, writing=True):
            _SYSCALLS.fsync(self._rest)

    def close(self) -> None:
        """Close the file."""
        for fd in (self._pages, self._rest):
            close_quietly(_SYSCALLS, fd)

    def _write(self, fd: int, offset: int, data: memoryview) -> int:
        """Write a range in as many calls as needed; return the bytes written, whole pages if not all of them."""
        done = 0
        while done < len(data):
            count = _SYSCALLS.pwrite(fd, data[done:], offset + done)
            if fd == self._pages:
                count -= count % PAGE_BYTES
            if not count:
                if fd == self._pages:
                    break  # The buffered write that follows will raise the cause.
                raise OSError(errno.EIO, "a write stored nothing")
            done += count
        return done


class LocalJournal:
    """An append-only file."""

    def __init__(self, fd: int, where: str) -> None:
        """Take over a new file."""
        self._fd, self._where = fd, where
        self._has_failed = False

    def append(self, data: bytes) -> None:
        """Append bytes, durable on return. After a failure the last record may be incomplete, so no later call appends.

        Raises:
            UnavailableError: This call failed, or an earlier one did.
        """
        if self._has_failed:
            raise UnavailableError(f"{self._where}: an earlier write failed; nothing is added to it any more")
        self._has_failed = True
        with translated("write", self._where, writing=True):
            _write_all(self._fd, data)
            os.fsync(self._fd)
        self._has_failed = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _look(path: str) -> list[list[str | int]]:
    """Return name, size, modification time and inode of every file, to recognise these very files later."""
    names = [os.path.relpath(os.path.join(folder, name), path) for folder, _, files in os.walk(path) for name in files]
    looks: list[list[str | int]] = []
    for name in sorted(names) or [""]:
        status = os.lstat(os.path.join(path, name) if name else path)
        looks.append([name, status.st_size, status.st_mtime_ns, status.st_ino])
    return looks


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(path: str) -> None:
    with Closing(_SYSCALLS, os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        os.fsync(fd)
