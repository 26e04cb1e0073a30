"""Folders below a root, opened one by one through descriptors, so that no symbolic link is followed."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TypeVar

from holdfast.backends.stores.syscalls import Closing, Syscalls, close_quietly
from holdfast.base.clock import Clock
from holdfast.base.ports.keys import is_part
from holdfast.errors import InvalidError, UnavailableError

_log = logging.getLogger(__name__)

TEMPORARY_PREFIX = ".tmp-"
"""Begins names of temporary files. It starts with a dot, so no key can name them."""

_ROOT = os.O_RDONLY | os.O_DIRECTORY
_SUBFOLDER = _ROOT | os.O_NOFOLLOW
_NOT_OURS_TO_SYNC = {errno.EACCES, errno.EPERM, errno.EROFS}
_FOLDER_SYNC_UNKNOWN = {errno.EINVAL, errno.ENOTSUP}

LAG_PAUSES = tuple(min(0.01 * 2**count, 1.0) for count in range(16))
"""Seconds between two looks for a folder that another node made, ten in all. A network mount shows such a folder within
seconds: it forgets that a name is absent when a call shows that the name exists."""

Parts = Sequence[str]
_Result = TypeVar("_Result")


def modes_of(file_mode: int | None) -> tuple[int, int]:
    """Return the permission bits with which files and folders are made; the umask, or a default ACL, takes from them.

    Users who may read a file may also search its folders.

    Args:
        file_mode: Bits of files; None for all that the umask leaves.
    """
    bits = 0o666 if file_mode is None else file_mode
    return bits, 0o700 | bits | (bits & 0o444) >> 2


def not_shown(path: str, found: str) -> UnavailableError:
    """Return the error of a folder or file that this node still cannot open after all pauses."""
    return UnavailableError(
        f"{path}: {found} for {sum(LAG_PAUSES):.0f} s; the cache of this node may not show yet what another node did. "
        "Retry, or check the mount on this node"
    )


class Folders:
    """The folders of one local store; every call raises the `OSError` that the system gives.

    One case is not the system's: a root that is a symbolic link to nothing raises `InvalidError`.
    """

    def __init__(
        self, root: str, syscalls: Syscalls, clock: Clock, file_mode: int | None, mode_from: Sequence[str]
    ) -> None:
        """Set the root; does no I/O.

        Args:
            root: Absolute path. It may contain symbolic links: the user chose it.
            syscalls: The operating system.
            clock: Pauses while the cache of this node lags behind another node.
            file_mode: Permission bits of new files, less those that the umask takes.
            mode_from: If there is no `file_mode`, the first of these files in the root that exists gives the bits, and
                the umask takes none of them.
        """
        self._root = root
        self._syscalls = syscalls
        self._clock = clock
        self._file_mode, self._folder_mode = modes_of(file_mode)
        self._mode_from = mode_from if file_mode is None else ()
        self._found_mode: int | None = None
        self._ancestors_durable = False

    def found_mode(self) -> int | None:
        """Return the permission bits of the files that are in the root already; None if none of them counts."""
        if self._mode_from:
            with suppress(FileNotFoundError, NotADirectoryError), self.opened(()) as root:
                self._found_mode = self._mode_in(root)
                if self._found_mode is not None:
                    self._file_mode, self._folder_mode = modes_of(self._found_mode)
            self._mode_from = ()  # Last: another thread looks for itself until then.
        return self._found_mode

    def _mode_in(self, root: int) -> int | None:
        for name in self._mode_from:
            with suppress(FileNotFoundError):
                mode = self._syscalls.stat(name, dir_fd=root).st_mode
                if stat.S_ISREG(mode):
                    return mode & 0o666 | 0o600
        return None

    def create(self, name: str, flags: int, *, folder: int) -> int:
        """Create a file in an open folder, and return its descriptor."""
        self.found_mode()
        fd = self._syscalls.open(name, flags, self._file_mode, dir_fd=folder)
        self._keep_mode(fd, folder, self._file_mode)
        return fd

    def _keep_mode(self, fd: int, parent: int, mode: int) -> None:
        """Add the permission bits that the files found have and the umask took; a default ACL counts more than both."""
        if self._found_mode is None:
            return
        try:
            given = stat.S_IMODE(self._syscalls.fstat(fd).st_mode)
            if mode & ~given and not self._syscalls.has_default_acl(parent):
                self._syscalls.fchmod(fd, given | mode)
        except OSError as error:
            # The file is no more private than asked for, and not every file system has permission bits.
            _log.debug("%s: a new file or folder keeps the permissions of the umask: %s", self._root, error)

    def opened(self, parts: Parts, *, create: bool = False) -> AbstractContextManager[int]:
        """Lend a descriptor of the folder named by `parts`; create missing folders if `create`."""
        return Closing(self._syscalls, self.again(parts, lambda: self._open(parts, create=create)))

    def open_file(self, parts: Parts, flags: int) -> int:
        """Open a file that exists, and return its descriptor."""

        def open_once() -> int:
            with Closing(self._syscalls, self._open(parts[:-1], create=False)) as folder:
                return self._syscalls.open(parts[-1], flags, dir_fd=folder)

        return self.again(parts, open_once)

    def again(self, parts: Parts, act: Callable[[], _Result]) -> _Result:
        """Return what `act` returns. While it fails with ESTALE, call it again after a pause.

        A network mount gives ESTALE for a file or folder that another node replaced. The next look finds the new one.

        Raises:
            UnavailableError: It still does after the last pause.
        """
        for pause in LAG_PAUSES:
            try:
                return act()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                stale = error
            self._clock.sleep(pause)
        raise not_shown("/".join((self._root, *parts)), "ESTALE (Stale file handle)") from stale

    def _open(self, parts: Parts, *, create: bool) -> int:
        fd = self._open_root(create=create)
        for depth, name in enumerate(parts, start=1):
            with Closing(self._syscalls, fd):
                try:
                    fd = self._enter(fd, name)
                except FileNotFoundError:
                    if not create:
                        raise
                    fd = self._make("/".join((self._root, *parts[:depth])), _SUBFOLDER, fd)
        return fd

    def sync(self, parts: Parts, *, may_be_removed: bool = False) -> None:
        """Make durable the entries of a folder and of every folder above it, up to the root.

        The folders above the root are synced once per store, up to the mount point: this store may have created them,
        or another process a moment before.

        Args:
            parts: The folder.
            may_be_removed: Whether another process may have removed folders below the root meanwhile. Those above them
                are synced: so the removal is durable too.
        """
        for depth in range(len(parts), -1, -1):
            try:
                folder = self.opened(parts[:depth])
            except FileNotFoundError:
                if may_be_removed and depth:
                    continue
                raise
            with folder as fd:
                self.sync_folder(fd)
                if depth == 0 and not self._ancestors_durable:
                    self._sync_ancestors(self._syscalls.fstat(fd).st_dev)
                    self._ancestors_durable = True

    def prune(self, parts: Parts) -> None:
        """Remove a folder and then its ancestors, as long as they are empty; never the root."""
        self._remove_upwards(parts, self._remove_empty)

    def sweep(self, parts: Parts) -> None:
        """Remove a folder without objects at any depth, and its temporary files; then its ancestors likewise.

        The first folder that holds an object stays, without its temporary files. This is safe beside live writers. A
        writer's temporary file has a random name and is published by `link`. If it is removed, `link` fails, and the
        writer starts again.
        """
        self.again(parts, lambda: self._remove_upwards(parts, self._sweep_folder))

    def _remove_upwards(self, parts: Parts, remove: Callable[[int, str], bool]) -> None:
        """Call `remove` with the parent and the name of a folder, then of its ancestors, until it returns False."""
        for depth in range(len(parts), 0, -1):
            with suppress(FileNotFoundError), self.opened(parts[: depth - 1]) as parent:
                if not remove(parent, parts[depth - 1]):
                    return

    def _remove_empty(self, parent: int, name: str) -> bool:
        """Remove a folder if it is empty; return whether it was."""
        try:
            self._syscalls.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
            return False
        return True

    def _sweep_folder(self, parent: int, name: str) -> bool:
        with Closing(self._syscalls, self._enter(parent, name)) as fd:
            empty = self._holds_nothing(fd)
            for entry in self._syscalls.listdir(fd):
                if entry.startswith(TEMPORARY_PREFIX):
                    try:
                        self._syscalls.unlink(entry, dir_fd=fd)
                    except IsADirectoryError:
                        empty = False  # A folder with the prefix of temporary files: not created here.
                elif empty:
                    empty = self._sweep_folder(fd, entry)
        return empty and self._remove_empty(parent, name)

    def _holds_nothing(self, fd: int) -> bool:
        """Return whether a folder holds only temporary files and folders of which the same is true."""
        for name in self._syscalls.listdir(fd):
            mode = self._syscalls.stat(name, dir_fd=fd).st_mode
            if stat.S_ISREG(mode) and name.startswith(TEMPORARY_PREFIX):
                continue
            if not stat.S_ISDIR(mode) or not is_part(name):
                return False
            with Closing(self._syscalls, self._syscalls.open(name, _SUBFOLDER, dir_fd=fd)) as child:
                if not self._holds_nothing(child):
                    return False
        return True

    def _enter(self, parent: int, name: str) -> int:
        try:
            return self._syscalls.open(name, _SUBFOLDER, dir_fd=parent)
        except NotADirectoryError as error:
            # Below an object there is nothing, as in an object store. A link in its place is an error.
            if not stat.S_ISREG(self._syscalls.stat(name, dir_fd=parent).st_mode):
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from error

    def _make(self, path: str, flags: int, parent: int | None = None) -> int:
        """Make a folder unless it exists, and open it: beneath `parent`, if given, by the last part of the path.

        The cache of a node may remember that a folder is absent which another node has made since. Then `mkdir` says
        that the folder exists, and opening it says that it does not.

        Raises:
            UnavailableError: They still do after the last pause.
        """
        self.found_mode()
        name = path if parent is None else os.path.basename(path)
        for pause in LAG_PAUSES:
            is_new = True
            try:
                self._syscalls.mkdir(name, self._folder_mode, dir_fd=parent)
            except FileExistsError:
                is_new = False  # Another rank created it; opening it shows whether it is a folder.
            try:
                fd = self._syscalls.open(name, flags, dir_fd=parent)
            except FileNotFoundError as error:
                if is_new:
                    raise  # It was removed in between.
                hidden = error
            else:
                if is_new and parent is not None:
                    self._keep_mode(fd, parent, self._folder_mode)
                return fd
            self._clock.sleep(pause)
        raise not_shown(path, "mkdir reports EEXIST and open reports ENOENT") from hidden

    def _open_root(self, *, create: bool) -> int:
        try:
            return self._syscalls.open(self._root, _ROOT)
        except FileNotFoundError:
            missing = [self._root]
            while (parent := os.path.dirname(missing[-1])) != missing[-1] and not self._exists(parent):
                missing.append(parent)
            # A reader that took it for an empty root would make training begin anew; no writer can create it.
            _require_no_link(missing[-1])
            if not create:
                raise
        self._ancestors_durable = False
        for path in reversed(missing[1:]):
            close_quietly(self._syscalls, self._make(path, os.O_PATH))
        return self._make(self._root, _ROOT)

    def _exists(self, path: str) -> bool:
        try:
            close_quietly(self._syscalls, self._syscalls.open(path, os.O_PATH))
        except FileNotFoundError:
            return False
        return True

    def sync_folder(self, fd: int) -> None:
        """Make an open folder's entries durable."""
        try:
            self._syscalls.fsync(fd)
        except OSError as error:
            # Some file systems cannot sync folders; they order entries themselves.
            if error.errno not in _FOLDER_SYNC_UNKNOWN:
                raise

    def _sync_ancestors(self, device: int) -> None:
        path = os.path.realpath(self._root)
        while (parent := os.path.dirname(path)) != path:
            try:
                fd = self.again((), partial(self._syscalls.open, parent, _ROOT))
            except OSError as error:
                if error.errno in _NOT_OURS_TO_SYNC:
                    return  # A folder that we may not list or write to was created by somebody else before.
                raise
            with Closing(self._syscalls, fd):
                if self._syscalls.fstat(fd).st_dev != device:
                    return
                self.sync_folder(fd)
            path = parent


def _require_no_link(missing: str) -> None:
    """Refuse a path that does not exist because it is a symbolic link to nothing."""
    with suppress(OSError):
        target = os.readlink(missing)
        if not os.path.exists(missing):
            raise InvalidError(
                f"{missing} is a symbolic link to {target}, which does not exist; expected a folder. Mount or create "
                "the folder, or remove the link"
            )
