"""What must hold of an index before anything is allocated for it or read by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.errors import CheckpointError, CorruptError
from holdfast.plan.cover import uncovered_tensors
from holdfast.ports.clock import Clock
from holdfast.repository.index import Index

RequireStored = Callable[[str], None]
"""Refuses a stored FQN of which a piece is not there in full."""


def require_covered(index: Index, clock: Clock, where: str) -> None:
    """Refuse an index whose pieces leave a hole or overlap: what is read would be memory nobody wrote.

    Raises:
        CorruptError: Names the tensors.
    """
    seed = int.from_bytes(clock.random_bytes(8), "little")
    wrong = uncovered_names(index, seed)
    if wrong:
        raise CorruptError(
            f"{where}: the pieces of {len(wrong)} tensors leave holes or overlap: {wrong[:10]}. Read another copy"
        )


def uncovered_names(index: Index, seed: int) -> list[str]:
    """Return the FQNs of the tensors that their pieces do not cover exactly once.

    Args:
        index: The index.
        seed: Any number; one that nobody can foretell proves it of crafted pieces too.
    """
    pieces = index.pieces
    wrong = uncovered_tensors(index.table.shapes, pieces.tensors, pieces.flat, pieces.starts, pieces.stops, seed)
    names = list(index.tensors)
    return [names[number] for number in wrong]


def stored_by(index: Index, short: Mapping[str, tuple[int, CheckpointError]]) -> RequireStored:
    """Return what refuses tensors that lie where a short pack has ended.

    Args:
        index: The index.
        short: By name, packs not there in full: the bytes there are, and what to say of it.
    """

    def require(fqn: str) -> None:
        if short:
            for piece in index.pieces_of(fqn):
                there, error = short.get(piece.pack, (piece.offset + piece.bytes, None))
                if error is not None and piece.offset + piece.bytes > there:
                    raise type(error)(f"{fqn}: {error}")

    return require
