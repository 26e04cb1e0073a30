"""What a store says that cannot replace an object at once: one over a file system without such a rename."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from holdfast.base.ports.store import Store


@runtime_checkable
class Replacing(Protocol):
    """A store that cannot always keep the promise that `move` replaces at once what is at the new key."""

    def require_replacing_moves(self) -> None:
        """Require that `move` replaces at once what is at the new key.

        Raises:
            InvalidError: It does not: such a move is refused.
        """
        ...


def require_replacing_moves(store: Store) -> None:
    """Require that `move` replaces at once what is at the new key; most stores always do.

    Raises:
        InvalidError: It does not.
    """
    if isinstance(store, Replacing):
        store.require_replacing_moves()
