"""Saves into a store that takes objects up to a size."""

from __future__ import annotations

import uuid
from dataclasses import replace

import numpy as np

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.errors import InvalidError
from holdfast.settings import PAGE_BYTES
from tests.doubles.framework import GlobalTensor
from tests.support.tuning import tuned
from tests.unit.ranks import PATIENT, World, plain, saved

LIMIT = 8 * PAGE_BYTES


def limited() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex, object_bytes_max=LIMIT)


def state_of(value: float) -> dict[str, GlobalTensor]:
    return {f"w{number}": plain(value + number, count=300 * number) for number in range(1, 20)}


def packs_in(store: MemoryStore) -> list[int]:
    return [entry.bytes for entry in store.list() if entry.key.endswith(".safetensors")]


def test_packs_are_cut_to_the_largest_object() -> None:
    world = World(2, store=limited())

    def part(rank: int, run: CheckpointManager) -> object:
        for step in (1, 2):
            state = state_of(step * 100)
            assert not isinstance(saved(run, step, state), Exception)
            if step == 1:
                for tensor in state.values():
                    tensor.array[...] = -1
                run.load(state)
                assert all(np.all(tensor.array == 100 + number) for number, tensor in enumerate(state.values(), 1))
        return "done"

    assert world.play(part) == ["done", "done"]
    sizes = packs_in(world.store)
    assert len(sizes) > 10 and max(sizes) <= LIMIT


def test_a_tensor_larger_than_the_largest_object_is_cut() -> None:
    world = World(2, store=limited())

    def part(rank: int, run: CheckpointManager) -> object:
        state = {"small": plain(1), "large": plain(2, count=LIMIT)}
        assert not isinstance(saved(run, 1, state), Exception)
        state["large"].array[...] = -1
        run.load(state)
        assert np.all(state["large"].array == 2)
        return "done"

    assert world.play(part) == ["done", "done"]
    assert len(packs_in(world.store)) >= 4 and max(packs_in(world.store)) <= LIMIT


def test_packs_are_smaller_under_a_cap() -> None:
    chosen = tuned(PATIENT, full_pack_bytes=32 * PAGE_BYTES, cell_elements=8 * PAGE_BYTES)
    largest = []
    for cap in (None, 1 << 40):
        world = World(
            1, replace(chosen, max_bytes_per_second=cap), MemoryStore(uuid.uuid4().hex, object_bytes_max=1 << 30)
        )
        state = {f"w{number}": plain(number, count=100 * PAGE_BYTES) for number in range(3)}
        world.play(lambda _, run, state=state: saved(run, 1, state))  # type: ignore[misc]
        assert world.committed() == [1]
        largest.append(max(packs_in(world.store)) // PAGE_BYTES)
    assert largest == [33, 9], "a page of header before 32 pages, or 8"


def test_a_header_larger_than_the_largest_object_is_refused_by_name_and_the_next_save_works() -> None:
    world = World(1, store=limited())
    name = "long" * (LIMIT // 8)

    def part(rank: int, run: CheckpointManager) -> object:
        failure = saved(run, 1, {"small": plain(1), name: plain(2)})
        assert not list(world.store.list("step-000000000001/"))
        assert not isinstance(saved(run, 2, state_of(1)), Exception)
        return failure

    (failure,) = world.play(part)
    assert isinstance(failure, InvalidError)
    assert name in str(failure) and str(LIMIT) in str(failure)
    assert world.committed() == [2]
