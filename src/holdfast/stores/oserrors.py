"""Translates errors of the operating system into the five errors of `holdfast.errors`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError, UnavailableError

_NEXT_ACTS: dict[int, tuple[type[CheckpointError], str]] = {
    errno.ENOSPC: (UnavailableError, "free space on this file system, then retry"),
    errno.EDQUOT: (UnavailableError, "free space within the quota or raise it, then retry"),
    errno.EIO: (UnavailableError, "check the disk or mount (kernel log), then retry"),
    errno.EMFILE: (UnavailableError, "raise the limit of open files (ulimit -n), then retry"),
    errno.ENFILE: (
        UnavailableError,
        "the whole machine is out of open files; retry once other processes have closed some",
    ),
    errno.ENOMEM: (UnavailableError, "the machine is out of memory; retry once some is free"),
    errno.ESTALE: (UnavailableError, "the network mount lost this file; retry, or remount"),
    errno.EAGAIN: (UnavailableError, "retry"),
    errno.EACCES: (InvalidError, "allow this user to read and write there, or choose another place"),
    errno.EPERM: (InvalidError, "allow this user to read and write there, or choose another place"),
    errno.EROFS: (InvalidError, "the file system is mounted read-only; choose another place, or mount it writable"),
    errno.ENAMETOOLONG: (InvalidError, "choose a shorter path"),
    errno.ENOTDIR: (
        InvalidError,
        "a folder of the path is a file or a symbolic link; no link below the root is followed",
    ),
    errno.ELOOP: (InvalidError, "it is a symbolic link, and no link below the root is followed; remove it"),
    errno.ENXIO: (InvalidError, "it is not a regular file; remove it"),
    errno.EISDIR: (InvalidError, "a folder has this name; choose another key"),
    errno.EFBIG: (InvalidError, "the file system or a limit (ulimit -f) forbids a file of this size"),
    errno.EEXIST: (ConflictError, "another writer stored it; it was not touched"),
    errno.ENOENT: (MissingError, "it does not exist"),
}


def translate(error: OSError, doing: str, where: str, *, writing: bool) -> CheckpointError:
    """Return one of the five errors; it names the operation, the place, the system's error and what to do.

    Args:
        error: The error of the system.
        doing: The operation as a verb, e.g. "store".
        where: Store and key, perhaps a byte range.
        writing: Whether the operation writes. A writer creates its folders, so ENOENT then means that another process
            removed them.
    """
    code = error.errno or 0
    kind, act = _NEXT_ACTS.get(code, (UnavailableError, "retry, or check the machine"))
    if writing and code == errno.ENOENT:
        kind, act = UnavailableError, "its folder was removed meanwhile; retry"
    name = errno.errorcode.get(code, type(error).__name__)
    return kind(f"could not {doing} {where}: {name} ({os.strerror(code) if code else error}); {act}")


@contextmanager
def translated(doing: str, where: str, *, writing: bool = False) -> Iterator[None]:
    """Translate every `OSError` raised within; arguments as for `translate`."""
    try:
        yield
    except OSError as error:
        raise translate(error, doing, where, writing=writing) from error
