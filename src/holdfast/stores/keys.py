"""The keys that every store accepts, and the names of another system's files."""

from __future__ import annotations

import os
import re

from holdfast.errors import InvalidError

_PART = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,128}")
_KEY_CHARACTERS_MAX = 1024
"""Limit of the large object stores; it also keeps a path well below PATH_MAX."""

_BEHIND_SLASH = chr(ord("/") + 1)
"""`key` with this is behind `key` and all keys below it."""


def is_part(name: str) -> bool:
    """Return whether `name` may stand between two slashes of a key."""
    return _PART.fullmatch(name) is not None


def split_key(key: str) -> tuple[str, ...]:
    """Return the parts of a key.

    Raises:
        InvalidError: It is not a key. Keys are never normalised, since two spellings of one key would be two bugs.
    """
    parts = tuple(key.split("/"))
    if len(key) > _KEY_CHARACTERS_MAX or not all(map(is_part, parts)):
        raise InvalidError(
            f"key {key[:300]!r}: expected at most {_KEY_CHARACTERS_MAX} characters, parts separated by '/', each of "
            "1 to 128 of [A-Za-z0-9._-] and not starting with '.'"
        )
    return parts


def path_beneath(folder: str, name: str, where: str) -> str:
    """Return the path of another system's file in a folder; the folder itself for an empty name.

    Args:
        folder: Path of the folder.
        name: Path of the file relative to it, of any characters.
        where: URL of the folder, for messages.
    Raises:
        InvalidError: A part of the name is empty, `.` or `..`, so it may lead out of the folder.
    """
    parts = name.split("/") if name else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise InvalidError(f"{where}: file {name[:300]!r}; expected a path that stays in the folder")
    return os.path.join(folder, *parts)


def split_prefix(prefix: str) -> tuple[str, ...]:
    """Return the parts of a prefix, which is empty or a key followed by one slash.

    Raises:
        InvalidError: It is neither.
    """
    if not prefix:
        return ()
    if not prefix.endswith("/"):
        raise InvalidError(f"prefix {prefix[:300]!r}: expected an empty one, or one that ends in '/'")
    return split_key(prefix[:-1])


def is_listed(key: str, after: str, up_to: str | None) -> bool:
    """Return whether a key is in the part of a listing that `Store.list` takes as `after` and `up_to`."""
    return key > after and (up_to is None or key <= up_to)


def may_lead_to_listed(key: str, after: str, up_to: str | None) -> bool:
    """Return whether a key, or any key below it, may be in that part."""
    return key + _BEHIND_SLASH > after and (up_to is None or key <= up_to)
