"""Packs in a store of objects: completed beside each other, all durable before the commit, none left by a failure."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.ports.store import Upload
from holdfast.core.engine.parallel_map import CALLS_AT_ONCE
from holdfast.core.engine.writing.completions import Completions
from holdfast.errors import UnavailableError
from holdfast.settings import PAGE_BYTES
from tests.doubles.framework import GlobalTensor
from tests.unit.core.engine.test_lent_memory import Passing
from tests.unit.ranks import PATIENT, World, plain, saved

TOGETHER = 4


class Meeting(MemoryStore):
    """A store of objects whose uploads of packs are completed by several threads at once, or never."""

    def __init__(self) -> None:
        super().__init__(uuid.uuid4().hex, object_bytes_max=4 * PAGE_BYTES)
        self.meets = threading.Barrier(TOGETHER)
        self.failing: int | None = None
        self.begun = self.completed = self.aborted = 0

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:  # type: ignore[override]
        upload = _Met(
            self,
            super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less),
            self.begun,
        )
        self.begun += 1
        return upload


class _Met(Passing):
    def __init__(self, store: Meeting, inner: Upload, number: int) -> None:
        super().__init__(inner)
        self._store, self._number = store, number

    def complete(self, total_bytes: int | None = None) -> None:
        if self._store.failing is None or self._number < TOGETHER:
            self._store.meets.wait(timeout=60)
        if self._number == self._store.failing:
            raise UnavailableError(f"upload {self._number} is cut off")
        super().complete(total_bytes)
        self._store.completed += 1

    def abort(self) -> None:
        super().abort()
        self._store.aborted += 1


def state_of(value: float) -> dict[str, GlobalTensor]:
    """A state of exactly two rounds of packs that meet: each tensor fills one."""
    return {f"w{number}": plain(value + number, count=PAGE_BYTES // 2) for number in range(2 * TOGETHER)}


@pytest.mark.parametrize("arena_bytes_max", [None, 0])
def test_packs_are_completed_beside_each_other_and_all_of_them_before_the_commit(arena_bytes_max: int | None) -> None:
    store = Meeting()
    world = World(1, replace(PATIENT, arena_bytes_max=arena_bytes_max), store)

    def part(rank: int, run: CheckpointManager) -> object:
        state = state_of(10)
        assert not isinstance(saved(run, 1, state), Exception)
        for tensor in state.values():
            tensor.array[...] = -1
        run.load(state)
        assert all(np.all(tensor.array == 10 + number) for number, tensor in enumerate(state.values()))
        return "done"

    assert world.play(part) == ["done"]
    assert store.begun == store.completed == 2 * TOGETHER and not store.aborted


def test_one_that_fails_fails_the_save_and_leaves_nothing() -> None:
    store = Meeting()
    store.failing = 1
    world = World(1, store=store)

    def part(rank: int, run: CheckpointManager) -> object:
        failure = saved(run, 1, state_of(10))
        assert not [entry.key for entry in store.list("step-000000000001/")]
        assert not isinstance(saved(run, 2, state_of(20)), Exception)
        return failure

    (failure,) = world.play(part)
    assert isinstance(failure, UnavailableError) and "upload 1 is cut off" in str(failure)
    assert world.committed() == [2]
    assert store.aborted >= 1


class Gone(Passing):
    """An upload that cannot be completed, nor aborted without an error."""

    def __init__(self, begin: threading.Event) -> None:
        self._begin = begin
        self.is_ended = False

    def complete(self, total_bytes: int | None = None) -> None:
        self._begin.wait(timeout=60)
        raise UnavailableError("the network is down")

    def abort(self) -> None:
        self.is_ended = True
        raise UnavailableError("no thread can be started")


def test_every_upload_is_ended_although_aborting_one_fails() -> None:
    begin = threading.Event()
    # More than there are threads.
    uploads = [Gone(begin) for _ in range(3 * CALLS_AT_ONCE)]
    with pytest.raises(UnavailableError, match="the network is down"), Completions() as completions:
        for upload in uploads:
            completions.begin(upload)
        begin.set()
    assert all(upload.is_ended for upload in uploads)
