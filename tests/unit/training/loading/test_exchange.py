"""Loads in which ranks pass bytes to each other: what they come to, and what a failure on one rank does to the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal

import msgspec
import numpy as np
import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import Role
from holdfast.base.ports.codec import NO_CODECS
from holdfast.base.ports.framework import Target
from holdfast.base.ports.packs import packs_under
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import ExchangePlan, LoadPlan, Throughput, WantedBoxes
from holdfast.base.types.reports import LoadReport
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.engine.exchange import ExchangeProbe, PlannedExchange, TransferStats, execute_exchange
from holdfast.core.format.names import step_folder
from holdfast.core.plan.reads import load_plan
from holdfast.errors import CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.settings import Settings
from holdfast.stored.repository.catalog import read_index, read_manifest
from holdfast.training.coordination.job import Job
from holdfast.training.loading.exchange import AgreedExchange, Offer, agree_on_exchange, offer_of, read_or_exchange
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks, run_ranks
from tests.doubles.faults import Faults, FaultyStore, raise_error
from tests.doubles.framework import GlobalTensor
from tests.support.tuning import tuned
from tests.unit.ranks import PATIENT, fresh_store, run_of, sharded

RANKS = 3
ALWAYS = tuned(replace(PATIENT, share_reads="always"), exchange_bytes_max=256 << 10)
ROUNDS = 16
"""Rounds that a load of these copies with these settings takes, about; faults are put all over them."""


def copies(value: float = 0.0) -> dict[str, object]:
    """About 1.2 MiB that every rank holds whole, no two chunks of it alike."""
    numbers = np.arange(50_000, dtype=np.float32)
    return {
        f"layer.{number}": GlobalTensor("float32", value * (numbers + 50_000 * number), None, Role.PARAMETER)
        for number in range(6)
    }


def arrays(state: Mapping[str, object]) -> list[np.ndarray]:
    return [each.array for each in state.values() if isinstance(each, GlobalTensor)]


def same(first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(arrays(first), arrays(second), strict=True))


def offers_of_all(comm: ThreadComm, offer: Offer) -> list[Offer]:
    return [msgspec.msgpack.decode(each, type=Offer) for each in comm.all_gather(msgspec.msgpack.encode(offer))]


STATE_BYTES = sum(array.nbytes for array in arrays(copies()))


@pytest.fixture
def store() -> MemoryStore:
    store = fresh_store()

    def save(comm: ThreadComm) -> None:
        run = run_of(comm, store)
        run.save(1, copies(1.0)).wait()
        run.close()

    run_ranks(RANKS, save)
    return store


class Watched(ThreadComm):
    """Counts collectives, and lets a test do something to what has arrived."""

    def __init__(self, group: ThreadGroup, rank: int, spoil: Callable[[list[memoryview]], None] | None = None) -> None:
        super().__init__(group, rank)
        self.said: list[str] = []
        self._spoil = spoil

    def broadcast(self, payload: bytes | None) -> bytes:
        self.said.append("broadcast")
        return super().broadcast(payload)

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.said.append("all_gather")
        return super().all_gather(payload)

    def bitwise_or(self, payload: bytes) -> bytes:
        self.said.append("bitwise_or")
        return super().bitwise_or(payload)

    def exchange(self, gives: Mapping[int, Sequence[memoryview]], takes: Mapping[int, Sequence[memoryview]]) -> None:
        self.said.append("exchange")
        time.sleep(0.003)  # Long enough for the next round to be read: it must not lie where this one does.
        super().exchange(gives, takes)
        arrived = [buffer for buffers in takes.values() for buffer in buffers]
        if self._spoil and arrived:
            self._spoil(arrived)


def loaded(
    store: Store,
    settings: Sequence[Settings],
    state: Callable[[], dict[str, object]] = copies,
    *,
    stores: Mapping[int, Store] | None = None,
    spoil: Mapping[int, Callable[[list[memoryview]], None]] | None = None,
    step: int | None = 1,
) -> list[tuple[LoadReport | BaseException, dict[str, object], list[str]]]:
    """Load on every rank; return report or error, the state, and the collectives the load ran, by rank."""
    group = ThreadGroup(len(settings))

    def load(comm: ThreadComm) -> tuple[LoadReport | BaseException, dict[str, object], list[str]]:
        watched = Watched(group, comm.rank, (spoil or {}).get(comm.rank))
        run = run_of(watched, (stores or {}).get(comm.rank, store), settings[comm.rank])
        watched.said.clear()
        target = state()
        try:
            run.load(target, step)
        except Exception as error:
            return error, target, watched.said
        finally:
            run.close()
        assert run.load_report is not None
        return run.load_report, target, watched.said

    return run_ranks(len(settings), load, group=group)


def test_each_byte_is_read_once_and_reaches_every_rank(store: MemoryStore) -> None:
    found = loaded(store, [ALWAYS] * RANKS)
    reports = [each for each, _, _ in found if isinstance(each, LoadReport)]
    assert len(reports) == RANKS
    assert sum(report.bytes for report in reports) == STATE_BYTES
    assert all(report.bytes + report.exchanged_bytes == STATE_BYTES for report in reports)
    assert all(same(state, copies(1.0)) for _, state, _ in found)
    assert all(said.count("exchange") > ROUNDS // 2 for _, _, said in found), "it took many rounds"


def test_memory_is_bounded_by_rounds(store: MemoryStore) -> None:
    """A quarter of the setting is given, or taken, at once."""
    arrived: list[int] = []
    found = loaded(
        store, [ALWAYS] * RANKS, spoil={1: lambda buffers: arrived.append(sum(len(each) for each in buffers))}
    )
    assert isinstance(found[1][0], LoadReport)
    assert sum(arrived) == found[1][0].exchanged_bytes
    assert max(arrived) <= ALWAYS._tuning.exchange_bytes_max // 4


def small() -> dict[str, object]:
    """Tensors a little longer than a few pages, every other of which a rank leaves alone."""
    numbers = np.arange(4_500, dtype=np.float32)
    return {
        f"layer.{number:02d}": GlobalTensor("float32", numbers + number, None, Role.PARAMETER) for number in range(40)
    }


def test_all_memory_of_a_load_is_within_the_setting(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are longer than what is read into them: whole pages, and one more at either end."""
    taken: list[int] = []

    def counted_buffer(count: int) -> memoryview:
        taken.append(count)
        return allocate_aligned(count)

    monkeypatch.setattr("holdfast.core.engine.exchange.allocate_aligned", counted_buffer)
    tensors = fresh_store()

    def save(comm: ThreadComm) -> None:
        run = run_of(comm, tensors)
        run.save(1, small()).wait()
        run.close()

    run_ranks(2, save)
    group = ThreadGroup(2)

    def load(comm: ThreadComm) -> LoadReport | None:
        run = run_of(Watched(group, comm.rank), tensors, ALWAYS)
        state = dict(list(small().items())[::2])
        run.load(state, strict=False)
        run.close()
        return run.load_report

    reports = run_ranks(2, load, group=group)
    assert all(report is not None and report.exchanged_bytes for report in reports)
    assert len(taken) == 2 * 4, "two areas for each direction"
    assert sum(taken) <= 2 * ALWAYS._tuning.exchange_bytes_max


def test_where_nothing_is_wanted_twice_nothing_is_said_twice(store: MemoryStore) -> None:
    rows = fresh_store()

    def save(comm: ThreadComm) -> None:
        run = run_of(comm, rows)
        run.save(1, {"w": sharded(RANKS, rows=30_000)}).wait()
        run.close()

    run_ranks(RANKS, save)
    for setting in ("auto", "always", "never"):
        found = loaded(rows, [replace(ALWAYS, share_reads=setting)] * RANKS, lambda: {"w": sharded(RANKS, rows=30_000)})
        offers = ["bitwise_or"] if setting == "always" else []
        assert [said for _, _, said in found] == [["broadcast", "all_gather", *offers, "bitwise_or"]] * RANKS


def test_values_of_the_newest_step_wait_for_one_more_word(store: MemoryStore) -> None:
    """Another rank may find the step damaged, and then the older one must find the values untouched."""
    settings = [replace(ALWAYS, share_reads="never")] * RANKS
    said = [said for _, _, said in loaded(store, settings, step=None)]
    assert said == [["broadcast", "all_gather", "bitwise_or", "bitwise_or"]] * RANKS


@pytest.mark.parametrize("unwilling", range(RANKS))
def test_one_rank_that_says_never_is_enough(store: MemoryStore, unwilling: int) -> None:
    settings = [replace(ALWAYS, share_reads="never") if rank == unwilling else ALWAYS for rank in range(RANKS)]
    for report, state, said in loaded(store, settings):
        assert isinstance(report, LoadReport)
        assert (report.bytes, report.exchanged_bytes) == (STATE_BYTES, 0)
        assert "exchange" not in said
        assert same(state, copies(1.0))


def test_rank_0s_word_counts_where_settings_differ(store: MemoryStore) -> None:
    others = tuned(replace(ALWAYS, share_reads="auto"), exchange_bytes_max=64 << 10)
    for report, state, _ in loaded(store, [ALWAYS, others, tuned(others, exchange_bytes_max=1 << 20)]):
        assert isinstance(report, LoadReport)
        assert report.bytes + report.exchanged_bytes == STATE_BYTES
        assert report.exchanged_bytes > 0
        assert same(state, copies(1.0))


@pytest.mark.parametrize("rank", (0, 2))
@pytest.mark.parametrize("at", (1, 2, 7, 20))
def test_a_read_that_fails_on_one_rank_ends_the_load_on_all(store: MemoryStore, rank: int, at: int) -> None:
    faults = Faults(raise_error(UnavailableError), at=at, names=("read_into",))
    found = loaded(store, [ALWAYS] * RANKS, stores={rank: FaultyStore(store, faults)})
    assert faults.met == 1
    for each, (error, _, said) in enumerate(found):
        assert isinstance(error, UnavailableError)
        assert str(error).startswith("a fault" if each == rank else f"rank {rank}: a fault")
        assert said == found[0][2], "all ranks stopped at the same collective"


def test_what_was_damaged_on_its_way_is_caught_where_it_arrives(store: MemoryStore) -> None:
    def flip(buffers: list[memoryview]) -> None:
        buffers[-1][-1] ^= 1

    found = loaded(store, [ALWAYS] * RANKS, spoil={1: flip})
    assert all(isinstance(error, CorruptError) for error, _, _ in found)
    assert "read and sent it: bytes" in str(found[1][0])
    assert str(found[0][0]).startswith("rank 1: ")


@pytest.mark.parametrize("at", (1, 2, ROUNDS // 2, None))
def test_passing_on_that_fails_on_one_rank_ends_the_load_on_all(store: MemoryStore, at: int | None) -> None:
    """The bytes had come, and the others know nothing of it: they hear of it in the next word, or at the end."""
    arrived: list[int] = []
    if at is None:
        loaded(store, [ALWAYS] * RANKS, spoil={1: lambda _: arrived.append(0)})
        at = len(arrived)
        arrived.clear()

    def fail(_: list[memoryview]) -> None:
        arrived.append(0)
        if len(arrived) == at:
            raise RuntimeError("can't start new thread")

    found = loaded(store, [ALWAYS] * RANKS, spoil={1: fail})
    for rank, (error, _, said) in enumerate(found):
        if rank == 1:
            assert isinstance(error, RuntimeError)
        else:
            assert isinstance(error, UnavailableError)
            assert str(error) == "rank 1: RuntimeError: can't start new thread"
        assert said == found[0][2], "all ranks stopped at the same collective"


@pytest.mark.parametrize("exchange", ("always", "auto"))
def test_a_rank_that_cannot_plan_the_exchange_ends_the_load_on_all(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, exchange: Literal["always", "auto"]
) -> None:
    """It does not know whether the others have an exchange: with auto they have none, for so few bytes."""
    calls = count()

    def plan(offers: Sequence[Offer]) -> AgreedExchange | None:
        if next(calls) == 0:
            raise MemoryError("no memory for the exchange")
        return agree_on_exchange(offers)

    monkeypatch.setattr("holdfast.training.loading.load.agree_on_exchange", plan)
    found = loaded(store, [replace(ALWAYS, share_reads=exchange)] * RANKS)
    failed = [rank for rank, (error, _, _) in enumerate(found) if isinstance(error, MemoryError)]
    assert len(failed) == 1
    for rank, (error, _, _) in enumerate(found):
        if rank not in failed:
            assert isinstance(error, UnavailableError)
            assert str(error) == f"rank {failed[0]}: MemoryError: no memory for the exchange"
    offers = ["bitwise_or"] if exchange == "always" else []
    errors = ["bitwise_or", "all_gather", "bitwise_or"]
    assert [said for _, _, said in found] == [["broadcast", "all_gather", *offers, *errors]] * RANKS


def test_a_pack_that_is_gone_is_every_ranks_error(store: MemoryStore) -> None:
    """It vanishes on one rank only, after the checkpoint was looked at."""
    faults = Faults(raise_error(MissingError), at=2, names=("read_into",), lasting=True)
    found = loaded(store, [ALWAYS] * RANKS, stores={1: FaultyStore(store, faults)})
    assert all(isinstance(error, CorruptError) for error, _, _ in found)
    assert all("the pack is missing" in str(error) for error, _, _ in found)


def plan_of(store: Store, fqns: Sequence[str]) -> tuple[LoadPlan, Manifest]:
    manifest = read_manifest(store, step_folder(1))
    index = read_index(store, step_folder(1), manifest)
    wanted = [WantedBoxes(fqn, (Box.whole(index.tensors[fqn].global_shape),)) for fqn in fqns]
    return load_plan(wanted, index.pieces_near, ALWAYS._tuning.read_window_bytes), manifest


class Filled(Target):
    """A target that counts what is placed in it."""

    def __init__(self) -> None:
        self.array = np.zeros(50_000, dtype=np.float32)

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        stored = np.frombuffer(source, dtype=np.float32)
        self.array[part.start[0] : part.stop[0]] += stored[part.relative_to(source_box.start)]

    def memory(self, part: Box) -> memoryview | None:
        return None


@pytest.mark.parametrize("after_rounds", (0, 1, 3))
def test_ranks_may_stop_exchanging_and_read_the_rest(store: MemoryStore, after_rounds: int) -> None:
    """Nothing is placed twice and nothing is left out, whatever was under way when they stopped."""
    fqns = list(copies())
    asked: list[Sequence[Throughput]] = []

    def goes_on(paces: Sequence[Throughput]) -> bool:
        asked.append(paces)
        return False

    def load(comm: ThreadComm) -> tuple[TransferStats, list[np.ndarray]]:
        plan, manifest = plan_of(store, fqns)
        offers = offers_of_all(comm, offer_of(plan, manifest, ALWAYS, RANKS))
        agreed = agree_on_exchange(offers)
        assert agreed is not None
        numbers = {record.name: number for number, record in enumerate(manifest.packs)}
        targets = [Filled() for _ in fqns]
        planned = partial(agreed.job.plan_of, comm.rank, plan, numbers)
        moved = execute_exchange(
            PlannedExchange(planned, agreed.job.round_count, ExchangeProbe(after_rounds, goes_on)),
            comm,
            SystemClock(),
            packs_under(store, f"{step_folder(1)}{manifest.attempt}/"),
            targets,
            ALWAYS,
            NO_CODECS,
        )
        return moved, [target.array for target in targets]

    found = run_ranks(RANKS, load)
    assert len(asked) == RANKS
    assert all(paces == asked[0] for paces in asked), "all ranks judge by the same numbers"
    assert len(asked[0]) == RANKS
    assert any(pace.moved_bytes for pace in asked[0]) == (after_rounds > 0)
    for moved, placed in found:
        assert all(np.array_equal(*pair) for pair in zip(placed, arrays(copies(1.0)), strict=True))
        assert moved.read_bytes + moved.received_bytes == STATE_BYTES
        assert (moved.received_bytes > 0) == (after_rounds > 0)


def test_a_rank_that_cannot_plan_stops_all(store: MemoryStore) -> None:
    def load(comm: ThreadComm) -> TransferStats:
        plan, manifest = plan_of(store, list(copies()))
        offers = offers_of_all(comm, offer_of(plan, manifest, ALWAYS, RANKS))
        agreed = agree_on_exchange(offers)
        assert agreed is not None
        packs = packs_under(store, f"{step_folder(1)}{manifest.attempt}/")
        targets = [Filled() for _ in copies()]
        if comm.rank != 1:
            job = Job(comm, SystemClock(), ALWAYS, saves=False)
            return read_or_exchange(job, plan, agreed, manifest, packs, targets)

        def planned() -> ExchangePlan:
            raise InvalidError("no memory")

        exchange = PlannedExchange(planned, agreed.job.round_count, None)
        return execute_exchange(exchange, comm, SystemClock(), packs, targets, ALWAYS, NO_CODECS)

    first, second, third = outcomes_of_ranks(RANKS, load)
    assert isinstance(second, InvalidError)
    assert first == third == TransferStats(0, 0, whole=False)
