"""The system calls of the local store: one thin method per call.

Tests replace this object to inject a fault at the n-th operation of a real process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_log = logging.getLogger(__name__)

UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Error numbers of a call that the file system or the kernel does not support."""

_RENAME_NOREPLACE = 1
_MAP_NORESERVE = 0x4000
"""The flag of Linux, the same on x86-64 and ARM; Python names it from 3.13 on."""


def _libc(*names: str) -> Callable[..., int] | None:
    """Return the first of these functions that exists in the C library, or None."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None
    for name in names:
        call: Callable[..., int] | None = getattr(library, name, None)
        if call is not None:
            return call
    return None


# If the file system cannot reserve space, `posix_fallocate` of the C library writes every block instead. On a network
# file system that takes as long as writing the data. The system call fails instead.
_FALLOCATE = _libc("fallocate64", "fallocate")
_RENAMEAT2 = _libc("renameat2")


def _checked(call: Callable[..., int] | None, *arguments: object) -> None:
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while call(*arguments) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class Syscalls:
    """Every system call of the local store; each raises the `OSError` of the system."""

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        """Open a path, beneath `dir_fd` if given, and return its descriptor; never inherited by children."""
        return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """Close a descriptor; it is released even if this raises."""
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at an offset and return the bytes written, perhaps fewer."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        """Read at an offset and return the bytes read, perhaps fewer."""
        return os.preadv(fd, buffers, offset, flags)

    def map_private(self, fd: int, total_bytes: int) -> mmap.mmap:
        """Map the first `total_bytes` of a file. Writes to the memory stay in this process."""
        try:
            # Without MAP_NORESERVE the system may refuse to map a file larger than the memory that is free: it would
            # need so much if every page were written to.
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            return mmap.mmap(fd, total_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except ValueError as error:
            raise OSError(errno.EIO, f"the file was cut short meanwhile ({error})") from error

    def map_shared(self, fd: int, total_bytes: int) -> mmap.mmap:
        """Map the first `total_bytes` of a file, with all pages. Writes to the memory change the file."""
        return mmap.mmap(fd, total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def lease(self, fd: int, kind: int) -> None:
        """Ask for a lease on an open file, or give one back; the kernel refuses a write lease beside other users."""
        # The kernel sends the holder a signal at another open. Without this it is SIGIO, which ends the process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)

    def duplicate(self, fd: int) -> int:
        """Return another number of an open file."""
        return os.dup(fd)

    def fsync(self, fd: int) -> None:
        """Make a file's content, or a folder's entries, durable."""
        os.fsync(fd)

    def fallocate(self, fd: int, total_bytes: int) -> None:
        """Reserve space for the first `total_bytes` of a file."""
        _checked(_FALLOCATE, fd, 0, ctypes.c_int64(0), ctypes.c_int64(total_bytes))

    def ftruncate(self, fd: int, total_bytes: int) -> None:
        """Set the size of a file."""
        os.ftruncate(fd, total_bytes)

    def fstat(self, fd: int) -> os.stat_result:
        """Return the status of an open file."""
        return os.fstat(fd)

    def fchmod(self, fd: int, mode: int) -> None:
        """Set the permission bits of an open file or folder."""
        os.fchmod(fd, mode)

    def has_default_acl(self, fd: int) -> bool:
        """Return whether an open folder gives its new entries an access control list."""
        try:
            return bool(os.getxattr(fd, "system.posix_acl_default"))
        except OSError:
            return False  # It has none, or its file system knows none.

    def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
        """Return the status of a name; of a link itself, not of its target."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def set_direct(self, fd: int, direct: bool) -> None:
        """Switch direct I/O on or off for an open file."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
        """Give a file a second name unless that name is taken; in another folder if `new_dir_fd` is given."""
        target = dir_fd if new_dir_fd is None else new_dir_fd
        os.link(name, new_name, src_dir_fd=dir_fd, dst_dir_fd=target, follow_symlinks=False)

    def rename(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
        """Rename a file, replacing a file of the new name; into another folder if `new_dir_fd` is given."""
        os.rename(name, new_name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd if new_dir_fd is None else new_dir_fd)

    def rename_noreplace(self, name: str, new_name: str, *, dir_fd: int) -> None:
        """Rename a file unless that name is taken."""
        _checked(_RENAMEAT2, dir_fd, os.fsencode(name), dir_fd, os.fsencode(new_name), _RENAME_NOREPLACE)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        """Remove a name; a link itself, never what it points to."""
        os.unlink(name, dir_fd=dir_fd)

    def mkdir(self, path: str, mode: int, *, dir_fd: int | None = None) -> None:
        """Make one folder."""
        os.mkdir(path, mode, dir_fd=dir_fd)

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        """Remove an empty folder."""
        os.rmdir(name, dir_fd=dir_fd)

    def listdir(self, fd: int) -> list[str]:
        """Return the names in an open folder."""
        return os.listdir(fd)


def switch_to_direct(syscalls: Syscalls, fd: int) -> bool:
    """Switch direct I/O on for an open file; return False if its file system does not support it."""
    try:
        syscalls.set_direct(fd, True)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def reserve_space(syscalls: Syscalls, fd: int, total_bytes: int, *, is_bound: bool = False) -> None:
    """Reserve the space of a new file, if its file system can.

    Args:
        syscalls: The operating system.
        fd: The file.
        total_bytes: Its size.
        is_bound: Whether it may become smaller: then nothing is reserved if there is too little space.
    """
    try:
        if total_bytes:
            syscalls.fallocate(fd, total_bytes)
    except OSError as error:
        if is_bound and error.errno in (errno.ENOSPC, errno.EDQUOT):
            syscalls.ftruncate(fd, 0)  # It may have reserved a part.
        elif error.errno not in UNSUPPORTED:
            raise


def close_quietly(syscalls: Syscalls, fd: int) -> None:
    """Close a descriptor; log an error. For files that were only read, are synced, or will be removed."""
    try:
        syscalls.close(fd)
    except OSError as error:
        _log.warning("closing a descriptor failed: %s; no data was lost", error)


@dataclass(slots=True)
class Closing:
    """Lends a descriptor for the length of a block, then closes it as `close_quietly` does."""

    # Not a generator: every small read opens several folders, and generators made it 15 % slower.
    _syscalls: Syscalls
    _fd: int

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        close_quietly(self._syscalls, self._fd)
