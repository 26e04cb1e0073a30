"""Translates errors of the operating system into the five errors of `holdfast.errors`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError, UnavailableError

_NO_PERMISSION = "allow this user to read and write there, or choose another place"

_NEXT_ACTS: dict[type[CheckpointError], dict[int, str]] = {
    UnavailableError: {
        errno.ENOSPC: "free space on this file system, then retry",
        errno.EDQUOT: "free space within the quota or raise it, then retry",
        errno.EIO: "check the disk or mount (kernel log), then retry",
        errno.EMFILE: "raise the limit of open files (ulimit -n), then retry",
        errno.ENFILE: "the whole machine is out of open files; retry once other processes have closed some",
        errno.ENOMEM: "the machine is out of memory; retry once some is free",
        errno.ESTALE: "the network mount lost this file; retry, or remount",
        errno.EAGAIN: "retry",
    },
    InvalidError: {
        errno.EACCES: _NO_PERMISSION,
        errno.EPERM: _NO_PERMISSION,
        errno.EROFS: "the file system is mounted read-only; choose another place, or mount it writable",
        errno.ENAMETOOLONG: "choose a shorter path",
        errno.ENOTDIR: "a folder of the path is a file or a symbolic link; no link below the root is followed",
        errno.ELOOP: "it is a symbolic link, and no link below the root is followed; remove it",
        errno.ENXIO: "it is not a regular file; remove it",
        errno.EISDIR: "a folder has this name; choose another key",
        errno.EFBIG: "the file system or a limit (ulimit -f) forbids a file of this size",
    },
    ConflictError: {errno.EEXIST: "another writer stored it; it was not touched"},
    MissingError: {errno.ENOENT: "it does not exist"},
}
KINDS = {code: (kind, act) for kind, acts in _NEXT_ACTS.items() for code, act in acts.items()}
"""By the number of an error: its kind here, and what to do."""


@contextmanager
def translated(doing: str, where: str, *, writing: bool = False) -> Iterator[None]:
    """Turn every `OSError` that the block raises into a `CheckpointError`.

    The message names the operation, the place, the system's error and what to do.

    Args:
        doing: The operation as a verb, e.g. "store".
        where: Store and key, perhaps a byte range.
        writing: Whether the operation writes. A writer creates its folders, so ENOENT then means that another process
            removed them, or that this node does not see them yet.
    """
    try:
        yield
    except CheckpointError:
        raise  # `MissingError` is an `OSError`, and has its text already.
    except OSError as error:
        code = error.errno or 0
        kind, act = KINDS.get(code, (UnavailableError, "retry, or check the machine"))
        if writing and code == errno.ENOENT:
            kind, act = UnavailableError, "its folder was removed, or this node's cache does not show it yet; retry"
        name = errno.errorcode.get(code, type(error).__name__)
        raise kind(f"could not {doing} {where}: {name} ({os.strerror(code) if code else error}); {act}") from error


def require_regular(status: os.stat_result, where: str) -> None:
    """Require a regular file: a folder of this name counts as no object.

    Raises:
        MissingError: It is a folder.
        InvalidError: It is anything else, such as a symbolic link.
    """
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise MissingError(f"{where}: no such object, but a folder of that name")
    kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
    raise InvalidError(f"{where}: it is {kind}; expected a regular file; remove it")
