"""A path of a file system at which another system's files are to appear, all at once."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from holdfast.errors import ConflictError, InvalidError, UnavailableError
from holdfast.settings import PAGE_BYTES
from holdfast.stores.local_upload import DIRECT_REFUSED, RESERVING_REFUSED
from holdfast.stores.oserrors import translated
from holdfast.stores.syscalls import Syscalls, close_quietly

_FILES = "files"
"""What becomes the destination: a folder, or the one file."""

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
            if not os.path.isdir(self._work) or os.path.islink(self._work):
                os.mkdir(self._work, self._folder_mode)
            fd = os.open(self._work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConflictError(
                    f"{self.url}: another process is exporting to it; wait for that, or end it"
                ) from error
            yield
        finally:
            try:
                os.rmdir(self._work)
            except OSError:
                pass  # There is work in it, or it was published.
            os.close(fd)

    def begin(self, sizes: dict[str, int]) -> None:
        """Reserve room for every file that is not there yet, by name."""
        with translated("make room for", self.work_url, writing=True):
            there = {name: self._allocated(name) for name in sizes}
            needed = sum(max(size - (there[name] or 0), 0) for name, size in sizes.items())
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
                if there[name] is None:
                    self._reserve(name, size)

    def open(self, name: str) -> LocalOutputFile:
        """Return a file that was begun."""
        return LocalOutputFile(self._syscalls, self._file(name), f"{self.work_url}/{_FILES}/{name}".rstrip("/"))

    def note(self, name: str, data: bytes) -> None:
        """Keep a few bytes beside the work."""
        path = os.path.join(self._work, name)
        with translated("note", self.work_url, writing=True):
            fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, self._mode)
            try:
                _write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(path + ".new", path)
            _sync_folder(self._work)

    def noted(self, name: str) -> bytes | None:
        """Return what was noted or written to a journal under a name."""
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
            # The note goes first: without it nobody takes what is left for work that can go on.
            for name in sorted(os.listdir(self._work), key=lambda each: each == _FILES):
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
                self._move(files)
            _sync_folder(self._parent)
        self.clear()
        with translated("remove", self.work_url, writing=True):
            os.rmdir(self._work)
            _sync_folder(self._parent)

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

    def _allocated(self, name: str) -> int | None:
        """Return the bytes a file takes on the disk; None if it is not there."""
        try:
            found = os.lstat(self._file(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_blocks * 512

    def _reserve(self, name: str, size: int) -> None:
        path = self._file(name)
        os.makedirs(os.path.dirname(path), self._folder_mode, exist_ok=True)
        # Made under another name: a file that is there has its room, whenever the process dies.
        fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, self._mode)
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
        os.rename(path + ".new", path)
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

    def append(self, data: bytes) -> None:
        """Add bytes; durable on return."""
        with translated("write", self._where, writing=True):
            _write_all(self._fd, data)
            os.fsync(self._fd)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)


def _address(data: memoryview) -> int:
    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0] if len(data) else 1
    return address


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
