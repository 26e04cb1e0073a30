"""A path of a file system at which another system's files are to appear, all at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import numpy as np

from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError
from holdfast.settings import PAGE_BYTES
from holdfast.stores.local_upload import DIRECT_REFUSED, RESERVING_REFUSED
from holdfast.stores.oserrors import translated
from holdfast.stores.syscalls import Syscalls, close_quietly

_FILES = "files"
"""What becomes the destination: a folder, or the one file."""

_NOTE = "plan.json"
_NEW = ".new"
"""Ends the name of what is on its way to another."""

_PUBLISHED = "published.json"
"""The note, and what the files looked like when they were about to appear."""

_NOREPLACE_REFUSED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


class LocalDestination:
    """A path of a file system, as `Destination` says; the work lies in a hidden folder beside it."""

    def __init__(self, path: str | os.PathLike[str], *, file_mode: int = 0o600) -> None:
        """Remember where; touches nothing.

        Args:
            path: What is to be made. The folder around it must exist.
            file_mode: Permission bits of new files; folders get the search bits that go with them.
        """
        self._path = os.path.abspath(os.fspath(path))
        self._parent, self._name = os.path.split(self._path)
        self._work = os.path.join(self._parent, f".{self._name}.holdfast-export")
        self._mode, self._folder_mode = file_mode, 0o700 | file_mode | (file_mode & 0o444) >> 2
        self._syscalls = Syscalls()

    @property
    def url(self) -> str:
        """Return `file://` and the absolute path."""
        return f"file://{self._path}"

    @property
    def work_url(self) -> str:
        """Where the unfinished work lies."""
        return f"file://{self._work}"

    @property
    def exists(self) -> bool:
        """Whether something stands at the path."""
        return os.path.lexists(self._path)

    @property
    def is_moved(self) -> bool:
        """Whether there is work of which the files are gone."""
        return os.path.isdir(self._work) and not os.path.lexists(os.path.join(self._work, _FILES))

    def require_outside(self, source: str) -> None:
        """Refuse to write into what is read.

        Raises:
            InvalidError: The path lies in the source, or is it.
        """
        scheme, _, path = source.partition("://")
        into = os.path.join(os.path.realpath(self._parent), self._name) + "/"
        if scheme == "file" and into.startswith(os.path.realpath(path).rstrip("/") + "/"):
            raise InvalidError(f"{self.url}: lies in {source}, which is exported; expected a place outside it")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other processes from the same work for the length of a block."""
        with translated("begin", self.work_url, writing=True):
            if not os.path.isdir(self._parent):
                raise InvalidError(f"{self.url}: the folder {self._parent} does not exist; make it first")
            fd = self._locked()
        try:
            yield
        finally:
            if self._is_work(fd):
                with suppress(OSError):  # There is work in it.
                    os.rmdir(self._work)
            os.close(fd)

    def is_begun(self, sizes: dict[str, int]) -> bool:
        """Return whether every file is there, as long as it was made."""
        return all(self._length(name) == size for name, size in sizes.items())

    def begin(self, sizes: dict[str, int]) -> None:
        """Make every file and reserve room for it, by name; what cannot be is not begun."""
        try:
            self._begin(sizes)
        except BaseException:
            with suppress(CheckpointError):  # What went wrong first is what matters.
                self.clear()
            raise

    def _begin(self, sizes: dict[str, int]) -> None:
        with translated("make room for", self.work_url, writing=True):
            needed = sum(sizes.values())
            status = os.statvfs(self._work)
            free = status.f_bavail * status.f_frsize
            if needed > free:
                raise UnavailableError(
                    f"{self.url}: needs {needed} more bytes, and the file system has {free} free. Free space there, "
                    "or choose another place"
                )
            if "" not in sizes:
                os.makedirs(os.path.join(self._work, _FILES), self._folder_mode, exist_ok=True)
            for name, size in sizes.items():
                self._reserve(name, size)

    def open(self, name: str) -> LocalOutputFile:
        """Return a file that was begun."""
        return LocalOutputFile(self._syscalls, self._file(name), f"{self.work_url}/{_FILES}/{name}".rstrip("/"))

    def note(self, data: bytes) -> None:
        """Keep a few bytes beside the work."""
        with translated("note", self.work_url, writing=True):
            self._keep(_NOTE, data)

    def noted(self) -> bytes | None:
        """Return what was noted."""
        return self._kept(_NOTE)

    def journals(self) -> Mapping[str, bytes]:
        """Return what was written to journals."""
        with translated("list", self.work_url):
            names = [name for name in os.listdir(self._work) if name not in (_FILES, _NOTE, _PUBLISHED)]
        return {name: self._kept(name) or b"" for name in sorted(names) if not name.endswith(_NEW)}

    def _kept(self, name: str) -> bytes | None:
        with translated("read", f"{self.work_url}/{name}"):
            try:
                with open(os.path.join(self._work, name), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                return None

    def journal(self, name: str) -> LocalJournal:
        """Return a journal, new or to be added to."""
        with translated("begin", f"{self.work_url}/{name}", writing=True):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            fd = os.open(os.path.join(self._work, name), flags, self._mode)
            _sync_folder(self._work)
        return LocalJournal(fd, f"{self.work_url}/{name}")

    def clear(self) -> None:
        """Remove unfinished work, notes and journals, but not the folder that is claimed."""
        with translated("remove", self.work_url, writing=True):
            # The note goes first: without it nobody takes what is left for work that can go on. What tells that the
            # files were published goes last: until then somebody else can clear the rest.
            order = {_NOTE: -1, _FILES: 1, _PUBLISHED: 2}
            for name in sorted(os.listdir(self._work), key=lambda each: order.get(each, 0)):
                path = os.path.join(self._work, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
            _sync_folder(self._work)

    def publish(self) -> None:
        """Have the files appear at the path, all at once and durable; then remove notes and journals."""
        files = os.path.join(self._work, _FILES)
        with translated("publish", self.url, writing=True):
            if not self.is_moved:
                for folder, _, _ in os.walk(files):
                    _sync_folder(folder)
                note = (self.noted() or b"").decode()
                self._keep(_PUBLISHED, json.dumps({"note": note, "look": _look(files)}).encode())
                self._move(files)
            _sync_folder(self._parent)
        self.clear()
        with translated("remove", self.work_url, writing=True):
            os.rmdir(self._work)
            _sync_folder(self._parent)

    def published(self) -> bytes | None:
        """Return the note of work that was published, if what stands at the path is still that."""
        data = self._kept(_PUBLISHED)
        if data is None or not self.is_moved:
            return None
        try:
            kept = json.loads(data)
            note, look = str(kept["note"]), kept["look"]
        except (ValueError, KeyError, TypeError):
            return None  # Nobody can tell, then.
        with translated("look at", self.url):
            return note.encode() if look == _look(self._path) else None

    def _locked(self) -> int:
        """Return the folder of the work, made if need be, open and locked."""
        while True:
            with suppress(FileExistsError):
                os.mkdir(self._work, self._folder_mode)
            try:
                fd = os.open(self._work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # Whoever had it was done with it just now.
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_work(fd):
                    return fd
            except BlockingIOError as error:
                os.close(fd)
                raise ConflictError(
                    f"{self.url}: another process is exporting to it; wait for that, or end it"
                ) from error
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # What was locked is no longer what the path leads to.

    def _is_work(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self._work))
        except FileNotFoundError:
            return False

    def _keep(self, name: str, data: bytes) -> None:
        path = os.path.join(self._work, name)
        fd = os.open(path + _NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, self._mode)
        try:
            _write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(path + _NEW, path)
        _sync_folder(self._work)

    def _move(self, files: str) -> None:
        parent = os.open(self._parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._syscalls.rename_noreplace(os.path.relpath(files, self._parent), self._name, dir_fd=parent)
        except OSError as error:
            if error.errno == errno.EEXIST or (error.errno in _NOREPLACE_REFUSED and self.exists):
                raise ConflictError(
                    f"{self.url}: something appeared there meanwhile; it was not touched. What was exported lies in "
                    f"{files}: move it where it may lie, or move the other away and run the same command again"
                ) from error
            if error.errno not in _NOREPLACE_REFUSED:
                raise
            os.rename(files, self._path)
        finally:
            os.close(parent)

    def _file(self, name: str) -> str:
        parts = name.split("/") if name else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise InvalidError(f"{self.url}: file {name[:300]!r}; expected a path that stays in the destination")
        return os.path.join(self._work, _FILES, *parts)

    def _length(self, name: str) -> int | None:
        """Return the bytes of a regular file; None if it is not there."""
        try:
            found = os.lstat(self._file(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _reserve(self, name: str, size: int) -> None:
        path = self._file(name)
        os.makedirs(os.path.dirname(path), self._folder_mode, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, self._mode)
        try:
            if size:
                try:
                    self._syscalls.fallocate(fd, size)
                except OSError as error:
                    if error.errno not in RESERVING_REFUSED:
                        raise
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)
        _sync_folder(os.path.dirname(path))


class LocalOutputFile:
    """A file of which whole pages are written directly to the disk where the file system allows it."""

    def __init__(self, syscalls: Syscalls, path: str, where: str) -> None:
        """Open it twice: for whole pages, and for what is left of one."""
        self._syscalls, self._where = syscalls, where
        self._lock = threading.Lock()
        with translated("open", where, writing=True):
            self._pages = syscalls.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                self._rest = syscalls.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            except BaseException:
                close_quietly(syscalls, self._pages)
                raise
            if not stat.S_ISREG(os.fstat(self._pages).st_mode):
                raise InvalidError(f"{where}: it is not a regular file; expected one")
            try:
                syscalls.set_direct(self._pages, True)
            except OSError as error:
                if error.errno not in DIRECT_REFUSED:
                    raise

    def write(self, offset: int, data: memoryview) -> None:
        """Write a run."""
        body = 0
        if offset % PAGE_BYTES == 0 and _address(data) % PAGE_BYTES == 0:
            body = len(data) - len(data) % PAGE_BYTES
        with translated("write", f"{self._where} bytes [{offset}, {offset + len(data)})", writing=True):
            try:
                done = self._write(self._pages, offset, data[:body])
            except OSError as error:
                if error.errno not in DIRECT_REFUSED:
                    raise
                done = 0
            self._write(self._rest, offset + done, data[done:])

    def sync(self) -> None:
        """Make durable what was written so far."""
        with translated("make durable", self._where, writing=True):
            self._syscalls.fsync(self._rest)

    def close(self) -> None:
        """Let go of it."""
        for fd in (self._pages, self._rest):
            close_quietly(self._syscalls, fd)

    def _write(self, fd: int, offset: int, data: memoryview) -> int:
        """Write a run, in as many calls as it takes; return what was written, whole pages where it is not all."""
        done = 0
        while done < len(data):
            count = self._syscalls.pwrite(fd, data[done:], offset + done)
            if fd == self._pages:
                count -= count % PAGE_BYTES
            if not count:
                if fd == self._pages:
                    break  # The buffered write that follows finds out why.
                raise OSError(errno.EIO, "a write stored nothing")
            done += count
        return done


class LocalJournal:
    """A file that is only added to."""

    def __init__(self, fd: int, where: str) -> None:
        """Take over a file just created."""
        self._fd, self._where = fd, where
        self._is_cut = False

    def append(self, data: bytes) -> None:
        """Add bytes; durable on return. Once that failed nothing more is added, behind what may have been cut short.

        Raises:
            UnavailableError: It could not be, now or before.
        """
        if self._is_cut:
            raise UnavailableError(f"{self._where}: could not be written before; nothing is added to it any more")
        self._is_cut = True
        with translated("write", self._where, writing=True):
            _write_all(self._fd, data)
            os.fsync(self._fd)
        self._is_cut = False

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)


def _address(data: memoryview) -> int:
    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0] if len(data) else 1
    return address


def _look(path: str) -> list[list[str | int]]:
    """Return name, size, time of writing and number of every file: not the same for other files."""
    names = [os.path.relpath(os.path.join(folder, name), path) for folder, _, each in os.walk(path) for name in each]
    found: list[list[str | int]] = []
    for name in sorted(names) or [""]:
        status = os.lstat(os.path.join(path, name) if name else path)
        found.append([name, status.st_size, status.st_mtime_ns, status.st_ino])
    return found


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
