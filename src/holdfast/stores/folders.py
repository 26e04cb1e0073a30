"""Folders below a root, walked by descriptors so that no symbolic link is ever followed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast.stores.keys import is_part
from holdfast.stores.syscalls import Syscalls, close_quietly

TEMPORARY_PREFIX = ".tmp-"
"""Starts with a dot, so that no key can name it."""

TRIES = 16
"""Another process may remove a folder between our making and our using it; it cannot do so for ever."""

_ROOT = os.O_RDONLY | os.O_DIRECTORY
_BELOW = _ROOT | os.O_NOFOLLOW
_NOT_OURS_TO_SYNC = {errno.EACCES, errno.EPERM, errno.EROFS}
_FOLDER_SYNC_UNKNOWN = {errno.EINVAL, errno.ENOTSUP}

Parts = Sequence[str]


class Folders:
    """The folders of one local store; every call raises the `OSError` that the system gives."""

    def __init__(self, root: str, syscalls: Syscalls, file_mode: int) -> None:
        """Remember where; touches nothing.

        Args:
            root: Absolute path. It may be or lie behind a symbolic link: the user chose it.
            syscalls: The operating system.
            file_mode: Permission bits of files; whoever may read one may also search the folders.
        """
        self._root = root
        self._syscalls = syscalls
        self._mode = 0o700 | file_mode | (file_mode & 0o444) >> 2
        self._ancestors_durable = False

    @contextmanager
    def opened(self, parts: Parts, *, create: bool = False) -> Iterator[int]:
        """Open the folder named by `parts`, making what is missing if `create`; a descriptor, closed on leaving."""
        fd = self._walk(parts, create=create)
        try:
            yield fd
        finally:
            close_quietly(self._syscalls, fd)

    def sync(self, parts: Parts) -> None:
        """Make durable the entries of a folder and of every one above it, up to the root.

        The folders above the root are synced once per store, up to the mount point: this store, or another
        process a moment before, may have made them.
        """
        for depth in range(len(parts), -1, -1):
            with self.opened(parts[:depth]) as fd:
                self.sync_folder(fd)
                if depth == 0 and not self._ancestors_durable:
                    self._sync_ancestors(self._syscalls.fstat(fd).st_dev)
                    self._ancestors_durable = True

    def prune(self, parts: Parts) -> None:
        """Remove a folder and those above it while they are empty; never the root."""
        for depth in range(len(parts), 0, -1):
            try:
                with self.opened(parts[: depth - 1]) as parent:
                    self._syscalls.rmdir(parts[depth - 1], dir_fd=parent)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    return
                raise

    def sweep(self, parts: Parts) -> None:
        """Remove a folder that holds no object at any depth, with its temporary files, and those above it likewise.

        The first folder that holds something stays, without its temporary files. Safe beside live writers: a
        temporary file of theirs is not yet trusted by anyone, has a random name never used again, and is published
        by `link`, which fails once it is gone; they then begin anew.
        """
        for depth in range(len(parts), 0, -1):
            try:
                with self.opened(parts[: depth - 1]) as parent:
                    if not self._sweep_folder(parent, parts[depth - 1]):
                        return
            except FileNotFoundError:
                continue

    def _sweep_folder(self, parent: int, name: str) -> bool:
        fd = self._enter(parent, name, create=False)
        try:
            empty = self._holds_nothing(fd)
            for entry in self._syscalls.listdir(fd):
                if entry.startswith(TEMPORARY_PREFIX):
                    try:
                        self._syscalls.unlink(entry, dir_fd=fd)
                    except IsADirectoryError:
                        empty = False  # Not of our making.
                elif empty:
                    empty = self._sweep_folder(fd, entry)
            if not empty:
                return False
        finally:
            close_quietly(self._syscalls, fd)
        try:
            self._syscalls.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
            return False
        return True

    def _holds_nothing(self, fd: int) -> bool:
        """Return whether a folder holds only temporary files and folders that hold nothing."""
        for name in self._syscalls.listdir(fd):
            mode = self._syscalls.stat(name, dir_fd=fd).st_mode
            if stat.S_ISREG(mode) and name.startswith(TEMPORARY_PREFIX):
                continue
            if not stat.S_ISDIR(mode) or not is_part(name):
                return False
            child = self._syscalls.open(name, _BELOW, dir_fd=fd)
            try:
                if not self._holds_nothing(child):
                    return False
            finally:
                close_quietly(self._syscalls, child)
        return True

    def _walk(self, parts: Parts, *, create: bool) -> int:
        for left in range(TRIES - 1, -1, -1):
            try:
                return self._descend(parts, create=create)
            except FileNotFoundError:
                if not create or not left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _descend(self, parts: Parts, *, create: bool) -> int:
        fd = self._open_root(create=create)
        for name in parts:
            try:
                child = self._enter(fd, name, create=create)
            finally:
                close_quietly(self._syscalls, fd)
            fd = child
        return fd

    def _enter(self, parent: int, name: str, *, create: bool) -> int:
        try:
            return self._syscalls.open(name, _BELOW, dir_fd=parent)
        except FileNotFoundError:
            if not create:
                raise
        except NotADirectoryError as error:
            # As in an object store, nothing lies below an object; a link in its place is refused instead.
            if create or not stat.S_ISREG(self._syscalls.stat(name, dir_fd=parent).st_mode):
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from error
        self._make(name, parent)
        return self._syscalls.open(name, _BELOW, dir_fd=parent)

    def _open_root(self, *, create: bool) -> int:
        try:
            return self._syscalls.open(self._root, _ROOT)
        except FileNotFoundError:
            if not create:
                raise
        self._ancestors_durable = False
        missing = [self._root]
        while (parent := os.path.dirname(missing[-1])) != missing[-1] and not self._exists(parent):
            missing.append(parent)
        for path in reversed(missing):
            self._make(path, None)
        return self._syscalls.open(self._root, _ROOT)

    def _exists(self, path: str) -> bool:
        try:
            close_quietly(self._syscalls, self._syscalls.open(path, os.O_PATH))
        except FileNotFoundError:
            return False
        return True

    def _make(self, path: str, parent: int | None) -> None:
        try:
            self._syscalls.mkdir(path, self._mode, dir_fd=parent)
        except FileExistsError:
            return  # Another rank made it; opening it tells whether it is a folder.

    def sync_folder(self, fd: int) -> None:
        """Make an open folder's entries durable."""
        try:
            self._syscalls.fsync(fd)
        except OSError as error:
            # Some file systems have no such call for folders and order entries themselves.
            if error.errno not in _FOLDER_SYNC_UNKNOWN:
                raise

    def _sync_ancestors(self, device: int) -> None:
        path = os.path.realpath(self._root)
        while (parent := os.path.dirname(path)) != path:
            try:
                fd = self._syscalls.open(parent, _ROOT)
            except OSError as error:
                if error.errno in _NOT_OURS_TO_SYNC:
                    return  # What we may not list, or not write to, was there before this run.
                raise
            try:
                if self._syscalls.fstat(fd).st_dev != device:
                    return
                self.sync_folder(fd)
            finally:
                close_quietly(self._syscalls, fd)
            path = parent
