"""Uploads to a file: several threads write it, with direct I/O if the file system supports it.

An upload passes through these states; all moves are made under `_lock` or `_ending`:

    open -> completed (`complete`: every part written, then durable) -> closed (by the last user of the descriptor)
    open -> distrusted (`complete` fails: the system may have dropped pages; only `abort` is left)
    open or distrusted -> removed (`abort`, or a failed beginning) -> closed (by the last user of the descriptor)
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.backends.stores.folders import Folders
from holdfast.backends.stores.oserrors import translated
from holdfast.backends.stores.syscalls import UNSUPPORTED, Syscalls, close_quietly, reserve_space, switch_to_direct
from holdfast.base.ports.parts import PartLedger, is_page_aligned
from holdfast.base.ports.readable import Release
from holdfast.errors import InvalidError, UnavailableError
from holdfast.settings import PAGE_BYTES

_log = logging.getLogger(__name__)

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
"""How a file is opened that must not exist yet."""

_SHORT_WRITES_MAX = 8
"""Consecutive writes of less than a page before the upload fails: a full disk does this just before ENOSPC."""


class LocalUpload:
    """A file under its final name; not to be trusted before `complete` has returned."""

    def __init__(
        self,
        syscalls: Syscalls,
        folders: Folders,
        folder: int,
        parts: tuple[str, ...],
        ledger: PartLedger,
        *,
        may_be_less: bool = False,
        fd: int | None = None,
        is_reserved: bool = False,
    ) -> None:
        """Create the file in the open `folder` and reserve its space; if that fails, remove the file.

        Args:
            syscalls: The operating system.
            folders: The folders of the store.
            folder: Descriptor of the file's folder.
            parts: Parts of the key.
            ledger: Sizes and place of the object; no part is written yet.
            may_be_less: Whether the file may become smaller than that.
            fd: The file, if it is there under its name; the upload closes the descriptor.
            is_reserved: Whether to reserve nothing.
        """
        self._syscalls = syscalls
        self._folders = folders
        self._parts = parts
        self._ledger = ledger
        self.makes_folders_durable = True
        """Whether `complete` makes durable every folder entry too, from the file up to the root."""
        self._where = ledger.where
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        # Users of the descriptor: the upload until it ends, and each running call. The last one closes it.
        self._users = 1
        self._ended = False
        self._completed = False
        self._removed = False
        self._distrust = ""
        self._identity: os.stat_result | None = None
        self._fd = folders.create(parts[-1], NEW, folder=folder) if fd is None else fd
        try:
            self._direct = switch_to_direct(syscalls, self._fd)
            if not is_reserved:
                reserve_space(syscalls, self._fd, ledger.bytes_max, is_bound=may_be_less)
        except BaseException:
            try:
                self._remove()
            except OSError as error:
                _log.warning("left %s behind: %s; no manifest names it", self._where, error)
            raise

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        """Return None: a file takes bytes from any memory."""

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        """Write one part, from any thread."""
        try:
            self._write(offset, data)
        finally:
            if release is not None:
                release()

    def _write(self, offset: int, data: memoryview) -> None:
        self._ledger.check(offset, data.nbytes)
        view = data if data.format == "B" and data.ndim == 1 else data.cast("B")
        where = f"{self._where} bytes [{offset}, {offset + len(view)})"
        with self._using(), translated("write", where, writing=True):
            body = len(view) - len(view) % PAGE_BYTES
            if body:
                pages = view[:body]
                self._write_pages(offset, pages if is_page_aligned(pages) else _copied(pages, body))
            if body < len(view):
                # Direct I/O writes whole pages; `complete` truncates the padding.
                self._write_pages(offset + body, _copied(view[body:], PAGE_BYTES))
        self._ledger.note_written(offset, data.nbytes)

    def complete(self, total_bytes: int | None = None) -> None:
        """Make the file durable: its content, and every folder entry from it up to the root if wanted."""
        total = self._ledger.require_whole(total_bytes)
        with self._ending, self._using():
            if self._distrust:
                raise UnavailableError(f"{self._where}: {self._distrust}; abort the upload and write it again")
            # A second fsync must not count: the system may drop pages that it could not write, and then report success.
            self._distrust = "an earlier fsync failed, so its bytes cannot be trusted"
            with translated("make durable", self._where, writing=True):
                self._syscalls.ftruncate(self._fd, total)
                self._syscalls.fsync(self._fd)
                if not self._syscalls.fstat(self._fd).st_nlink:
                    raise UnavailableError(f"{self._where}: another process removed it while it was written")
                if self.makes_folders_durable:
                    self._folders.sync(self._parts[:-1])
            self._distrust = ""
            self._completed = True
        self._close_when_unused()

    def abort(self) -> None:
        """Remove the file unless it was completed, and folders that are then empty. Writes under way have no effect.

        Raises:
            UnavailableError: The file could not be removed; call again once the cause is gone.
        """
        with self._ending, translated("remove", self._where):
            if not self._completed and not self._removed:
                self._remove()

    def _remove(self) -> None:
        try:
            # Compare the identity: another process may have deleted this file and stored its own under the name.
            if self._identity is None and self._users:
                self._identity = self._syscalls.fstat(self._fd)
            with suppress(FileNotFoundError), self._folders.opened(self._parts[:-1]) as folder:
                ours = self._identity
                if ours and os.path.samestat(ours, self._syscalls.stat(self._parts[-1], dir_fd=folder)):
                    self._syscalls.unlink(self._parts[-1], dir_fd=folder)
            self._removed = True
        finally:
            # Close the descriptor in any case: the cause of a failure may be a lack of descriptors.
            self._close_when_unused()
        self._folders.prune(self._parts[:-1])

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the descriptor open for a block: after a close its number may belong to another file."""
        with self._lock:
            if self._ended:
                raise InvalidError(f"{self._where}: the upload was completed or aborted before")
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _close_when_unused(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            close_quietly(self._syscalls, self._fd)

    def _write_pages(self, offset: int, view: memoryview) -> None:
        """Write whole pages from aligned memory, in as many calls as needed."""
        done = short = 0
        while done < len(view):
            direct = self._direct
            try:
                count = self._syscalls.pwrite(self._fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if not direct or error.errno not in UNSUPPORTED:
                    raise
                with self._lock:
                    if self._direct:  # Another thread may have switched it off meanwhile.
                        self._syscalls.set_direct(self._fd, False)
                        self._direct = False
                continue
            # A direct write that stopped inside a page must write that page again.
            whole = count - count % PAGE_BYTES if direct else count
            done += whole
            short = 0 if whole else short + 1
            if short > _SHORT_WRITES_MAX:
                raise OSError(errno.EIO, f"{short} consecutive writes stored less than a page")


def _copied(view: memoryview, copy_bytes: int) -> memoryview:
    """Return a copy of the bytes at the front of zeroed, page-aligned memory."""
    memory = memoryview(mmap.mmap(-1, copy_bytes))
    memory[: len(view)] = view
    return memory
