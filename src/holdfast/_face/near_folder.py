"""The store of a folder that is a near tier, or that of one node."""

from __future__ import annotations

import os

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.shelf import ShelfStore, is_in_memory
from holdfast.core.format.names import MANIFEST_FILE, RUN_FILE
from holdfast.settings import Settings


def near_folder_at(near: str, settings: Settings) -> LocalStore:
    """Return the folder of a near tier: in memory, the memory of deleted files is used again."""
    path = os.path.realpath(os.path.expanduser(near))
    store = ShelfStore if is_in_memory(path) else LocalStore
    return store(path, settings=settings, mode_from=(RUN_FILE, MANIFEST_FILE))
