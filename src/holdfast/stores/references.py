"""Finds files that a checkpoint references by URL, under folders that the caller allowed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast.errors import InvalidError, first_three
from holdfast.ports.store import Stored
from holdfast.stores.foreign import ForeignFiles

_SCHEME = "file://"


class References:
    """Maps the URL of a referenced file to its place, as a `Packs`.

    The file must be under an allowed folder, and no link may lead out of that folder.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        """Set the allowed folders, by path or `file://` URL; does no I/O."""
        paths = [root.removeprefix(_SCHEME) for root in roots]
        self._roots = [(os.path.abspath(path).rstrip("/") + "/", ForeignFiles(path)) for path in paths]

    def __call__(self, url: str) -> Stored:
        """Return the place of a referenced file.

        Raises:
            InvalidError: The file is under no allowed folder.
        """
        path = url.removeprefix(_SCHEME)
        for prefix, files in self._roots:
            if path != url and path.startswith(prefix):
                return Stored(files, path[len(prefix) :])
        allowed = first_three(prefix for prefix, _ in self._roots) or "none"
        raise InvalidError(
            f"{url}: the checkpoint references this file, but it is under no allowed folder (allowed: {allowed}). If "
            f"you trust the checkpoint, allow {os.path.dirname(path)!r} or a folder above it: "
            "Settings(allowed_roots=(…,)), on the command line --allow-root"
        )
