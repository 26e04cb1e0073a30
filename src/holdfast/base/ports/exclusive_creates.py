"""Stores whose server must show first that it refuses the second of two creates of one key."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class AsksForExclusiveCreates(Protocol):
    """A store that asks its server once a process. `put_if_absent` does it by itself, before what decides something."""

    def require_exclusive_creates(self) -> None:
        """Ask the server, unless this process has asked before.

        Raises:
            InvalidError: It lets two writers create one object.
            CheckpointError: It does not answer, or refuses these credentials.
        """
        ...

    def trust_exclusive_creates(self) -> None:
        """Take note that another process of the job has asked, and that the server does refuse it."""
        ...
