"""Asks a store once whether it refuses the second of two creates of one key.

A store that takes both would let two jobs publish one step, and each would believe that its own was kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from holdfast.base.clock import Clock
from holdfast.errors import CheckpointError, ConflictError, InvalidError

_PROBE_BYTES = 12

_TRIES = 2
"""How often the server is asked before it is refused: a collection may remove what looks like an object that a killed
process left, between the two creates."""


def probe_key(clock: Clock) -> str:
    """Return a key that nobody uses, in a folder whose content decides nothing."""
    return f"reports/probe-{clock.random_bytes(_PROBE_BYTES).hex()}"


class Creates(Protocol):
    """What the probe needs of a store."""

    url: str

    def create(self, key: str, data: memoryview) -> None:
        """Store an object unless its key exists."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        ...


def refuses_a_second_create(store: Creates, key: str) -> bool:
    """Create one object twice; return whether the second create was refused. The first object stays.

    Raises:
        CheckpointError: The first one was refused too, or a request failed.
    """
    store.create(key, memoryview(b"first"))
    try:
        store.create(key, memoryview(b"second"))
    except ConflictError:
        return True
    return False


def takes_both(url: str, kept: str) -> InvalidError:
    """Return the error of a store that lets two writers create one object.

    Args:
        url: The store.
        kept: What a store must do to be taken.
    """
    return InvalidError(
        f"{url}: this store let two writers create one object, so two jobs could overwrite each other's checkpoints "
        f"unnoticed. Choose a store that {kept}, or make sure that one job alone writes there: "
        "Settings(object_store=ObjectSettings(single_writer=True))"
    )


_asked: set[str] = set()
"""Places that this process has asked, by URL."""


class Probe:
    """What is known of one server."""

    def __init__(self, store: Creates, clock: Clock, *, is_needed: bool) -> None:
        """Begin without knowledge.

        Args:
            store: The store.
            clock: Source of a random name.
            is_needed: Whether to ask at all.
        """
        self._store, self._clock, self._is_needed = store, clock, is_needed

    def require_exclusive_creates(self) -> None:
        """Ask the server, unless this process has asked before.

        Raises:
            InvalidError: It lets two writers create one object.
            CheckpointError: It does not answer, or refuses these credentials.
        """
        if not self._is_needed or self._store.url in _asked:
            return
        if not any(self._refuses_a_second_create() for _ in range(_TRIES)):
            raise takes_both(self._store.url, "keeps the condition If-None-Match")
        self.trust()

    def trust(self) -> None:
        """Take note that the server need not be asked."""
        _asked.add(self._store.url)

    def _refuses_a_second_create(self) -> bool:
        key = probe_key(self._clock)
        try:
            return refuses_a_second_create(self._store, key)
        finally:
            with suppress(CheckpointError):
                self._store.delete([key])
