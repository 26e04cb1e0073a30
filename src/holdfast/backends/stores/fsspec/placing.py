"""How an object gets its name: whole, and only if the name is free, or in place of another.

No way here writes a file under its final name that a reader could see half written, but `replace` where the file system
can neither rename over a file nor store one at once.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any

from holdfast.backends.stores.fsspec import files
from holdfast.backends.stores.fsspec.files import FileSystem, look, remove_file, rename_of_client, renames, stores_whole
from holdfast.backends.stores.fsspec.refusals import is_absent
from holdfast.errors import InvalidError
from holdfast.settings import MIB

_COMPARED_BYTES_MAX = 1 * MIB
"""Bytes that are compared after a rename that says nothing. Whoever else stores a name says so at its beginning: a
manifest names its attempt there."""

_LOCK_SECONDS = 1.0


class Way(Enum):
    """A way to store a file unless its name is taken."""

    LINK = "link"
    """It is written under a hidden name, then linked, as in a local file system."""

    CREATE = "create"
    """The file system stores it at once, on condition that the name is free."""

    RENAME = "rename"
    """It is written under a hidden name, then renamed, which the file system refuses if the name is taken."""

    QUIET_RENAME = "quiet rename"
    """The same, but the refusal has to be found out: the call returns as if it had renamed."""

    LOOK = "look"
    """The name is looked at, then the file is stored. Between the two another writer may come."""


def ways_of(system: FileSystem) -> list[Way]:
    """Return the ways that a file system may have; whether they exclude a second writer has to be tried."""
    ways = []
    if callable(getattr(system, "link", None)):
        ways.append(Way.LINK)
    if stores_whole(system):
        ways.append(Way.CREATE)
    if rename_of_client(system) is not None:
        ways.append(Way.QUIET_RENAME)
    return ways


def refuses_aloud(system: FileSystem, path: str, hidden: str) -> bool:
    """Return whether a rename to a name that is taken raises an error; what is there stays."""
    files.write_file(system, hidden, memoryview(b"third"))
    rename = rename_of_client(system)
    assert rename is not None, "the way was tried before"
    try:
        rename(hidden, path)
    except Exception:  # noqa: BLE001 - the answer
        return True
    finally:
        _discard(system, hidden)
    return False


def create(system: FileSystem, way: Way, path: str, data: memoryview, hidden: str) -> bool:
    """Store a file unless its name is taken; return False if it is.

    Args:
        system: The file system.
        way: How.
        path: Its path.
        data: Its content.
        hidden: A path in the same folder that nobody else uses. Nothing is left there unless the process ends.
    """
    if way is Way.CREATE:
        return _created(system, path, data)
    if way is Way.LOOK:
        if look(system, path) is not None:
            return False
        replace(system, path, data, hidden)
        return True
    place = {Way.LINK: _linked, Way.RENAME: _renamed, Way.QUIET_RENAME: _renamed_quietly}[way]
    for _ in range(files.TRIES):
        placed = _placed_by(place, system, path, data, hidden)
        if placed is not None:
            return placed
    raise OSError(f"another process removes {hidden} again and again")


_Place = Callable[[FileSystem, str, memoryview, str], "bool | None"]


def _placed_by(place: _Place, system: FileSystem, path: str, data: memoryview, hidden: str) -> bool | None:
    """Write a file under a hidden name and give it its name; return None if the hidden one was swept away before."""
    files.write_file(system, hidden, data)
    placed: bool | None = False
    try:
        placed = place(system, path, data, hidden)
    finally:
        if placed is not None:
            _discard(system, hidden)
    return placed


def _linked(system: FileSystem, path: str, data: memoryview, hidden: str) -> bool | None:
    try:
        system.link(hidden, path)
    except FileExistsError:
        return False
    except Exception as error:
        if is_absent(error):
            return None
        raise
    return True


def _renamed(system: FileSystem, path: str, data: memoryview, hidden: str) -> bool | None:
    return _renamed_quietly(system, path, data, hidden, is_sure=True)


def _renamed_quietly(
    system: FileSystem, path: str, data: memoryview, hidden: str, *, is_sure: bool = False
) -> bool | None:
    rename = rename_of_client(system)
    assert rename is not None, "the way was tried before"
    failure: Exception | None = None
    try:
        rename(hidden, path)
    except Exception as error:  # noqa: BLE001 - a refusal has any type: what counts is what is there now
        failure = error
    if failure is None and is_sure:
        return True
    is_left = look(system, hidden) is not None
    found = look(system, path)
    if found is None:
        if is_left and failure is not None:
            raise failure
        return None
    # The hidden file may be swept by another process rather than renamed.
    return not is_left and _is_ours(system, path, found, data)


def _is_ours(system: FileSystem, path: str, found: files.FileInfo, data: memoryview) -> bool:
    """Return whether a file that has appeared is the one renamed, and not another's: the hidden one may be swept."""
    if found.bytes is not None and found.bytes != len(data):
        return False
    if len(data) <= _COMPARED_BYTES_MAX:
        return files.read_whole(system, path) == data
    (begin,) = files.read_ranges(system, path, [(0, _COMPARED_BYTES_MAX)])
    return begin == data[:_COMPARED_BYTES_MAX]


def _created(system: FileSystem, path: str, data: memoryview) -> bool:
    # A file system in the memory of this process looks, and then creates: two threads might both do so.
    lock = _lock_of(path)
    # No longer than a moment: a create that hangs must not hold the next one.
    is_held = lock.acquire(timeout=_LOCK_SECONDS)
    try:
        files.store_whole(system, path, data, mode="create")
    except FileExistsError:
        return False
    finally:
        if is_held:
            lock.release()
    return True


def replace(system: FileSystem, path: str, data: memoryview, hidden: str, *, is_at_once: bool = False) -> None:
    """Store a file in place of one that may be there; at once, if the file system can do that.

    Args:
        system: The file system.
        path: Its path.
        data: Its content.
        hidden: As for `create`.
        is_at_once: Whether a rename is known to replace: one that failed is not taken for a refusal then.
    Raises:
        OSError: It failed.
    """
    if stores_whole(system):
        files.store_whole(system, path, data)
        return
    if renames(system):
        for _ in range(files.TRIES):
            placed = _placed_by(_moved_over, system, path, data, hidden)
            if placed:
                return
            if placed is False:
                break
    if is_at_once:
        raise OSError(f"{hidden} was not renamed to {path}, and the server does not say why")
    files.write_file(system, path, data)


def _moved_over(system: FileSystem, path: str, data: memoryview, hidden: str) -> bool | None:
    """Rename over what is there; return False if that is refused, None if the hidden file was swept away."""
    failure: Exception | None = None
    try:
        system.mv(hidden, path)
    except Exception as error:  # noqa: BLE001 - as above
        failure = error
    if look(system, hidden) is not None:
        return False
    if failure is None or not is_absent(failure):
        if failure is not None:
            raise failure
        return True
    return None


def move(system: FileSystem, path: str, new_path: str, *, replaces: bool) -> None:
    """Give a file another name, in place of what is there if need be.

    Args:
        system: The file system.
        path, new_path: Old and new name.
        replaces: Whether a move replaces what is there at once.
    Raises:
        FileNotFoundError: There is no such file.
        InvalidError: Something is at the new name, and a rename does not replace it at once.
    """
    before = look(system, path)
    if before is None or before.is_folder:
        raise FileNotFoundError(path)
    if renames(system):
        _rename_over(system, path, new_path, replaces=replaces)
        return
    had = look(system, new_path)
    for _ in range(files.TRIES):
        system.cp_file(path, new_path)
        now = look(system, path)
        if now is not None and now.marks == before.marks:
            remove_file(system, path)
            return
        # Another file came to the old name meanwhile, and that one is to be moved; or somebody else moved this one.
        if had is None:
            remove_file(system, new_path)
        if now is None:
            raise FileNotFoundError(path)
        before = now
    raise OSError(f"{path} changes again and again")


def _rename_over(system: FileSystem, path: str, new_path: str, *, replaces: bool) -> None:
    if not replaces and look(system, new_path) is not None:
        raise InvalidError(
            f"{path} cannot be moved: {new_path} exists, and this file system cannot rename over a file at once"
        )
    folder = new_path.rpartition("/")[0]
    for turn in range(files.TRIES):
        if look(system, folder) is None:
            files.make_folder(system, folder)
        try:
            system.mv(path, new_path)
        except Exception as error:
            # The folder may have been removed meanwhile, since it was empty.
            if turn == files.TRIES - 1 or not is_absent(error) or look(system, path) is None:
                raise
            continue
        if not replaces and look(system, new_path) is None:
            raise OSError(f"{path} was not renamed to {new_path}, and the server does not say why")
        return


def _discard(system: FileSystem, path: str) -> None:
    """Remove a hidden file. No listing shows it, so failing to remove it fails nothing: a later removal sweeps it."""
    with suppress(Exception):
        remove_file(system, path)


_guard = threading.Lock()
_locks: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def _lock_of(path: str) -> Any:
    with _guard:
        lock = _locks.get(path)
        if lock is None:
            lock = _locks[path] = threading.Lock()
        return lock


def _forget_threads() -> None:
    global _guard
    _guard = threading.Lock()
    _locks.clear()


os.register_at_fork(after_in_child=_forget_threads)
