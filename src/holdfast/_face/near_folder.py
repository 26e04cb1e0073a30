"""The store of a folder that is a near tier, or that of one node."""

from __future__ import annotations

import os

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.shelf import ShelfStore, is_in_memory
from holdfast.base.ports.store import Store
from holdfast.core.format.names import MANIFEST_FILE, RUN_FILE
from holdfast.errors import InvalidError
from holdfast.settings import Settings


def near_folder_at(near: str, settings: Settings) -> LocalStore:
    """Return the folder of a near tier: in memory, the memory of deleted files is used again."""
    path = os.path.realpath(os.path.expanduser(near))
    store = ShelfStore if is_in_memory(path) else LocalStore
    return store(path, settings=settings, mode_from=(RUN_FILE, MANIFEST_FILE))


def require_outside_root(named: str, path: str, root: Store) -> str:
    """Return the folder of the root; empty for a root that is no folder.

    Args:
        named: The near tier, as the caller names it.
        path: Its folder.
        root: The root of the run.
    Raises:
        InvalidError: The folder is that of the root, lies in there or holds the root.
    """
    at_root = os.path.realpath(root.url) if root.url.startswith("/") else ""
    if at_root and os.path.commonpath([path, at_root]) in (path, at_root):
        raise InvalidError(
            f"near={named}: is the root {root.url}, lies in the root or holds the root; expected a folder of its own. "
            "Nothing was touched. Choose another folder"
        )
    return at_root
