"""How fast storage takes a save, measured before the first one."""

from __future__ import annotations

import errno
import threading
import uuid
from pathlib import Path
from typing import cast

import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.clock import SystemClock
from holdfast.errors import UnavailableError
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.training.runs.preemption import write_bytes_per_second
from tests.doubles.faults import Faults, FaultyStore, FaultySyscalls, fail_with, raise_error

KEY = "step-000000000001/0123456789abcdef/r00000.safetensors"


@pytest.mark.parametrize("limit", (4 * PAGE_BYTES, 5 * PAGE_BYTES, MIB, 10 * MIB, None))
def test_the_probe_is_no_larger_than_the_largest_object(limit: int | None) -> None:
    seen = Faults()
    store = MemoryStore(uuid.uuid4().hex, object_bytes_max=limit)
    assert write_bytes_per_second(FaultyStore(store, seen), KEY, MIB, SystemClock()) > 0
    assert [each.name for each in seen.seen][-2:] == ["upload.complete", "delete"]
    assert list(store.list()) == []


@pytest.mark.parametrize("name", ("pwrite", "fsync", "fallocate"))
def test_a_disk_that_fails_is_the_error(tmp_path: Path, name: str) -> None:
    faults = Faults(fail_with(errno.EIO), names={name})
    store = LocalStore(tmp_path, settings=Settings(), syscalls=cast(Syscalls, FaultySyscalls(Syscalls(), faults)))
    with pytest.raises(UnavailableError, match="EIO"):
        write_bytes_per_second(store, KEY, PAGE_BYTES, SystemClock())
    assert faults.met == 1
    assert list(store.list()) == []


class TogetherStore(MemoryStore):
    """A store that keeps no object before several are sent."""

    def __init__(self, together: int) -> None:
        super().__init__(uuid.uuid4().hex, object_bytes_max=MIB)
        self._barrier = threading.Barrier(together)

    def keep(self, key: str, data: memoryview) -> None:
        self._barrier.wait(20.0)  # Breaks, and fails the probe, unless so many are sent side by side.
        super().keep(key, data)


def test_objects_are_sent_side_by_side_as_by_a_save() -> None:
    store = TogetherStore(8)
    assert write_bytes_per_second(store, KEY, 16 * PAGE_BYTES, SystemClock()) > 0
    assert list(store.list()) == []


def test_nothing_stays_of_objects_if_one_fails() -> None:
    memory = MemoryStore(uuid.uuid4().hex, object_bytes_max=MIB)
    seen = Faults(raise_error(UnavailableError), names={"upload.complete"}, at=2)
    with pytest.raises(UnavailableError, match="injected"):
        write_bytes_per_second(FaultyStore(memory, seen), KEY, 16 * PAGE_BYTES, SystemClock())
    assert list(memory.list()) == []
