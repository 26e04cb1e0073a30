"""Folders of a file system of fsspec: listings in the order of the keys, and the removal of what nobody needs.

fsspec lists a folder whole, so a page is a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from holdfast.backends.stores.folders import TEMPORARY_PREFIX
from holdfast.backends.stores.fsspec.file_systems import FileSystems
from holdfast.backends.stores.fsspec.files import FileInfo, FileSystem, children, look, remove_file
from holdfast.base.ports.keys import Split, is_key, is_listed, is_part, may_lead_to_listed, split_key
from holdfast.base.ports.readable import StoreEntry
from holdfast.errors import InvalidError

Parts = tuple[str, ...]
Where = Callable[[str], str]
"""Returns store and key, for messages."""


def listed(
    systems: FileSystems, where: Where, top: Parts, after: str, up_to: str | None, split: Split = split_key
) -> Iterator[StoreEntry]:
    """Yield every file under a folder whose name a key can have, in the order of the keys."""
    waiting: list[tuple[Parts, FileInfo | None]] = [(top, None)]
    while waiting:
        parts, found = waiting.pop()
        key = "/".join(parts)
        if found is not None and found.is_file:
            if is_listed(key, after, up_to):
                size = found.bytes if found.bytes is not None else size_of(systems, where, key)
                yield StoreEntry(key, size, found.marks)
            continue
        path = systems.path(key)
        below = systems.use("list", where(key), lambda system, path=path: list(children(system, path)))  # type: ignore[misc]
        below = [
            each
            for each in below
            if (each.is_file or each.is_folder)
            and is_name(each.name, split)
            and may_lead_to_listed("/".join((*parts, each.name)), after, up_to)
        ]
        # The last one first, since the first one is taken next.
        below.sort(key=lambda each: f"{each.name}/" if each.is_folder else each.name, reverse=True)
        waiting += [((*parts, each.name), each) for each in below]


def is_name(name: str, split: Split) -> bool:
    """Return whether a part of a key may have this name; a hidden file of a writer has none."""
    return is_key(name, split) and not name.startswith(TEMPORARY_PREFIX)


def size_of(systems: FileSystems, where: Where, key: str) -> int:
    """Return the bytes of a file.

    Raises:
        MissingError: There is none.
        InvalidError: The file system does not say.
    """
    path = systems.path(key)

    def ask(system: FileSystem) -> int:
        found = look(system, path)
        if found is None:
            raise FileNotFoundError
        if found.is_folder:
            raise IsADirectoryError
        if found.bytes is None:
            raise InvalidError(f"{where(key)}: the server does not say how large it is; expected a server that does")
        return found.bytes

    return systems.use("look at", where(key), ask)


def sweep(systems: FileSystems, where: Where, parts: Parts, *, removes_folders: bool) -> None:
    """Remove the hidden files of a folder; without objects at any depth the folder too, then those above likewise.

    This is safe beside live writers. A hidden file has a random name and is renamed or linked. If it is removed before,
    its writer starts again.

    Args:
        systems: The file systems.
        where: For messages.
        parts: The folder.
        removes_folders: Whether the file system spares folders that are not empty when it is asked to remove them.
    """
    for depth in range(len(parts), 0, -1):
        key = "/".join(parts[:depth])
        path = systems.path(key)
        is_empty = systems.use("clean up", where(key), lambda system, path=path: _swept(system, path, removes_folders))  # type: ignore[misc]
        if not is_empty:
            return


def _swept(system: FileSystem, path: str, removes_folders: bool) -> bool:
    """Remove the hidden files of a folder, and the folder if it holds no object; return whether it does not."""
    below = list(children(system, path))
    hidden = [each for each in below if each.is_file and each.name.startswith(TEMPORARY_PREFIX)]
    for each in hidden:
        remove_file(system, f"{path}/{each.name}")
    rest = [each for each in below if each not in hidden]
    is_empty = all(each.is_folder and is_part(each.name) for each in rest)
    for each in rest:
        is_empty = is_empty and _swept(system, f"{path}/{each.name}", removes_folders)
    if is_empty and removes_folders:
        # Refused, if another process has put something there meanwhile.
        with suppress(Exception):
            system.rmdir(path)
    return is_empty
