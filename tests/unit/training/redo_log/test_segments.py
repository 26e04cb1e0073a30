"""Segments prove their own bytes: records are read back, and damage ends the log before the damaged segment."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.codec import NO_CODECS
from holdfast.base.ports.gradients import Captured, RecordedTensor
from holdfast.base.ports.packs import packs_under
from holdfast.base.types.plan import WantedBoxes
from holdfast.base.types.redo import AfterImage, OptimizerCall, Record, Software, call_tensor
from holdfast.base.types.values import Group
from holdfast.core.engine.read import execute
from holdfast.core.engine.target import HostTarget
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.format.log import segment_key
from holdfast.core.plan.reads import load_plan
from holdfast.settings import Settings
from holdfast.training.redo_log.segments import QueuedRecord, read_records, steps_reached, write_segment

LOG = "0123456789abcdef"
SETTINGS = Settings()


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> _Bytes:
        buffer[: stop - start] = self._data[start:stop]
        return self

    def wait(self) -> None:
        pass


def _record(step: int, groups: object = 0.5) -> Record:
    call = OptimizerCall("optimizer", ({"lr": groups, "betas": (0.9, 0.99)},), ("model.weight",))
    software = Software({"torch": "2"}, {"optimizer": "SGD"})
    return Record(
        step, (call,), (AfterImage("model.mean", 1),), Group("dict", {"n": step}), {"rng": b"1"}, {"a": step}, software
    )


def queued_record(step: int, previous: int, values: np.ndarray, rows: Sequence[tuple[int, int]]) -> QueuedRecord:
    spec = TensorSpec(call_tensor(0, "model.weight"), "float32", values.shape)
    tensors = [
        RecordedTensor(spec, Box((start, 0), (stop, values.shape[1])), _Bytes(values[start:stop].tobytes()))
        for start, stop in rows
    ]
    return QueuedRecord(Captured(_record(step), tensors, lambda: None), previous, LOG)


def _write(store: MemoryStore, rank: int, records: Sequence[QueuedRecord]) -> None:
    write_segment(store, PackWriter(store, SETTINGS), rank, records, lambda _: None)


def _values(seed: int, rows: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 5)).astype(np.float32)


def test_records_come_back() -> None:
    store, values = MemoryStore(uuid.uuid4().hex), [_values(1), _values(2)]
    _write(store, 3, [queued_record(11, 10, values[0], [(0, 2), (4, 6)]), queued_record(12, 11, values[1], [(0, 6)])])

    records = read_records(store, LOG, 3, 10)

    assert list(records) == [11, 12]
    assert records[11].record == _record(11)
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
        _write(store, 0, [queued_record(step, step - 1, _values(step), [(0, 6)])])

    assert list(read_records(store, LOG, 0, 12)) == [13, 14]


def test_a_large_record_is_read_in_two_parts() -> None:
    store, many = MemoryStore(uuid.uuid4().hex), "x" * 300_000
    queued = queued_record(11, 10, _values(1), [(0, 6)])
    record = _record(11, many)
    _write(store, 0, [QueuedRecord(Captured(record, queued.captured.tensors, lambda: None), 10, LOG)])

    assert read_records(store, LOG, 0, 10)[11].record == record


def test_every_byte_of_header_and_record_is_proven(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    _write(store, 0, [queued_record(11, 10, _values(1), [(0, 6)])])
    key = segment_key(LOG, 0, 11)
    whole = store.get(key, 1 << 20)
    data = len(whole) - _values(1).nbytes
    for at in range(data):
        store.put(key, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_records(store, LOG, 0, 10) == {}, at
    assert "the log ends before this segment" in caplog.text


@pytest.mark.parametrize("length", [0, 7, 100, 4096, -1])
def test_a_truncated_segment_ends_the_log(length: int) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    _write(store, 0, [queued_record(11, 10, _values(1), [(0, 6)])])
    key = segment_key(LOG, 0, 11)
    store.put(key, store.get(key, 1 << 20)[:length])

    assert read_records(store, LOG, 0, 10) == {}


def test_a_segment_of_another_rank_or_log_is_refused() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    _write(store, 0, [queued_record(11, 10, _values(1), [(0, 6)])])
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
        _write(store, 0, [queued_record(step, previous, _values(step), [(0, 6)])])

    assert steps_reached(read_records(store, LOG, 0, 9), base, below) == expected
