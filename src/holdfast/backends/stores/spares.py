"""Files in memory that nothing names any more, kept so that the next upload writes into their pages.

A fresh page of tmpfs is cleared and mapped before it is written: three times the time of the copy. A file that is
deleted becomes a spare under a hidden name, and an upload takes the smallest spare that holds its object:

    pack -> spare (`retire`, instead of its deletion) -> pack of a new key (`take`, then a link of the upload)
    spare -> gone (`trim`)

No byte changes under a reader: an upload takes a spare only if the kernel grants a write lease, which it refuses while
any other descriptor or mapping of the file exists in any process, and if the file has one name. Readers cannot open a
spare by its name, since no listing and no manifest has it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass

from holdfast.backends.stores.folders import Folders
from holdfast.backends.stores.syscalls import Syscalls, close_quietly
from holdfast.base.clock import Clock

_log = logging.getLogger(__name__)

PREFIX = ".spare-"
"""Begins the hidden names, in the root of the store."""

_REFUSED = {errno.EAGAIN, errno.EACCES}
_Inode = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Spare:
    """A spare that no other process has open; its descriptor keeps others from it."""

    name: str
    """Its hidden name."""

    fd: int
    """An own descriptor, to be closed by the taker."""

    memory: memoryview
    """All bytes of the file."""


class Spares:
    """The spares of one store. Any thread may call."""

    def __init__(self, folders: Folders, syscalls: Syscalls, clock: Clock) -> None:
        """Do no I/O."""
        self._folders, self._syscalls, self._clock = folders, syscalls, clock
        self._lock = threading.Lock()
        self._kept: dict[_Inode, tuple[int, memoryview]] = {}
        """Files of earlier uploads of this process, each with a descriptor and its mapping: mapping takes as long as
        the copy."""
        self._has_leases = True
        weakref.finalize(self, _close_all, self._kept, syscalls).atexit = False

    def keep(self, fd: int, memory: memoryview) -> None:
        """Keep the mapping of a completed upload, in case the file becomes a spare."""
        self._forget_removed()
        with suppress(OSError), self._lock:  # Without descriptors that are left, the file is mapped again.
            status = self._syscalls.fstat(fd)
            self._kept[status.st_dev, status.st_ino] = self._syscalls.duplicate(fd), memory

    def _forget_removed(self) -> None:
        """Let go of files that have no name any more: their memory lives as long as the mapping."""
        with self._lock:
            for inode, (fd, _) in list(self._kept.items()):
                if not self._syscalls.fstat(fd).st_nlink:
                    del self._kept[inode]
                    close_quietly(self._syscalls, fd)

    def retire(self, folder: int, name: str) -> None:
        """Give a file a hidden name instead of its own, if possible: with two names no upload could take it yet."""
        if self._has_leases:
            with suppress(OSError), self._folders.opened(()) as root:
                hidden = PREFIX + self._clock.random_bytes(12).hex()
                self._syscalls.rename(name, hidden, dir_fd=folder, new_dir_fd=root)

    def bytes(self) -> int:
        """Return the bytes of all spares."""
        with suppress(FileNotFoundError), self._folders.opened(()) as root:
            return sum(status.st_size for status in self._found(root).values())
        return 0

    def trim(self, bytes_max: int) -> None:
        """Remove spares until they have at most so many bytes: first those that have another name, then the oldest."""
        most = bytes_max if self._has_leases else 0
        with suppress(FileNotFoundError), self._folders.opened(()) as root:
            found = sorted(self._found(root).items(), key=lambda each: (each[1].st_nlink == 1, each[1].st_ctime_ns))
            left = sum(status.st_size for _, status in found)
            for name, status in found:
                if left > most or status.st_nlink != 1:
                    with suppress(FileNotFoundError):
                        self._syscalls.unlink(name, dir_fd=root)
                    left -= status.st_size
        self._forget_removed()

    def take(self, root: int, bytes_min: int) -> Spare | None:
        """Return a spare of at least so many bytes that no other process has open; None if there is none."""
        found = [(name, status) for name, status in self._found(root).items() if status.st_size >= bytes_min]
        # One whose mapping is kept before any other: of several ranks each takes its own.
        for name, status in sorted(
            found, key=lambda each: ((each[1].st_dev, each[1].st_ino) not in self._kept, each[1].st_size)
        ):
            with suppress(OSError):  # Gone, or no mapping is left: the upload takes fresh pages.
                if self._has_leases and (spare := self._taken(root, name, (status.st_dev, status.st_ino))) is not None:
                    return spare
        self._forget_removed()
        return None

    def _taken(self, root: int, name: str, inode: _Inode) -> Spare | None:
        with self._lock:
            kept = self._kept.pop(inode, None)
        fd = self._syscalls.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=root) if kept is None else kept[0]
        try:
            status = self._syscalls.fstat(fd)
            # The names first: the lease makes other opens wait, and nothing opens a hidden name but an upload.
            if status.st_nlink == 1 and (status.st_dev, status.st_ino) == inode and self._is_alone(fd):
                memory = memoryview(self._syscalls.map_shared(fd, status.st_size)) if kept is None else kept[1]
                spare, fd = Spare(name, fd, memory), -1
                return spare
        finally:
            if fd >= 0:
                close_quietly(self._syscalls, fd)
        return None

    def _is_alone(self, fd: int) -> bool:
        """Return whether this descriptor, with its mapping, is the only one of the file in any process."""
        try:
            self._syscalls.lease(fd, fcntl.F_WRLCK)
        except OSError as refusal:
            if refusal.errno not in _REFUSED:
                self._has_leases = False
                _log.warning(
                    "memory of deleted files is not used again: the kernel grants no leases (%s). Saves into memory "
                    "take fresh pages, which is slower",
                    refusal,
                )
            return False
        self._syscalls.lease(fd, fcntl.F_UNLCK)
        return True

    def _found(self, root: int) -> dict[str, os.stat_result]:
        found = {}
        for name in self._syscalls.listdir(root):
            if name.startswith(PREFIX):
                with suppress(FileNotFoundError):
                    found[name] = self._syscalls.stat(name, dir_fd=root)
        return found


def _close_all(kept: dict[_Inode, tuple[int, memoryview]], syscalls: Syscalls) -> None:
    while kept:
        close_quietly(syscalls, kept.popitem()[1][0])
