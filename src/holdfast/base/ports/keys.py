"""The keys that every store accepts, and the names of another system's files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from holdfast.errors import InvalidError

_PART = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,128}")
_KEY_CHARACTERS_MAX = 1024
"""Limit of the large object stores, which also keeps a path well below PATH_MAX."""

_BEHIND_SLASH = chr(ord("/") + 1)
"""`key` plus this character sorts after `key` and all keys below `key`."""


def is_part(name: str) -> bool:
    """Return whether `name` may stand between two slashes of a key."""
    return _PART.fullmatch(name) is not None


def split_key(key: str) -> tuple[str, ...]:
    """Return the parts of a key.

    Raises:
        InvalidError: The text is not a key. Keys are never normalised: two spellings of one key would be two bugs.
    """
    parts = tuple(key.split("/"))
    if len(key) > _KEY_CHARACTERS_MAX or not all(map(is_part, parts)):
        raise InvalidError(
            f"key {key[:300]!r}: expected at most {_KEY_CHARACTERS_MAX} characters, parts separated by '/', each of "
            "1 to 128 of [A-Za-z0-9._-] and not starting with '.'"
        )
    return parts


def split_name(name: str) -> tuple[str, ...]:
    """Return the parts of the name of another system's file.

    Raises:
        InvalidError: A part is empty, `.` or `..`, and may lead out of the folder; or a character is not printable.
    """
    parts = tuple(name.split("/"))
    if len(name) > _KEY_CHARACTERS_MAX or any(part in ("", ".", "..") for part in parts) or not name.isprintable():
        raise InvalidError(
            f"file {name[:300]!r}: expected a path of at most {_KEY_CHARACTERS_MAX} printable characters, that stays "
            "in its folder"
        )
    return parts


Split = Callable[[str], tuple[str, ...]]
"""Splits a key; raises InvalidError if the key is malformed: `split_key` or `split_name`."""


def is_key(text: str, split: Split) -> bool:
    """Return whether a text is a key."""
    try:
        split(text)
    except InvalidError:
        return False
    return True


def path_beneath(folder: str, name: str, where: str) -> str:
    """Return the path of another system's file in a folder; the folder itself for an empty name.

    Args:
        folder: Path of the folder.
        name: Path of the file relative to the folder, of any characters.
        where: URL of the folder, for messages.
    Raises:
        InvalidError: A part of the name is empty, `.` or `..`, and may lead out of the folder.
    """
    parts = name.split("/") if name else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise InvalidError(f"{where}: file {name[:300]!r}; expected a path that stays in the folder")
    return os.path.join(folder, *parts)


def split_prefix(prefix: str, split: Split = split_key) -> tuple[str, ...]:
    """Return the parts of a prefix, which is empty or a key followed by one slash.

    Args:
        prefix: The prefix.
        split: Splits the key.
    Raises:
        InvalidError: The prefix has another form.
    """
    if not prefix:
        return ()
    if not prefix.endswith("/"):
        raise InvalidError(f"prefix {prefix[:300]!r}: expected an empty one, or one that ends in '/'")
    return split(prefix[:-1])


def is_listed(key: str, after: str, up_to: str | None) -> bool:
    """Return whether a key is in the part of a listing that `Store.list` takes as `after` and `up_to`."""
    return key > after and (up_to is None or key <= up_to)


def may_lead_to_listed(key: str, after: str, up_to: str | None) -> bool:
    """Return whether a key, or any key below that key, may be in the part of `is_listed`."""
    return key + _BEHIND_SLASH > after and (up_to is None or key <= up_to)
