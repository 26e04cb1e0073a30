"""Objects that a store sends from memory of its caller, so that nothing is copied first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from holdfast.base.ports.store import Upload


@runtime_checkable
class TakesLentMemory(Protocol):
    """A store that can send an object from memory in several places."""

    def lent_upload(self, key: str, parts: Sequence[memoryview]) -> Upload | None:
        """Begin an object that must not exist yet, out of memory that the caller lends; None: only parts are written.

        `Upload.complete` sends it; nothing is written before. The call may wait for other uploads, as `Upload.room`.
        The name is as durable as that of an upload with `folders_durable=False`.

        Args:
            key: Its key.
            parts: Its bytes, one part after the other. They may change until `complete` is called. From then on, until
                it has returned, a change is sent or not. A request that was given up may read them longer, and has no
                effect once another one has stored the object.
        """
        ...
