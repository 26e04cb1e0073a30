"""Umasks, users and access control lists, for tests of file permissions."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

OTHER_USER = 12345
GROUP = 23456

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")

_ACL_ENTRY = struct.Struct("<HHI")
_NO_ID = 0xFFFFFFFF


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def as_user(user: int, group: int) -> Iterator[None]:
    """Be another user for a block, with one group; reads and writes are judged as that user's."""
    groups, own_group = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(own_group)
        os.setgroups(groups)


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that every user may search; a temporary folder of pytest is its owner's alone."""
    with TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


def modes_in(folder: Path) -> dict[str, int]:
    """Return the permission bits of a folder and of everything in it, by relative path; folders end in a slash."""
    found = {"/": stat.S_IMODE(folder.stat().st_mode)}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # A lease that has just ended.
            slash = "/" if path.is_dir() else ""
            found[f"{path.relative_to(folder)}{slash}"] = stat.S_IMODE(path.stat().st_mode)
    return found


def require_modes(folder: Path, file_mode: int, folder_mode: int) -> None:
    """Require one mode for all files in a folder, and one for it and all folders in it."""
    found = modes_in(folder)
    wrong = {name: oct(mode) for name, mode in found.items() if mode != (folder_mode if name[-1] == "/" else file_mode)}
    assert not wrong and any(name[-1] != "/" for name in found), wrong


def set_default_acl(folder: Path, *, named_user: int, others: int) -> None:
    """Give a folder a default list: owner and mask all, group and a named user to read, others as given."""
    entries = ((0x01, 7, _NO_ID), (0x02, 5, named_user), (0x04, 5, _NO_ID), (0x10, 7, _NO_ID), (0x20, others, _NO_ID))
    data = struct.pack("<I", 2) + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_default", data)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")


def allowed_by_acl(path: Path, user: int) -> int:
    """Return what the list of a file or folder lets a named user do: its entry, as far as the mask lets it."""
    data = os.getxattr(path, "system.posix_acl_access")[4:]
    entries = list(_ACL_ENTRY.iter_unpack(data))
    named = next(bits for tag, bits, who in entries if tag == 0x02 and who == user)
    return named & next(bits for tag, bits, _ in entries if tag == 0x10)
