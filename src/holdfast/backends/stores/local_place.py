"""The place of an export in a file system: files of another system that appear at a path all at once.

The work is in a hidden folder beside the path. It passes through these states; a process that dies leaves the work in
its state, and the next process continues from there:

    absent -> locked (`claimed`) -> begun (files at full length, then the note) -> written (`upload`, `record`)
    written -> published (`publish`: files renamed to the path) -> absent
    locked, begun or written -> locked (`clear`)
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from holdfast.backends.stores.folders import LAG_PAUSES, modes_of, not_shown
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.oserrors import translated
from holdfast.backends.stores.syscalls import (
    UNSUPPORTED,
    Closing,
    Syscalls,
    close_quietly,
    reserve_space,
    switch_to_direct,
)
from holdfast.base.clock import Clock, SystemClock
from holdfast.base.ports.keys import path_beneath
from holdfast.base.ports.parts import is_page_aligned
from holdfast.base.ports.readable import Release
from holdfast.base.types.export import Claim, DoneWindow, ExportFile, ExportWindow
from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError, UnavailableError
from holdfast.settings import PAGE_BYTES, Settings

logger = logging.getLogger(__name__)

_FILES = "files"
"""In the work: what is renamed to the path, a folder or a single file."""

_NOTE = "plan.json"
"""Record of the export that the work belongs to, and of its journal."""

_PUBLISHED = "published.json"
"""Record of the export, and names, sizes and times of the files just before they were published."""

_RECORD_BYTES_MAX = 1 << 30
_SYSCALLS = Syscalls()


class LocalPlace:
    """A path of a file system; implements `offline.export.place.ExportPlace`."""

    def __init__(self, path: str | os.PathLike[str], *, file_mode: int | None = None) -> None:
        """Set the path; does no I/O.

        Args:
            path: The path to create. Its parent folder must exist.
            file_mode: Permission bits of new files, less those that the umask takes; None for all that it leaves.
        """
        self.url = os.path.abspath(os.fspath(path))
        self._parent, self._name = os.path.split(self.url)
        self.work_url = os.path.join(self._parent, f".{self._name}.holdfast-export")
        """Place of the unfinished work."""
        self._files = os.path.join(self.work_url, _FILES)
        self._mode, self._folder_mode = modes_of(file_mode)
        self._records = LocalStore(self.work_url, settings=Settings(file_mode=file_mode))

    def require_outside(self, source: str) -> None:
        """Require a path outside the exported checkpoint.

        Raises:
            InvalidError: The path is the source, or inside it.
        """
        into = os.path.join(os.path.realpath(self._parent), self._name) + "/"
        # Another place than a folder is a URL, which is no absolute path.
        if os.path.isabs(source) and into.startswith(os.path.realpath(source).rstrip("/") + "/"):
            raise InvalidError(f"{self.url}: is inside {source}, which is exported; expected a path outside it")

    def whole_file_bytes(self, files: Sequence[ExportFile], memory_bytes: int) -> None:
        """Return None: a window may be any part of a file."""

    @contextmanager
    def claimed(self, fingerprint: str, files: Sequence[ExportFile], clock: Clock) -> Iterator[Claim]:
        """Lock the work against other processes for the length of a block; continue it, or begin it."""
        with translated("begin", self.work_url, writing=True):
            if not os.path.isdir(self._parent):
                raise InvalidError(f"{self.url}: the folder {self._parent} does not exist; make it first")
            fd = self._locked()
        try:
            if os.path.lexists(self.url):
                self._require_published(fingerprint)
                yield Claim(is_published=True)
            else:
                yield self._begun(fingerprint, files, clock)
        finally:
            if self._is_work(fd):
                with suppress(OSError):  # Not empty: there is work to keep.
                    os.rmdir(self.work_url)
            os.close(fd)

    def _begun(self, fingerprint: str, files: Sequence[ExportFile], clock: Clock) -> Claim:
        """Return the unfinished work of this export; discard other work, and create every file."""
        note = self._record_at(_NOTE)
        is_ours, journal = note.get("fingerprint") == fingerprint, note.get("journal")
        if is_ours and isinstance(journal, str) and all(self._length(file.name) == file.bytes for file in files):
            return Claim(done=self.recorded(journal), journal=journal)
        if note:
            why = "has lost files" if is_ours else "has another source or other options"
            logger.warning("%s: the unfinished work %s; it is discarded", self.work_url, why)
        self.clear()
        self._create(files)
        # The name is new: a late worker of discarded work writes to another journal.
        journal = f"journal-{clock.random_bytes(8).hex()}"
        # The note comes last: without it, an interrupted begin is repeated.
        self._records.put(_NOTE, json.dumps({"fingerprint": fingerprint, "journal": journal}).encode())
        return Claim(journal=journal, begun_anew=bool(note))

    def upload(self, file: ExportFile) -> LocalWindow:
        """Open a file that was created, to write one window."""
        return LocalWindow(self._path_of(file.name), f"{self._files}/{file.name}".rstrip("/"))

    def record(self, journal: str, windows: Sequence[DoneWindow]) -> None:
        """Append the windows to the file of this process in the journal."""
        path = os.path.join(self.work_url, f"{journal}-{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with (
            translated("write", path, writing=True),
            Closing(_SYSCALLS, os.open(path, flags, self._mode)) as fd,
            open(fd, "wb", closefd=False) as file,
        ):
            # The line end at the front ends the line that a failed call may have left cut short.
            file.write(b"\n" + json.dumps([asdict(each) for each in windows]).encode() + b"\n")
            file.flush()
            os.fsync(fd)
            _sync_folder(self.work_url)

    def recorded(self, journal: str) -> list[DoneWindow]:
        """Return the windows in the journal; a line that is cut short or damaged counts for nothing."""
        done: list[DoneWindow] = []
        with translated("read", self.work_url):
            for name in sorted(os.listdir(self.work_url)):
                if name.startswith(journal):
                    with open(os.path.join(self.work_url, name), "rb") as file:
                        done += [window for line in file for window in _windows_in(line)]
        return done

    def clear(self) -> None:
        """Remove unfinished work and records, but not the locked folder."""
        with translated("remove", self.work_url, writing=True):
            # The note goes first: without it no process takes the rest for work to continue. The record of the
            # publication goes last: as long as it exists, another process can clear the rest.
            order = {_NOTE: -1, _FILES: 1, _PUBLISHED: 2}
            for name in sorted(os.listdir(self.work_url), key=lambda name: order.get(name, 0)):
                path = os.path.join(self.work_url, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
            _sync_folder(self.work_url)

    def publish(self) -> None:
        """Make the files appear at the path, all at once and durable; then remove the records."""
        with translated("publish", self.url, writing=True):
            for folder, _, _ in os.walk(self._files):
                _sync_folder(folder)
            fingerprint = self._record_at(_NOTE).get("fingerprint")
            record = {"fingerprint": fingerprint, "look": _look(self._files)}
            self._records.put(_PUBLISHED, json.dumps(record).encode())
            self._move()
        self._end()

    def _require_published(self, fingerprint: str) -> None:
        """Require the files of this export at the path, from a process that died after it had moved them there.

        Raises:
            ConflictError: The path holds something else; it was not touched.
        """
        published, is_ours = self._record_at(_PUBLISHED), False
        if not os.path.lexists(self._files):
            with translated("look at", self.url):
                is_ours = published.get("fingerprint") == fingerprint and published.get("look") == _look(self.url)
            self._end()
        if not is_ours:
            raise ConflictError(f"{self.url}: exists already; it was not touched. Export elsewhere")

    def _end(self) -> None:
        """Remove the work, after the files have moved to the path."""
        with translated("publish", self.url, writing=True):
            _sync_folder(self._parent)
        self.clear()
        with translated("remove", self.work_url, writing=True):
            os.rmdir(self.work_url)
            _sync_folder(self._parent)

    def _record_at(self, key: str) -> dict[str, Any]:
        """Return a record; an empty one if it does not exist, or is damaged."""
        try:
            record = json.loads(self._records.get(key, _RECORD_BYTES_MAX))
        except (MissingError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _locked(self) -> int:
        """Return a descriptor of the work's folder, created if needed, with the lock held."""
        for pause in LAG_PAUSES:
            with suppress(FileExistsError):
                os.mkdir(self.work_url, self._folder_mode)
            try:
                fd = os.open(self.work_url, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
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
        raise not_shown(self.work_url, "the folder cannot be opened and locked")

    def _is_work(self, fd: int) -> bool:
        """Return whether a descriptor is still that of the work's folder."""
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self.work_url))
        except FileNotFoundError:
            return False

    def _move(self) -> None:
        try:
            with Closing(_SYSCALLS, os.open(self._parent, os.O_RDONLY | os.O_DIRECTORY)) as parent:
                _SYSCALLS.rename_noreplace(os.path.relpath(self._files, self._parent), self._name, dir_fd=parent)
        except OSError as error:
            if error.errno == errno.EEXIST or (error.errno in UNSUPPORTED and os.path.lexists(self.url)):
                raise ConflictError(
                    f"{self.url}: something appeared there meanwhile; it was not touched. The export is in "
                    f"{self._files}. Move the export elsewhere, or move the other away and run the same command again"
                ) from error
            if error.errno not in UNSUPPORTED:
                raise
            os.rename(self._files, self.url)

    def _path_of(self, name: str) -> str:
        return path_beneath(self._files, name, self.url)

    def _length(self, name: str) -> int | None:
        """Return the bytes of a regular file; None if there is none."""
        try:
            status = os.lstat(self._path_of(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _create(self, files: Sequence[ExportFile]) -> None:
        """Create every file and reserve its space; if that fails, leave nothing."""
        try:
            with translated("make room for", self.work_url, writing=True):
                needed = sum(file.bytes for file in files)
                status = os.statvfs(self.work_url)
                free = status.f_bavail * status.f_frsize
                if needed > free:
                    raise UnavailableError(
                        f"{self.url}: needs {needed} more bytes, and the file system has {free} free. Free space "
                        "there, or choose another place"
                    )
                if all(file.name for file in files):
                    os.makedirs(self._files, self._folder_mode, exist_ok=True)
                for file in files:
                    self._reserve(self._path_of(file.name), file.bytes)
        except BaseException:
            with suppress(CheckpointError):  # The first error is the one to report.
                self.clear()
            raise

    def _reserve(self, path: str, size: int) -> None:
        os.makedirs(os.path.dirname(path), self._folder_mode, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with Closing(_SYSCALLS, os.open(path, flags, self._mode)) as fd:
            reserve_space(_SYSCALLS, fd, size)
            os.ftruncate(fd, size)
            os.fsync(fd)
        _sync_folder(os.path.dirname(path))


class LocalWindow:
    """The upload of one window: writes into a file that has its full length. One thread at a time uses it."""

    def __init__(self, path: str, where: str) -> None:
        """Open the file."""
        self._where = where
        with translated("open", where, writing=True):
            self._fd = _SYSCALLS.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        self._is_open = True

    def room(self, offset: int, length_bytes: int) -> None:
        """Return None: a file takes bytes from any memory."""

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        """Write a range of the file, at any offset: whole pages with direct I/O, if the file system supports it."""
        with translated("write", f"{self._where} bytes [{offset}, {offset + len(data)})", writing=True):
            done = self._write_pages(offset, data)
            while done < len(data):
                count = _SYSCALLS.pwrite(self._fd, data[done:], offset + done)
                if not count:
                    raise OSError(errno.EIO, "a write stored nothing")
                done += count

    def _write_pages(self, offset: int, data: memoryview) -> int:
        """Write whole pages with one direct call; return the bytes written, none where direct I/O is not supported."""
        pages = data[: len(data) - len(data) % PAGE_BYTES]
        if offset % PAGE_BYTES or not pages or not is_page_aligned(pages) or not switch_to_direct(_SYSCALLS, self._fd):
            return 0
        count = 0
        try:
            count = _SYSCALLS.pwrite(self._fd, pages, offset)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        _SYSCALLS.set_direct(self._fd, False)
        return count - count % PAGE_BYTES

    def complete(self, total_bytes: int | None = None) -> None:
        """Make durable what was written."""
        with translated("make durable", self._where, writing=True):
            _SYSCALLS.fsync(self._fd)
        self.abort()

    def abort(self) -> None:
        """Close the file, if it is open. What was written stays, and no record has it."""
        if self._is_open:
            self._is_open = False
            close_quietly(_SYSCALLS, self._fd)


def _windows_in(line: bytes) -> list[DoneWindow]:
    with suppress(ValueError, KeyError, TypeError):
        return [
            DoneWindow(
                ExportWindow(**each["window"]),
                tuple((number, start, stop, crc) for number, start, stop, crc in each["sums"]),
            )
            for each in json.loads(line)
        ]
    return []


def _look(path: str) -> list[list[str | int]]:
    """Return name, size, modification time and inode of every file, to recognise these very files later."""
    names = [os.path.relpath(os.path.join(folder, name), path) for folder, _, files in os.walk(path) for name in files]
    looks: list[list[str | int]] = []
    for name in sorted(names) or [""]:
        status = os.lstat(os.path.join(path, name) if name else path)
        looks.append([name, status.st_size, status.st_mtime_ns, status.st_ino])
    return looks


def _sync_folder(path: str) -> None:
    with Closing(_SYSCALLS, os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        os.fsync(fd)
