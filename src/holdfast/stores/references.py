"""Files that a checkpoint references by URL, read only where the caller allowed it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast.errors import InvalidError
from holdfast.ports.store import Stored
from holdfast.stores.foreign import ForeignFiles

_SCHEME = "file://"


class References:
    """Where referenced files lie, as `Packs` says; each under a folder that was allowed, no link leading out of it."""

    def __init__(self, roots: Sequence[str]) -> None:
        """Remember which folders are allowed, by path or `file://` URL; touches nothing."""
        paths = [root.removeprefix(_SCHEME) for root in roots]
        self._roots = [(os.path.abspath(path).rstrip("/") + "/", ForeignFiles(path)) for path in paths]

    def __call__(self, url: str) -> Stored:
        """Return where a referenced file lies.

        Raises:
            InvalidError: It lies under no allowed folder.
        """
        path = url.removeprefix(_SCHEME)
        for prefix, files in self._roots:
            if path != url and path.startswith(prefix):
                return Stored(files, path[len(prefix) :])
        allowed = ", ".join(prefix for prefix, _ in self._roots) or "none"
        raise InvalidError(
            f"{url}: the checkpoint references this file, and it lies under no folder that may be read for that "
            f"(allowed: {allowed}). If you trust the checkpoint, allow {os.path.dirname(path)!r} or a folder above it: "
            "Settings(allowed_roots=(…,)), on the command line --allow-root"
        )
