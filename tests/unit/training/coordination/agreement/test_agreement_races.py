"""Ranks that are refused at the same moment go on together, whatever the order of their reads and writes."""

from __future__ import annotations

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.ports.comm import KeyValueStore
from holdfast.base.types.reports import SaveReport
from holdfast.errors import InvalidError
from tests.unit.ranks import World, saved, sharded


class LateBoard:
    """Lets every other rank close the first opening between this rank's look at one key and its next."""

    def __init__(self, key_value_store: KeyValueStore, looks: int) -> None:
        self._key_value_store, self._looks = key_value_store, looks

    def __getattr__(self, name: str) -> object:
        return getattr(self._key_value_store, name)

    def present(self, *keys: str) -> bool:
        found = self._key_value_store.present(*keys)
        self._looks -= 1
        if self._looks == 0:
            job = keys[0].partition("/")[0]
            self._key_value_store.wait([f"{job}/opening/0/verdict"], 10.0)
        return found


@pytest.mark.parametrize("looks", [1, 2, 3])
def test_a_refusal_that_comes_between_two_looks_at_the_board(looks: int) -> None:
    world = World(2, boards={1: lambda key_value_store: LateBoard(key_value_store, looks)})  # type: ignore[dict-item, return-value]

    def part(rank: int, run: CheckpointManager) -> object:
        # Every rank refuses the first by itself; only one of them can have closed it.
        refused = saved(run, 1, {"w": object()})
        return refused, saved(run, 2, {"w": sharded(2)})

    outcomes = world.play(part)
    for refused, after in outcomes:  # type: ignore[misc]
        assert isinstance(refused, InvalidError), refused
        assert isinstance(after, SaveReport), after
    assert world.committed() == [2]
