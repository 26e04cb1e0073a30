"""What must hold of an index before anything is allocated for it or read by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.clock import Clock
from holdfast.errors import CheckpointError, CorruptError
from holdfast.format.index.index import Index
from holdfast.format.index.index_checks import cut_short
from holdfast.format.index.split_index import SplitIndex
from holdfast.geometry.box import Box
from holdfast.plan.cover import uncovered_boxes, uncovered_tensors

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


def require_wanted_covered(index: Index, wanted: Sequence[tuple[str, Box]], clock: Clock, where: str) -> None:
    """Refuse an index, of which only a part was read, if its pieces do not hold exactly what is wanted of them.

    Raises:
        CorruptError: Names the tensors.
    """
    seed = int.from_bytes(clock.random_bytes(8), "little")
    regions = [
        (index.tensors[fqn].global_shape, box, [piece.region for piece in index.pieces_near(fqn, box)])
        for fqn, box in wanted
    ]
    wrong = sorted({wanted[number][0] for number in uncovered_boxes(regions, seed)})
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
    at, table = index.pieces, index.table
    wrong = uncovered_tensors(table.ndims, table.lengths, at.tensors, at.flat, at.starts, at.stops, seed)
    return [table.fqns[number] for number in wrong]


def stored_by(index: Index | SplitIndex, short: Mapping[str, tuple[int, CheckpointError]]) -> RequireStored:
    """Return what refuses tensors that lie where a short pack has ended.

    Args:
        index: The index.
        short: By name, packs not there in full: the bytes there are, and what to say of it.
    """
    judged: dict[int, Mapping[str, CheckpointError]] = {}

    def require(fqn: str) -> None:
        if not short:
            return
        for each in index.files_of(fqn) if isinstance(index, SplitIndex) else (index,):
            if id(each) not in judged:
                judged[id(each)] = cut_short(each, short)
            error = judged[id(each)].get(fqn)
            if error is not None:
                raise type(error)(f"{fqn}: {error}")

    return require
