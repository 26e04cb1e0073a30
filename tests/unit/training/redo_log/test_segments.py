"""Segments prove their own bytes: what was recorded is read back, and damage ends the log before that segment."""

from __future__ import annotations

import uuid

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.box import Box
from holdfast.base.ports.codec import NO_CODECS
from holdfast.base.ports.gradients import Captured
from holdfast.base.ports.packs import packs_under
from holdfast.base.types.plan import WantedBoxes
from holdfast.core.engine.read import execute
from holdfast.core.engine.target import HostTarget
from holdfast.core.format.log import segment_key
from holdfast.core.plan.reads import load_plan
from holdfast.stored.repository.logs import read_records, steps_reached
from holdfast.training.redo_log.segments import QueuedRecord
from tests.support.redo_log.segments import LOG, SETTINGS, queued, record_of, values_of, write


def test_records_come_back() -> None:
    store, values = MemoryStore(uuid.uuid4().hex), [values_of(1), values_of(2)]
    write(store, 3, [queued(11, 10, values[0], [(0, 2), (4, 6)]), queued(12, 11, values[1], [(0, 6)])])

    records = read_records(store, LOG, 3, 10)

    assert list(records) == [11, 12]
    assert records[11].record == record_of(11)
    assert records[11].previous == 10
    pieces = records[11].pieces["0/model.weight"]
    assert [piece.region for piece in pieces] == [Box((0, 0), (2, 5)), Box((4, 0), (6, 5))]
    target = HostTarget("float32", Box((4, 0), (6, 5)))
    wanted = [WantedBoxes("0/model.weight", (Box((4, 0), (6, 5)),))]
    plan = load_plan(wanted, lambda name, _: records[11].pieces[name], 1 << 20)
    execute(plan, packs_under(store, ""), [target], SETTINGS, NO_CODECS)
    assert target.array.tobytes() == values[0][4:6].tobytes()


def test_older_segments_are_not_read() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    for step in range(11, 15):
        write(store, 0, [queued(step, step - 1, values_of(step), [(0, 6)])])

    assert list(read_records(store, LOG, 0, 12)) == [13, 14]


def test_a_large_record_is_read_in_two_parts() -> None:
    store, many = MemoryStore(uuid.uuid4().hex), "x" * 300_000
    tensors = queued(11, 10, values_of(1), [(0, 6)]).captured.tensors
    record = record_of(11, many)
    write(store, 0, [QueuedRecord(Captured(record, tensors, 24, lambda: None), 10, LOG)])

    assert read_records(store, LOG, 0, 10)[11].record == record


def test_every_byte_of_header_and_record_is_proven(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    write(store, 0, [queued(11, 10, values_of(1), [(0, 6)])])
    key = segment_key(LOG, 0, 11)
    whole = store.get(key, 1 << 20)
    data = len(whole) - values_of(1).nbytes
    for at in range(data):
        store.put(key, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_records(store, LOG, 0, 10) == {}, at
    assert "the log ends before this segment" in caplog.text


@pytest.mark.parametrize("length", [0, 7, 100, 4096, -1])
def test_a_truncated_segment_ends_the_log(length: int) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    write(store, 0, [queued(11, 10, values_of(1), [(0, 6)])])
    key = segment_key(LOG, 0, 11)
    store.put(key, store.get(key, 1 << 20)[:length])

    assert read_records(store, LOG, 0, 10) == {}


def test_a_segment_of_another_rank_or_log_is_refused() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    write(store, 0, [queued(11, 10, values_of(1), [(0, 6)])])
    data = store.get(segment_key(LOG, 0, 11), 1 << 20)
    store.put(segment_key(LOG, 1, 11), data)
    store.put(segment_key("f" * 16, 0, 11), data)

    assert read_records(store, LOG, 1, 10) == {}
    assert read_records(store, "f" * 16, 0, 10) == {}


@pytest.mark.parametrize(
    ("links", "base", "below", "expected"),
    [
        ([(10, 11), (11, 12), (12, 15)], 10, None, [11, 12, 15]),
        ([(10, 11), (11, 12), (12, 15)], 11, None, [12, 15]),
        ([(10, 11), (12, 13)], 10, None, [11]),
        ([(10, 11), (11, 12), (12, 15)], 10, 12, [11]),
        ([(11, 12)], 10, None, []),
    ],
)
def test_a_gap_or_a_cut_ends_the_log(
    links: list[tuple[int, int]], base: int, below: int | None, expected: list[int]
) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    for previous, step in links:
        write(store, 0, [queued(step, previous, values_of(step), [(0, 6)])])

    assert steps_reached(read_records(store, LOG, 0, 9), base, below) == expected
