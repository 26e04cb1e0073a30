"""One file being written by several threads, directly to the disk where the file system allows it."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from holdfast.errors import InvalidError, UnavailableError
from holdfast.settings import PAGE_BYTES
from holdfast.stores.folders import Folders
from holdfast.stores.oserrors import translated
from holdfast.stores.parts import PartLedger
from holdfast.stores.syscalls import Syscalls, close_quietly

_log = logging.getLogger(__name__)

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
DIRECT_REFUSED = {errno.EINVAL, errno.ENOTSUP}
RESERVING_REFUSED = {errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_BARREN_WRITES_MAX = 8
"""Writes in a row that store less than a page before we give up: a full disk answers so just before ENOSPC."""


class LocalUpload:
    """A file at its final name, not to be trusted before `complete` returned."""

    def __init__(
        self,
        syscalls: Syscalls,
        folders: Folders,
        parts: tuple[str, ...],
        *,
        fd: int,
        total_bytes: int,
        ledger: PartLedger,
        where: str,
    ) -> None:
        """Take over a file just created; use `begin`."""
        self._syscalls = syscalls
        self._folders = folders
        self._parts = parts
        self._fd = fd
        self._total_bytes = total_bytes
        self._ledger = ledger
        self._where = where
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._direct = False
        self._users = 0
        self._closing = False
        self._closed = False
        self._completed = False
        self._removed = False
        self._distrust = ""
        self._identity: os.stat_result | None = None

    @classmethod
    def begin(
        cls,
        syscalls: Syscalls,
        folders: Folders,
        folder: int,
        parts: tuple[str, ...],
        *,
        mode: int,
        total_bytes: int,
        ledger: PartLedger,
        where: str,
    ) -> LocalUpload:
        """Create the file in the open `folder` and reserve its room; on failure nothing of it stays."""
        fd = syscalls.open(parts[-1], _NEW, mode, dir_fd=folder)
        upload = cls(syscalls, folders, parts, fd=fd, total_bytes=total_bytes, ledger=ledger, where=where)
        try:
            upload._prepare()
        except BaseException:
            upload._abandon()
            raise
        return upload

    def write(self, offset: int, data: memoryview) -> None:
        """Write one part, from any thread."""
        self._ledger.check(offset, data.nbytes)
        view = data if data.format == "B" and data.ndim == 1 else data.cast("B")
        where = f"{self._where} bytes [{offset}, {offset + len(view)})"
        with self._using(), translated("write", where, writing=True):
            body = len(view) - len(view) % PAGE_BYTES
            if body:
                self._write_pages(offset, _aligned(view[:body]))
            if body < len(view):
                # Direct writing takes whole pages; `complete` cuts the padding off.
                self._write_pages(offset + body, _padded(view[body:]))
        self._ledger.wrote(offset)

    def complete(self) -> None:
        """Make the file durable: its content, its entry, and every folder entry up to the root."""
        self._ledger.require_whole()
        with self._ending, self._using():
            if self._distrust:
                raise UnavailableError(f"{self._where}: {self._distrust}; abort it and write it anew")
            # Never again after a failure: the system may drop pages it could not write and report success next time.
            self._distrust = "an earlier try to make it durable failed, so its bytes cannot be trusted"
            with translated("make durable", self._where, writing=True):
                self._syscalls.ftruncate(self._fd, self._total_bytes)
                self._syscalls.fsync(self._fd)
                if not self._syscalls.fstat(self._fd).st_nlink:
                    raise UnavailableError(f"{self._where}: another process removed it while it was written")
                self._folders.sync(self._parts[:-1])
            self._distrust = ""
            self._completed = True
        self._close_when_unused()

    def abort(self) -> None:
        """Remove the file unless it was completed, and the folders left empty. A write under way ends in nothing.

        Raises:
            UnavailableError: It could not be removed; call again once the cause is healed.
        """
        with self._ending, translated("remove", self._where):
            if self._completed or self._removed:
                return
            try:
                self._remove()
            except OSError:
                # Its descriptor goes in any case: where there are none left, one kept here would keep it so.
                self._close_when_unused()
                raise

    def _prepare(self) -> None:
        try:
            self._syscalls.set_direct(self._fd, True)
            self._direct = True
        except OSError as error:
            if error.errno not in DIRECT_REFUSED:
                raise
        if not self._total_bytes:
            return
        try:
            self._syscalls.fallocate(self._fd, self._total_bytes)
        except OSError as error:
            if error.errno not in RESERVING_REFUSED:
                raise

    def _abandon(self) -> None:
        """Remove what was begun while another error is on its way up."""
        try:
            self._remove()
        except OSError as error:
            _log.warning("left %s behind: %s; no manifest names it", self._where, error)
        self._close_when_unused()

    def _remove(self) -> None:
        # The identity is checked, as another process may have deleted ours and stored its own under the name.
        if self._identity is None and not self._closed:
            self._identity = self._syscalls.fstat(self._fd)
        try:
            with self._folders.opened(self._parts[:-1]) as folder:
                ours = self._identity
                if ours and os.path.samestat(ours, self._syscalls.stat(self._parts[-1], dir_fd=folder)):
                    self._syscalls.unlink(self._parts[-1], dir_fd=folder)
        except FileNotFoundError:
            pass
        self._removed = True
        self._close_when_unused()
        self._folders.prune(self._parts[:-1])

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the descriptor open: once closed, its number may already belong to another file."""
        with self._lock:
            if self._closing:
                raise InvalidError(f"{self._where}: the upload was completed or aborted before")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            self._close_if_last()

    def _close_when_unused(self) -> None:
        with self._lock:
            self._closing = True
        self._close_if_last()

    def _close_if_last(self) -> None:
        with self._lock:
            if not self._closing or self._users or self._closed:
                return
            self._closed = True
        close_quietly(self._syscalls, self._fd)

    def _write_pages(self, offset: int, view: memoryview) -> None:
        """Write whole pages from aligned memory, however many calls it takes."""
        done = barren = 0
        while done < len(view):
            direct = self._direct
            try:
                count = self._syscalls.pwrite(self._fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if not direct or error.errno not in DIRECT_REFUSED:
                    raise
                self._write_buffered_from_now()
                continue
            # A direct write that stopped within a page must begin that page again.
            whole = count - count % PAGE_BYTES if direct else count
            done += whole
            barren = 0 if whole else barren + 1
            if barren > _BARREN_WRITES_MAX:
                raise OSError(errno.EIO, f"{barren} writes in a row stored less than a page")

    def _write_buffered_from_now(self) -> None:
        with self._lock:
            if self._direct:
                self._syscalls.set_direct(self._fd, False)
                self._direct = False


def _aligned(view: memoryview) -> memoryview:
    """Return the same bytes at a page boundary: the view itself, or a copy."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    if address % PAGE_BYTES == 0:
        return view
    return _copied(view, len(view))


def _padded(view: memoryview) -> memoryview:
    """Return the bytes at the front of an own zeroed page."""
    return _copied(view, PAGE_BYTES)


def _copied(view: memoryview, room_bytes: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, room_bytes))
    memory[: len(view)] = view
    return memory
