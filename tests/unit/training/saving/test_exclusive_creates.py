"""Whether two writers could create one object is asked by rank 0, beside its packs, and known before the commit."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.store import Store, Upload
from holdfast.errors import InvalidError
from tests.unit.ranks import World, fresh_store, saved, sharded


class Asking(ForwardingStore):
    """A store that answers once a pack is on its way, and notes what was done."""

    def __init__(self, inner: Store, *, is_liar: bool) -> None:
        super().__init__(inner)
        self.traits = replace(self.traits, checks_exclusive_creates=True)
        self.done: list[str] = []
        self._is_liar = is_liar
        self._has_packs = threading.Event()

    def require_exclusive_creates(self) -> None:
        assert self._has_packs.wait(60.0), "no pack is written before the answer"
        self.done.append("asked")
        if self._is_liar:
            raise InvalidError("this store let two writers create one object")

    def trust_exclusive_creates(self) -> None:
        self.done.append("trusted")

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        self._has_packs.set()
        return super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        if "/manifest" in key or "/parts/" in key:
            self.done.append(key.rpartition("/")[2])
        super().put_if_absent(key, data, folders_durable=folders_durable)


@pytest.mark.parametrize("is_liar", (False, True))
def test_rank_0_asks_for_all_and_votes_with_the_answer(is_liar: bool) -> None:
    store = fresh_store()
    stores = {rank: Asking(store, is_liar=is_liar) for rank in range(2)}
    world = World(2, store=store, stores=stores)

    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"w": sharded(2)})

    outcomes = world.play(part)
    assert stores[0].done[0] == "asked"
    assert "asked" not in stores[1].done
    if is_liar:
        assert all("let two writers create one object" in str(outcome) for outcome in outcomes)
        assert world.committed() == [] and stores[0].done == ["asked"]
        assert [key for key in world.files() if key.endswith(".safetensors")] == []
        return
    assert world.committed() == [1]
    # Whichever rank commits has the answer by the vote of rank 0.
    assert [name for each in stores.values() for name in each.done if name in ("trusted", "manifest.json")] == [
        "trusted",
        "manifest.json",
    ]
