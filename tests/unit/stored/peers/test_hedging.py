"""Reads of packs whose node is slow: through parity, beside the node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.base.clock import SystemClock
from holdfast.errors import UnavailableError
from holdfast.settings import MIB, Settings
from holdfast.stored.peers.hedging import Paces
from holdfast.stored.peers.parity_files import WINDOW_BYTES
from holdfast.stored.peers.union import PeerStore
from tests.unit.stored.peers.test_union import Nodes, SilentStore, read

SIZE = 200_000


class HandClock(SystemClock):
    """A clock that the test sets."""

    now = 1000.0

    def monotonic_seconds(self) -> float:
        return self.now


class StuckStore(SilentStore):
    """A node that answers reads only once it is let go, and has damaged bytes by then."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.go, self.ended, self.reads = threading.Event(), threading.Event(), 0

    def read_into(self, key: str, ranges: Any, buffers: Any, on_range: Any = None) -> None:
        self.reads += 1
        is_late = not self.go.is_set()
        self.go.wait()
        super().read_into(key, ranges, buffers, on_range)
        for buffer in buffers if is_late else ():
            buffer[:] = bytes(buffer.nbytes)
        self.ended.set()


class Job:
    """Four nodes with parity, of which node 2 is stuck."""

    def __init__(self, folder: Path, sizes: list[int], *, is_protected: bool = True) -> None:
        self.nodes, self.clock = Nodes(folder, 4), HandClock()
        self.stuck = StuckStore(folder / "node-2", settings=Settings())
        self.nodes.stores["node-2"] = self.stuck
        self.stuck.go.set()
        self.packs = self.nodes.put_packs(sizes)
        if is_protected:
            self.nodes.protect()
        self.stuck.go.clear()
        self.stuck.ended.clear()
        self.stuck.reads = 0
        self.key = [*self.packs][2]
        self.store = PeerStore("peers://run", self.nodes.stores, "node-0", ["node-0"], clock=self.clock)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def job(*arguments: Any, **more: Any) -> Job:
        made.append(Job(tmp_path, *arguments, **more))
        return made[-1]

    yield job
    for each in made:
        each.stuck.go.set()


def test_a_node_that_is_stuck_is_read_through_parity(
    make: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    job = make([SIZE] * 4)
    whole = job.packs[job.key]
    memory = bytearray(SIZE)
    with caplog.at_level(logging.WARNING):
        job.store.read_into(job.key, [(0, SIZE)], [memoryview(memory)])
        assert bytes(memory) == whole
        assert read(job.store, job.key, 5, 70_000) == whole[5:70_000], "the node is not asked"
    assert job.stuck.reads == 1 and not job.stuck.ended.is_set()
    assert [record.message for record in caplog.records if "node-2" in record.message] == [
        "peers://run: node node-2 is slow: 195.3 KiB have not come after 0.3 s. Packs of the node are read through "
        "parity for now"
    ]


def test_bytes_that_come_late_go_nowhere(make: Callable[..., Job]) -> None:
    job = make([SIZE] * 4)
    whole, ranges = job.packs[job.key], [(0, 100), (100, SIZE)]
    buffers, taken = [memoryview(bytearray(stop - start)) for start, stop in ranges], list[bytes]()

    def take(number: int, view: memoryview) -> None:
        job.stuck.go.set()
        assert job.stuck.ended.wait(30)
        taken.append(bytes(view))

    job.store.read_into(job.key, ranges, buffers, take)
    assert b"".join(taken) == whole and job.stuck.reads == 1
    assert read(job.store, job.key) == whole


def test_a_node_that_was_slow_is_asked_again(make: Callable[..., Job]) -> None:
    job = make([SIZE] * 4)
    whole = job.packs[job.key]
    assert read(job.store, job.key) == whole
    job.clock.now += 60
    assert read(job.store, job.key) == whole and job.stuck.reads == 1, "the read that was given up goes on"
    job.stuck.go.set()
    assert job.stuck.ended.wait(30)
    while job.store._paces.is_slow("node-2"):  # The thread of the read still ends.
        time.sleep(0.001)
    assert read(job.store, job.key) == whole and job.stuck.reads == 2


def test_a_slow_node_is_waited_for_if_its_group_cannot_help(make: Callable[..., Job]) -> None:
    job = make([SIZE] * 4)

    def fails(*arguments: Any) -> None:
        job.stuck.reads += 100
        job.stuck.go.set()
        raise UnavailableError("no answer within 10 s")

    job.nodes.stores["node-3"].read_into = fails  # type: ignore[method-assign]
    memory = bytearray(SIZE)
    job.store.read_into(job.key, [(0, SIZE)], [memoryview(memory)])
    assert job.stuck.reads == 101 and bytes(memory) == bytes(SIZE), "the late bytes"


def test_a_slow_node_without_parity_is_waited_for(make: Callable[..., Job]) -> None:
    job = make([SIZE] * 4, is_protected=False)
    job.stuck.go.set()
    assert read(job.store, job.key) == job.packs[job.key] and job.stuck.reads == 1


@pytest.mark.parametrize("is_stuck", [False, True])
def test_ranges_of_any_size_come_in_their_order(make: Callable[..., Job], *, is_stuck: bool) -> None:
    size = 5 * WINDOW_BYTES // 2 + 12_345
    job = make([1000, 1000, size, 1000])
    if not is_stuck:
        job.stuck.go.set()
    whole = job.packs[job.key]
    cuts = [0, 0, 7, 7 + WINDOW_BYTES, MIB + 7 + WINDOW_BYTES, size - 100, size - 100, size]
    ranges = [*pairwise(cuts), (0, size)]
    buffers = [memoryview(np.zeros(stop - start, np.uint8)) for start, stop in ranges]
    taken: list[tuple[int, bytes]] = []
    job.store.read_into(job.key, ranges, buffers, lambda number, view: taken.append((number, bytes(view))))
    assert taken == [(number, whole[start:stop]) for number, (start, stop) in enumerate(ranges)]
    job.store.read_into(job.key, ranges, buffers)
    assert [bytes(buffer) for buffer in buffers] == [data for _, data in taken]
    assert (job.stuck.reads == 1) == is_stuck


def test_the_limit_follows_the_fastest_other_node_and_what_a_node_owes() -> None:
    clock = HandClock()
    paces = Paces("peers://run", clock)

    def limit(name: str, count: int) -> float:
        return paces.slow_after(name, paces.begin(name, count))

    assert limit("a", 16 * MIB) == pytest.approx(3 * 1 + 0.3), "no other node was read"
    begun, clock.now = clock.now, clock.now + 0.5
    paces.end("a", 16 * MIB, begun, came=True)
    assert limit("b", 8 * MIB) == pytest.approx(3 * 0.25 + 0.3), "32 MiB a second"
    assert limit("b", 8 * MIB) == pytest.approx(3 * 0.5 + 0.3), "both reads take the link of the node"
    begun, clock.now = clock.now, clock.now + 0.1
    paces.end("b", 8 * MIB, begun, came=True)
    clock.now += 0.1
    paces.end("b", 8 * MIB, begun, came=True)
    pace_of_b = (0.9 * 8 + 8) / (0.9 * 0.1 + 0.1)
    assert limit("a", 8 * MIB) == pytest.approx(3 * 8 / pace_of_b + 0.3), "seconds of both count once"
    assert limit("c", 8 * MIB) == pytest.approx(3 * 8 / pace_of_b + 0.3), "b is faster than a"
    paces.begin("b", 100)
    paces.end("b", 100, clock.now - 50, came=True)
    paces.begin("b", 8 * MIB)
    paces.end("b", 8 * MIB, clock.now - 50, came=False)
    assert limit("c", 8 * MIB) == pytest.approx(3 * 16 / pace_of_b + 0.3), "tiny and failed reads say nothing"


def test_a_store_that_reads_one_node_alone_compares_once_with_the_group() -> None:
    clock = HandClock()
    paces = Paces("peers://run", clock)
    assert not paces.is_first_alone("a", MIB), "the first read: other nodes may follow"
    owed_bytes = paces.begin("a", 8 * MIB)
    assert paces.slow_after("a", owed_bytes) == pytest.approx(3 * 0.5 + 0.3)
    assert not paces.is_first_alone("a", 100), "too few bytes to measure"
    assert paces.is_first_alone("a", MIB) and not paces.is_first_alone("a", MIB), "once"
    paces.begin("b", 8 * MIB)
    begun, clock.now = clock.now, clock.now + 0.1
    paces.end("b", 8 * MIB, begun, came=True)
    assert paces.slow_after("a", owed_bytes) == pytest.approx(3 * 0.1 + 0.3), "as fast as the group while a owes"


def test_nodes_that_are_read_together_need_no_comparison() -> None:
    paces = Paces("peers://run", HandClock())
    paces.begin("a", 8 * MIB)
    paces.begin("b", 8 * MIB)
    assert not paces.is_first_alone("a", MIB) and not paces.is_first_alone("b", MIB)


def test_the_second_read_of_a_stuck_node_goes_through_parity(make: Callable[..., Job]) -> None:
    job = make([MIB] * 4)
    whole, memory = job.packs[job.key], bytearray(MIB)
    first = threading.Thread(target=job.store.read_into, args=(job.key, [(0, MIB)], [memoryview(memory)]))
    first.start()
    while not job.stuck.reads:
        time.sleep(0.001)
    assert read(job.store, job.key) == whole and job.stuck.reads == 1
    first.join()
    assert bytes(memory) == whole and job.store.read_bytes["parity of node node-2"] == 2 * MIB
