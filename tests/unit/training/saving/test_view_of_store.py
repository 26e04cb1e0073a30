"""A save sees its store through one view: its requests share one deadline and a share of the cap, and are counted."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.store import Store, Upload
from holdfast.base.ports.temporary import RetryCounts
from holdfast.settings import PAGE_BYTES
from tests.unit.ranks import PATIENT, World, fresh_store, plain


class Viewed(ForwardingStore):
    """A store of objects that notes through which view a pack is uploaded, and counts one retry for each."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.traits = replace(self.traits, object_bytes_max=1 << 20, appears_whole=True)
        self.view = "none"
        self.uploads: list[str] = []

    @property
    def retry_counts(self) -> RetryCounts:
        return RetryCounts(len(self.uploads), 0.5 * len(self.uploads), len(self.uploads))

    def for_operation(self, name: str, rank: int, world_size: int) -> Store:
        view = copy.copy(self)
        view.view = f"{name}, rank {rank} of {world_size}"
        return view

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        if key.endswith(".safetensors"):
            self.uploads.append(self.view)
        return super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)


@pytest.mark.parametrize("arena_bytes_max", (None, 0))
def test_packs_go_through_the_view_of_their_save(arena_bytes_max: int | None) -> None:
    store = fresh_store()
    stores = {rank: Viewed(store) for rank in range(2)}
    world = World(2, replace(PATIENT, arena_bytes_max=arena_bytes_max), store, stores)

    def part(rank: int, run: CheckpointManager) -> object:
        state = {f"w{number}.{rank}": plain(number, count=PAGE_BYTES) for number in range(3)}
        for step in (1, 2):
            report = run.save(step, state).wait()
            assert (report.retries, report.retry_seconds, report.throttled) == (1, 0.5, 1)
        return "done"

    assert world.play(part) == ["done", "done"]
    for rank, seen in stores.items():
        assert seen.uploads == [f"save of step {step}, rank {rank} of 2" for step in (1, 2)]
