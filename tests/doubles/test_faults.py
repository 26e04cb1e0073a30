"""The faults themselves: met where they were put, nowhere else."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.ports.comm import KeyValueStore
from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError, MissingError, UnavailableError
from holdfast.settings import PAGE_BYTES
from tests.doubles.faults import (
    FaultPoint,
    Faults,
    FaultyKeyValueStore,
    FaultyStore,
    FaultySyscalls,
    raise_error,
    stall_until,
)


class Counters:
    """As much of a board as these tests need."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def add(self, key: str, amount: int, timeout_seconds: float) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        self.values[key] = int(value)

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        return [b"%d" % self.values[key] for key in keys]

    def present(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        return desired

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        assert all(map(self.present, keys))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.values.pop(key, None)


def faulty(name: str, faults: Faults) -> Store:
    return FaultyStore(MemoryStore(name), faults)


def test_only_the_chosen_operation_fails(request: pytest.FixtureRequest) -> None:
    faults = Faults(raise_error(UnavailableError), at=2, names={"put"})
    store = faulty(request.node.name, faults)
    store.put("a", b"1")
    store.put_if_absent("b", b"1")
    with pytest.raises(UnavailableError, match="put of 'c'"):
        store.put("c", b"1")
    store.put("d", b"1")
    assert sorted(entry.key for entry in store.list()) == ["a", "b", "d"]
    assert [(seen.name, seen.subject) for seen in faults.seen] == [
        ("put", "a"),
        ("put_if_absent", "b"),
        ("put", "c"),
        ("put", "d"),
        ("list", ""),
    ]
    assert (faults.counted, faults.met) == (3, 1)


def test_an_open_that_makes_a_file_counts_as_a_change_too(tmp_path: Path) -> None:
    counted = {names: Faults(names=names) for names in (("create",), ("open",), ("unlink",))}
    for number, faults in enumerate(counted.values()):
        syscalls = FaultySyscalls(Syscalls(), faults)
        path = str(tmp_path / str(number))
        syscalls.close(syscalls.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        syscalls.close(syscalls.open(path, os.O_RDONLY))
    assert [faults.counted for faults in counted.values()] == [1, 2, 0]


def test_lasting_until_healed(request: pytest.FixtureRequest) -> None:
    faults = Faults(raise_error(MissingError), at=2, lasting=True)
    store = faulty(request.node.name, faults)
    store.put("a", b"1")
    for _ in range(3):
        with pytest.raises(MissingError):
            store.get("a", 1)
    faults.heal()
    assert store.get("a", 1) == b"1"
    assert faults.met == 3


@pytest.mark.parametrize("name", ("upload", "upload.write", "upload.complete", "upload.abort"))
def test_upload_operations(request: pytest.FixtureRequest, name: str) -> None:
    store = faulty(request.node.name, Faults(raise_error(UnavailableError), names={name}))
    with pytest.raises(UnavailableError, match=f"{name} of 'key'"):
        upload = store.upload("key", 1, PAGE_BYTES)
        upload.write(0, memoryview(b"1"))
        upload.abort()
        upload.complete()


@pytest.mark.parametrize(("after", "expected"), ((False, 0), (True, 5)))
def test_board_before_and_after(after: bool, expected: int) -> None:
    counters = Counters()
    key_value_store: KeyValueStore = FaultyKeyValueStore(
        counters, Faults(raise_error(UnavailableError), names={"add"}, after=after)
    )
    with pytest.raises(CheckpointError, match="add"):
        key_value_store.add("votes", 5, 1.0)
    assert counters.values.get("votes", 0) == expected
    key_value_store.set("votes", b"7", 1.0)
    assert key_value_store.get_many(["votes"], 1.0) == [b"7"]


def test_stalled_operation_goes_on_once_released(request: pytest.FixtureRequest) -> None:
    released = threading.Event()
    stalled = threading.Event()

    def stall(operation: FaultPoint) -> None:
        stalled.set()
        stall_until(released)(operation)

    faults = Faults(stall)
    store = faulty(request.node.name, faults)
    writer = threading.Thread(target=store.put, args=("a", b"1"))
    writer.start()
    assert stalled.wait(30)
    assert list(MemoryStore(request.node.name).list()) == []
    released.set()
    writer.join()
    assert store.get("a", 1) == b"1"
