"""Calls that some ranks do not make: one rank asks which ones, after ten seconds, and says that every rank must call.

Nothing here waits for time: the limits are nothing, and each rank waits for the rank that must come before it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.ports.comm import KeyValueStore
from holdfast.base.types.reports import SaveReport
from holdfast.training.coordination import absent_ranks
from holdfast.training.coordination.absent_ranks import CallWatch
from tests.doubles.comm import ThreadComm, ThreadGroup, run_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyKeyValueStore
from tests.unit.ranks import World, saved, sharded


class Log(logging.Handler):
    """Keeps what is logged about absent ranks, and tells once two ranks have logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []
        self.has_both = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))
        if len(self.lines) == 2:
            self.has_both.set()

    def texts(self, level: int) -> list[str]:
        return [text for at, text in self.lines if at == level]


@pytest.fixture
def log() -> Iterator[Log]:
    handler, logger = Log(), absent_ranks.logger
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def elected_in_order(own: Callable[[str], str], asked: list[str]) -> Callable[[int, KeyValueStore], KeyValueStore]:
    """Return views of the key-value store: rank 0 claims the question first, once rank 1 has called.

    Args:
        own: Returns the key by which rank 1 has called, from the key that is claimed.
        asked: Gets the keys that rank 1 asks for.
    """

    def view(rank: int, inner: KeyValueStore) -> KeyValueStore:
        def order(operation: FaultPoint) -> None:
            if operation.name == "compare_set" and operation.subject.endswith("/asking"):
                inner.wait([own(operation.subject) if rank == 0 else operation.subject], 30.0)
            elif operation.name == "present" and rank == 1:
                asked.append(operation.subject)

        return inner if rank == 2 else FaultyKeyValueStore(inner, Faults(order, lasting=True))

    return view


def test_one_rank_asks_who_does_not_make_a_collective_call(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent_ranks, "_ARRIVAL_SECONDS", 0.0)
    monkeypatch.setattr(absent_ranks, "ASK_SECONDS", 0.0)
    asked: list[str] = []

    def part(comm: ThreadComm) -> list[bytes]:
        if comm.rank == 2:
            assert log.has_both.wait(30.0)
            return comm.all_gather(b"2")
        with CallWatch(comm, "load of x", "load"):
            return comm.all_gather(b"%d" % comm.rank)

    group = ThreadGroup(3)
    view = elected_in_order(lambda key: key.replace("asking", "1"), asked)
    assert run_ranks(3, part, group=group, view_of=view) == [[b"0", b"1", b"2"]] * 3
    (warning,) = log.texts(logging.WARNING)
    assert "load of x: ranks [2] did not call load" in warning and "expected all 3 ranks" in warning
    assert "Every rank must call it" in warning
    (line,) = log.texts(logging.INFO)
    assert "rank 1 has waited" in line and "every rank must call load" in line
    assert asked == [], "the other rank asks nothing"


def test_a_call_that_all_ranks_make_costs_the_key_value_store_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent_ranks, "_ARRIVAL_SECONDS", 3600.0)
    calls: list[FaultPoint] = []

    def part(comm: ThreadComm) -> list[bytes]:
        with CallWatch(comm, "load of x", "load"):
            return comm.all_gather(b"")

    run_ranks(2, part, view_of=lambda _, inner: FaultyKeyValueStore(inner, Faults(calls.append, lasting=True)))
    assert calls == []


def test_a_save_that_one_rank_does_not_call_is_logged_and_commits_once_it_does(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_ranks, "ASK_SECONDS", 0.01)
    asked: list[str] = []
    view = elected_in_order(lambda key: key.replace("asking", "open/1"), asked)
    world = World(3, boards={rank: lambda inner, rank=rank: view(rank, inner) for rank in (0, 1)})  # type: ignore[misc]

    def part(rank: int, run: CheckpointManager) -> object:
        if rank == 2:
            assert log.has_both.wait(30.0)
        return saved(run, 7, {"w": sharded(3)})

    outcomes = world.play(part)
    assert all(isinstance(each, SaveReport) for each in outcomes), outcomes
    (warning,) = log.texts(logging.WARNING)
    assert "save of step 7: ranks [2] did not call save" in warning and "Every rank must call it" in warning
    assert "rank 1 has waited" in log.texts(logging.INFO)[0]
    assert not [key for key in asked if "/open/" in key and not key.endswith("/open/0")], asked


@pytest.mark.parametrize("absent", ([], [0], [16_383], [3, 4, 9_000], [*range(64)]))
def test_a_few_absent_ranks_of_many_take_few_requests(absent: list[int]) -> None:
    requests: list[int] = []

    def have_all(ranks: Sequence[int]) -> bool:
        requests.append(len(ranks))
        return not any(ranks[0] <= rank <= ranks[-1] for rank in absent)

    assert absent_ranks.ranks_without(range(16_384), have_all) == absent
    # Two requests for each halving: fourteen halvings for one rank.
    assert len(requests) <= 1 + 28 * max(len(absent), 1)
    assert absent_ranks.ranks_without([], have_all) == []
