"""The stores of local folders: a root, or the folder of a near tier."""

from __future__ import annotations

import os

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.shelf import ShelfStore, is_in_memory
from holdfast.core.format.names import MANIFEST_FILE, RUN_FILE
from holdfast.settings import Settings

_MODE_FROM = (RUN_FILE, MANIFEST_FILE)


def local_at(path: str, settings: Settings) -> LocalStore:
    """Return the store of a folder."""
    return LocalStore(path, settings=settings, mode_from=_MODE_FROM)


def near_folder_at(near: str, settings: Settings) -> LocalStore:
    """Return the folder of a near tier: in memory, the memory of deleted files is used again."""
    path = os.path.realpath(os.path.expanduser(near))
    store = ShelfStore if is_in_memory(path) else LocalStore
    return store(path, settings=settings, mode_from=_MODE_FROM)
