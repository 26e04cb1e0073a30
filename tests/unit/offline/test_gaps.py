"""Offline verbs with another process between any two of their calls: they replace nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Epoch
from holdfast.base.types.timeline import Timeline
from holdfast.errors import ConflictError
from holdfast.offline.copying.destination import CopyDestination
from holdfast.offline.export.object_place import ObjectPlace
from holdfast.stored.leases.process import this_process
from holdfast.stored.repository.epochs import current_fence, newest_epoch, put_accepted, put_epoch
from holdfast.stored.repository.timeline_records import (
    TimelineRecord,
    adopt_records,
    put_record,
    take_back,
    timeline_records,
)
from tests.support.between_calls import every_gap
from tests.unit.ranks import fresh_store

CLOCK = SystemClock()
RUN_FILE = "holdfast.json"


# ------------------------------------------------------------------------------------------------ copies and exports


def begin_run(store: Store) -> None:
    store.put(RUN_FILE, b"the run of a job that begins to save there")


def test_a_copy_touches_nothing_of_a_job_that_begins_there() -> None:
    refused = 0
    for gap in every_gap(fresh_store, lambda store: CopyDestination(store, CLOCK).claim("run", None), begin_run):
        assert gap.store.get(RUN_FILE, 100) == b"the run of a job that begins to save there"
        if gap.outcome is not None:
            assert isinstance(gap.outcome, ConflictError) and RUN_FILE in str(gap.outcome)
            assert [entry.key for entry in gap.store.list()] == [RUN_FILE]
            refused += 1
    assert refused >= 3, "before and after its claim"


def other_export(store: Store) -> None:
    ObjectPlace(store).claim("another export", CLOCK)


def ends(store: Store, turn: int) -> None:
    if turn == 1:
        ObjectPlace(store).publish()


def stays(store: Store, turn: int) -> None:
    """Do nothing."""


@pytest.mark.parametrize(("then", "expected"), [(ends, bool), (stays, ConflictError)])
def test_an_export_beside_another_that_has_just_begun(then: Callable[[Store, int], None], expected: type) -> None:
    """It comes just before the note of this one is put, and has perhaps ended by the look at its note."""
    for gap in every_gap(
        lambda: fresh_store().with_any_names(), lambda store: ObjectPlace(store).claim("own", CLOCK), other_export, then
    ):
        if gap.point.name == "put_if_absent":
            assert isinstance(gap.outcome, expected)
            return
    raise AssertionError("no note was put")


# -------------------------------------------------------------------------------------------------------- timelines

OTHER = Timeline(2, "2" * 16)
NAMES = frozenset({(7, "a" * 32), (8, "b" * 32)})


def begin_epoch(store: Store) -> None:
    """Take the next epoch, as a writer does that sees no heartbeat: the records count in it, then its list comes."""
    number, former = newest_epoch(store) + 1, current_fence(store)
    put_epoch(store, Epoch(number, "run", replace(this_process(CLOCK, 30.0), host="next")))
    adopt_records(store, former, number)
    put_accepted(store, number, "run", {}, ())


def with_record() -> Store:
    store = fresh_store()
    begin_epoch(store)
    put_record(store, TimelineRecord(OTHER, 1, NAMES))
    return store


def late_take_back(store: Store) -> None:
    take_back(store, current_fence(store), frozenset({(7, "a" * 32)}))


def late_adoption(store: Store) -> None:
    adopt_records(store, current_fence(store), 2)


@pytest.mark.parametrize("late", [late_take_back, late_adoption])
def test_a_writer_that_is_late_sets_no_record_back(late: Callable[[Store], None]) -> None:
    """With the epoch of the late one the record would count no more, and a restart would resume what was discarded."""

    def begin_two(store: Store) -> None:
        begin_epoch(store)
        begin_epoch(store)

    for gap in every_gap(with_record, late, begin_two):
        assert gap.outcome is None
        (record,) = timeline_records(gap.store, current_fence(gap.store))
        assert record.timeline == OTHER and record.epoch == 3
        assert (8, "b" * 32) in record.discarded <= NAMES


def test_a_record_that_is_gone_is_not_put_back() -> None:
    def remove(store: Store) -> None:
        store.delete([TimelineRecord(OTHER, 1).key])

    for gap in every_gap(with_record, late_take_back, remove):
        assert gap.outcome is None and timeline_records(gap.store, current_fence(gap.store)) == []
