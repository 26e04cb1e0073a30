"""Ranks that are refused at the same moment go on together, whatever the order of their reads and writes."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidError
from holdfast.ports.comm import Board
from holdfast.runs.run import Run
from holdfast.types.reports import SaveReport
from tests.unit.ranks import World, saved, sharded


class LateBoard:
    """Lets every other rank close the first opening between this rank's look at one key and its next."""

    def __init__(self, board: Board, looks: int) -> None:
        self._board, self._looks = board, looks

    def __getattr__(self, name: str) -> object:
        return getattr(self._board, name)

    def present(self, key: str) -> bool:
        found = self._board.present(key)
        self._looks -= 1
        if self._looks == 0:
            job = key.partition("/")[0]
            self._board.wait([f"{job}/opening/0/verdict", f"{job}/opening/next"], 10.0)
        return found


@pytest.mark.parametrize("looks", [1, 2, 3])
def test_a_refusal_that_comes_between_two_looks_at_the_board(looks: int) -> None:
    world = World(2, boards={1: lambda board: LateBoard(board, looks)})  # type: ignore[dict-item, return-value]

    def part(rank: int, run: Run) -> object:
        # Every rank refuses the first by itself; only one of them can have closed it.
        refused = saved(run, 1, {"w": object()})
        return refused, saved(run, 2, {"w": sharded(2)})

    outcomes = world.play(part)
    for refused, after in outcomes:  # type: ignore[misc]
        assert isinstance(refused, InvalidError), refused
        assert isinstance(after, SaveReport), after
    assert world.committed() == [2]
