"""How far the log after a base reaches: as far as every rank has recorded without a gap, and as the chain lets it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline
from holdfast.base.types.values import Group
from holdfast.core.format.log import segment_key
from holdfast.core.format.manifest import decode_manifest, encode_manifest
from holdfast.core.format.names import manifest_key
from holdfast.core.format.step_name import step_name
from holdfast.errors import MissingError
from holdfast.stored.repository.epochs import declare_timelines
from holdfast.stored.repository.logs import RunLog, base_reaching, log_after, newest_logs
from holdfast.stored.repository.timelines import run_timelines
from holdfast.training.loading.named_step import find_named
from holdfast.training.runs.listing import run_record
from tests.support.redo_log.segments import LOG, queued, values_of, write
from tests.unit.stored.repository.test_timelines import begin

OTHER = "f" * 16


class CountingStore(MemoryStore):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reads: list[str] = []
        self.lists: list[str] = []

    def read_into(self, key: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        self.reads.append(key)
        super().read_into(key, ranges, buffers)

    def list(self, prefix: str):
        self.lists.append(prefix)
        return super().list(prefix)


@pytest.fixture
def store() -> CountingStore:
    store = CountingStore(uuid.uuid4().hex)
    begin(store, 1)
    return store


def base(
    store: MemoryStore, step: int, log: str = LOG, ranks: int = 2, timeline: Timeline = FIRST_TIMELINE
) -> Manifest:
    data = encode_manifest(
        Manifest(
            run_id="run", step=step, attempt="0" * 16, created="", parent=None, world_size=ranks, layouts=(),
            software={}, tensors=0, tensor_bytes=0, aliases={}, tree=Group("dict", {}), packs=(), parts=(), indexes=(),
            epoch=1, timeline=timeline, log=log,
        )
    )  # fmt: skip
    store.put(manifest_key(step), data)
    return decode_manifest(data, "")


def record(store: MemoryStore, rank: int, *segments: Sequence[int], log: str = LOG, previous: int = 10) -> None:
    """Write segments of records that follow each other."""
    for steps in segments:
        records = []
        for step in steps:
            records.append(queued(step, previous, values_of(step), [(0, 6)]))
            previous = step
        write(store, rank, records, log)


def newest(store: MemoryStore) -> RunLog:
    return newest_logs(store, run_timelines(store))[0]


def test_the_rank_that_sealed_least_decides(store: CountingStore) -> None:
    base(store, 10)
    record(store, 0, [11], [12], [13, 14])
    record(store, 1, [11, 12], [13])

    log = newest(store)

    assert (log.id, log.base, log.steps, log.reach) == (LOG, 10, (11, 12, 13), 13)
    assert [(segment.rank, segment.first) for segment in log.segments] == [(0, 11), (0, 12), (0, 13), (1, 11), (1, 13)]
    assert log.bytes == sum(store.size(segment.key) for segment in log.segments)


def test_a_rank_without_a_segment_leaves_the_base(store: CountingStore) -> None:
    base(store, 10, ranks=3)
    record(store, 0, [11], [12])
    record(store, 2, [11], [12])

    assert (newest(store).steps, newest(store).reach) == ((), 10)


def test_headers_are_read_only_as_far_as_they_decide(store: CountingStore) -> None:
    base(store, 10, ranks=3)
    record(store, 0, [11], [12], [13])
    record(store, 1, [11], [12], [13], [14])
    record(store, 2, [11, 12], [13], [14], [15])
    store.reads.clear()
    store.lists.clear()

    assert newest(store).reach == 13

    # Rank 1 has a segment for each step that rank 0 reaches. Of rank 2 no segment after the reach is read.
    assert sorted(store.reads) == [segment_key(LOG, 0, step) for step in (11, 12, 13)] + [
        segment_key(LOG, 2, step) for step in (11, 13)
    ]
    assert [prefix for prefix in store.lists if prefix.startswith("log")] == ["log/"]


@pytest.mark.parametrize("spoil", [lambda store, key: store.delete([key]), lambda store, key: store.put(key, b"torn")])
def test_a_gap_ends_the_log(store: CountingStore, spoil: Callable[[MemoryStore, str], None]) -> None:
    base(store, 10, ranks=1)
    record(store, 0, [11], [12], [13])
    spoil(store, segment_key(LOG, 0, 12))

    assert newest(store).reach == 11


def test_records_before_the_base_in_its_first_segment_do_not_count(store: CountingStore) -> None:
    first = base(store, 10, ranks=1)
    second = base(store, 12, ranks=1)
    record(store, 0, [11, 12, 13], [14])

    logs = newest_logs(store, run_timelines(store))

    assert [(log.base, log.steps) for log in logs] == [(12, (13, 14)), (10, (11, 12, 13, 14))]
    assert log_after(store, first) == logs[1]
    assert log_after(store, second) == logs[0]


def test_a_base_of_another_log_cuts(store: CountingStore) -> None:
    base(store, 10, ranks=1)
    record(store, 0, [11], [12], [13])
    base(store, 12, OTHER, ranks=1)
    record(store, 0, [13], log=OTHER, previous=12)

    logs = newest_logs(store, run_timelines(store))

    assert [(log.id, log.base, log.steps) for log in logs] == [(OTHER, 12, (13,)), (LOG, 10, (11,))]


def test_a_step_without_a_log_has_none(store: CountingStore) -> None:
    plain = base(store, 10, "", ranks=1)
    assert log_after(store, plain) is None
    assert newest_logs(store, run_timelines(store)) == ()
    assert run_record(store).logs == ()
    assert base_reaching(store, run_timelines(store), 11) is None


def test_a_superseded_base_has_none(store: CountingStore) -> None:
    base(store, 10, ranks=1)
    left = base(store, 12, ranks=1)
    record(store, 0, [13], previous=12)
    second = FIRST_TIMELINE.fork(2, "2" * 16, 10, "d" * 32)
    declare_timelines(store, 1, second)
    base(store, 11, "", ranks=1, timeline=second)

    assert log_after(store, left) is None


@pytest.mark.parametrize(("step", "expected"), [(11, 10), (12, 10), (14, None), (9, None)])
def test_the_base_of_a_step_that_a_log_reaches(store: CountingStore, step: int, expected: int | None) -> None:
    base(store, 10)
    record(store, 0, [11], [12], [14])
    record(store, 1, [11], [12])

    assert base_reaching(store, run_timelines(store), step) == expected
    said = f"step {step} is in the redo log after step 10" if expected else f"no committed step {step}"
    with pytest.raises(MissingError, match=said):
        find_named(store, step_name(step))
