"""Proves that the pieces of an index cover every tensor, before anything is allocated for it or read with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.base.clock import Clock
from holdfast.base.geometry.box import Box
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_checks import cut_short
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.core.plan.cover import uncovered_boxes, uncovered_tensors
from holdfast.errors import CheckpointError, CorruptError, first_three

RequireStored = Callable[[str], None]
"""Refuses a stored FQN that has a piece in the missing part of a pack."""


def require_covered(index: Index, clock: Clock, where: str) -> None:
    """Refuse an index whose pieces leave a hole or overlap: a load would return memory that nothing filled.

    Raises:
        CorruptError: Names the tensors.
    """
    seed = int.from_bytes(clock.random_bytes(8), "little")
    _require_none(uncovered_names(index, seed), where)


def require_wanted_covered(index: Index, wanted: Sequence[tuple[str, Box]], clock: Clock, where: str) -> None:
    """Refuse a partly read index whose pieces do not cover the wanted boxes exactly once.

    Raises:
        CorruptError: Names the tensors.
    """
    seed = int.from_bytes(clock.random_bytes(8), "little")
    regions = [
        (index.tensors[fqn].global_shape, box, [piece.region for piece in index.pieces_near(fqn, box)])
        for fqn, box in wanted
    ]
    _require_none(sorted({wanted[number][0] for number in uncovered_boxes(regions, seed)}), where)


def _require_none(uncovered: Sequence[str], where: str) -> None:
    if uncovered:
        raise CorruptError(
            f"{where}: the pieces of {len(uncovered)} tensors leave holes or overlap: {first_three(uncovered)}. "
            "Read another copy"
        )


def uncovered_names(index: Index, seed: int) -> list[str]:
    """Return the FQNs of the tensors that their pieces do not cover exactly once.

    Args:
        index: The index.
        seed: Any number; an unpredictable one makes the proof hold for maliciously crafted pieces too.
    """
    pieces, table = index.pieces, index.table
    wrong = uncovered_tensors(
        table.ndims, table.lengths, pieces.tensors, pieces.flat, pieces.starts, pieces.stops, seed
    )
    return [table.fqns[number] for number in wrong]


def stored_by(index: Index | SplitIndex, short: Mapping[str, tuple[int, CheckpointError]]) -> RequireStored:
    """Return a function that refuses tensors with a piece past the end of a short pack.

    Args:
        index: The index.
        short: Packs that are shorter than recorded, by name: the bytes that exist, and the error to raise.
    """
    # By index file, on demand: a split index has thousands, of which a rank reads few.
    errors_of: dict[int, Mapping[str, CheckpointError]] = {}

    def error_of(fqn: str) -> CheckpointError | None:
        for file_index in index.files_of(fqn) if isinstance(index, SplitIndex) else (index,):
            if id(file_index) not in errors_of:
                errors_of[id(file_index)] = cut_short(file_index, short)
            error = errors_of[id(file_index)].get(fqn)
            if error is not None:
                return error
        return None

    def require(fqn: str) -> None:
        # What is coded against a tensor needs the bytes of both.
        for stored in (fqn, *index.pairs_of(fqn)) if short else ():
            error = error_of(stored)
            if error is not None:
                raise type(error)(f"{fqn}: {error}")

    return require
