"""Saves under `compression="auto"` at stores whose bandwidth the test sets: what is decided is what the packs hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast._face.wiring import codecs
from holdfast.base.geometry.tensor import Role
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.readable import Release
from holdfast.base.ports.store import Store, Upload
from holdfast.base.types.coding import KindCoding
from holdfast.base.types.events import RankReport
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.names import step_folder
from holdfast.observers import Decided, Ended, Event
from holdfast.settings import Settings
from holdfast.stored.repository.reports import reports_in
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.chunk_decoder import stored_pieces, stored_tensors
from tests.support.cpu_clock import ClockOfLooks
from tests.support.tuning import tuned
from tests.unit.ranks import fresh_store

CHUNK = 64 << 10
AUTO = tuned(
    Settings(chunk_bytes=CHUNK, compression="auto", deduplicate=False, commit_timeout_seconds=20.0),
    window_bytes=CHUNK,
    coded_bytes_min=CHUNK,
)
CODED_BYTES_PER_SECOND = CHUNK / 3e-3
"""What a thread codes: `ClockOfLooks` gives each chunk three milliseconds, one to encode it and two for the rest."""

SLOW, FAST = 1e6, 1e9
WEIGHTS, MASTERS, MOMENTS = "bfloat16 parameter", "float32 master", "float32 exp_avg"


class PacedStore(ForwardingStore):
    """Takes bytes of packs at a bandwidth that the test sets, one write after the other."""

    def __init__(self, inner: Store, clock: ClockOfLooks) -> None:
        super().__init__(inner)
        self.clock, self.bytes_per_second, self.lock = clock, SLOW, threading.Lock()

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        inner = super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)
        return PacedUpload(self, inner)


class PacedUpload:
    def __init__(self, store: PacedStore, inner: Upload) -> None:
        self._store, self._inner = store, inner
        self.room, self.complete, self.abort = inner.room, inner.complete, inner.abort

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        with self._store.lock:
            self._store.clock.seconds += len(data) / self._store.bytes_per_second
        self._inner.write(offset, data, release)


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def state(seed: int, elements: int = 4 * CHUNK) -> dict[str, GlobalTensor]:
    """Weights, their masters, moments and a small buffer."""
    draw = np.random.default_rng(seed)
    masters = (draw.standard_normal(elements) * 0.02).astype(np.float32)
    # To nearest, halves to even, as a cast to bfloat16 does.
    bits = masters.view(np.uint32)
    weights = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    moments = (draw.standard_normal(elements) * 1e-4).astype(np.float32)
    return {
        "model.w": GlobalTensor("bfloat16", weights),
        "master.w": GlobalTensor("float32", masters),
        "optimizer.state.w.exp_avg": GlobalTensor("float32", moments, None, Role.OPTIMIZER),
        "small": GlobalTensor("float32", np.ones(7, np.float32), None, Role.BUFFER),
    }


def zeros_like(wanted: Mapping[str, GlobalTensor]) -> dict[str, GlobalTensor]:
    return {
        fqn: GlobalTensor(each.dtype, np.zeros_like(each.array), each.layout, each.role) for fqn, each in wanted.items()
    }


def bytes_in(wanted: Mapping[str, GlobalTensor]) -> dict[str, bytes]:
    return {fqn: each.array.tobytes() for fqn, each in wanted.items()}


def played(
    part: Callable[[CheckpointManager, PacedStore], None], settings: Settings = AUTO
) -> tuple[PacedStore, list[Event]]:
    """Run a job of one rank; return its store and what its observer heard."""
    clock, heard = ClockOfLooks(1e-3), Heard()
    store = PacedStore(fresh_store(), clock)

    def work(comm: ThreadComm) -> None:
        job = Job(comm, clock, settings, NumpyFramework(comm.rank), codecs=codecs())
        with CheckpointManager.over(store, job, observers=[heard]) as manager:
            part(manager, store)

    for outcome in outcomes_of_ranks(1, work):
        if isinstance(outcome, BaseException):
            raise outcome
    return store, heard.events


def saved(manager: CheckpointManager, step: int) -> dict[str, KindCoding]:
    report = manager.save(step, state(step)).wait(timeout=25.0)
    assert isinstance(report, SaveReport)
    assert [each.raw_bytes for each in report.codings] == sorted(
        (each.raw_bytes for each in report.codings), reverse=True
    )
    return {each.kind: each for each in report.codings}


def held_by_packs(store: Store, step: int) -> dict[str, tuple[int, int]]:
    """Return the raw and stored bytes of each kind, as the index has them."""
    sizes = {}
    names = {"model.w": WEIGHTS, "master.w": MASTERS, "optimizer.state.w.exp_avg": MOMENTS}
    for fqn, pieces in stored_pieces(store, step_folder(step)).items():
        if fqn in names:
            sizes[names[fqn]] = sum(each.bytes for each in pieces), sum(each.stored_bytes for each in pieces)
    return sizes


def test_decisions_follow_the_store_and_packs_hold_what_was_decided() -> None:
    bandwidths = [SLOW, SLOW, SLOW, FAST, FAST, FAST, SLOW, SLOW]
    coded: list[set[str]] = []

    def part(manager: CheckpointManager, store: PacedStore) -> None:
        for step, bytes_per_second in enumerate(bandwidths, start=1):
            store.bytes_per_second = bytes_per_second
            rows = saved(manager, step)
            assert {kind: (row.raw_bytes, row.stored_bytes) for kind, row in rows.items()} == held_by_packs(store, step)
            coded.append({kind for kind, row in rows.items() if row.codec})
            assert all((row.stored_bytes < row.raw_bytes) == bool(row.codec) for row in rows.values())
            target = zeros_like(state(step))
            assert manager.load(target, step=step) == step
            assert bytes_in(target) == bytes_in(state(step))

    played(part)
    everything = {WEIGHTS, MASTERS, MOMENTS}
    assert FAST > CODED_BYTES_PER_SECOND > SLOW
    assert coded == [set(), everything, everything, everything, set(), set(), set(), everything]


def test_a_report_says_how_long_was_predicted_found_and_why() -> None:
    rows: list[dict[str, KindCoding]] = []

    def part(manager: CheckpointManager, store: PacedStore) -> None:
        rows.extend(saved(manager, step) for step in (1, 2))

    store, events = played(part)
    first, second = rows
    assert {row.why for row in first.values()} == {"nothing is measured yet: the first save is raw"}
    assert {row.predicted_seconds for row in first.values()} == {None}
    assert first[MASTERS].ratio is not None and first[MASTERS].ratio > 1.9, "sampled against its weight"
    assert {row.codec for row in first.values()} == {""}
    assert {kind: row.codec for kind, row in second.items()} == {
        WEIGHTS: "planes",
        MASTERS: "residual",
        MOMENTS: "planes",
    }
    for row in second.values():
        assert row.ratio == pytest.approx(row.raw_bytes / row.stored_bytes)
        assert row.store_bytes_per_second == pytest.approx(SLOW)
        assert row.predicted_seconds == pytest.approx(row.found_seconds, rel=0.05)
        assert row.why.startswith("the save is predicted to take ")
    for kind in (WEIGHTS, MOMENTS):
        assert second[kind].encode_bytes_per_second == pytest.approx(CODED_BYTES_PER_SECOND)
    decided = [event for event in events if isinstance(event, Decided)]
    assert [event.operation.step for event in decided] == [1, 2]
    assert {kind for kind, each in decided[1].decisions.items() if each.is_coded} == set(second)
    assert decided[0].predicted_seconds is None
    assert decided[1].predicted_seconds == second[MASTERS].predicted_seconds
    ended = [event.report for event in events if isinstance(event, Ended)]
    assert [{row.kind: row for row in report.codings} for report in ended] == [first, second]
    assert ended[1].facts["stored_bytes"] == sum(size for _, size in held_by_packs(store, 2).values()) + 28
    (beside,) = (report for _, report in reports_in(store, step_folder(2)))
    assert isinstance(beside, RankReport) and beside.codings == ended[1].codings


def test_later_saves_at_a_fast_store_sample_little() -> None:
    """One chunk in 64 of each kind in the first save; then 0.5 % of the processor time, one chunk at most here."""
    taken: list[int] = []
    chunks = {"write": 0}

    def part(manager: CheckpointManager, store: PacedStore) -> None:
        store.bytes_per_second = FAST
        history = manager._parts.job.coding.histories.of(store.url)
        for step in range(1, 12):
            before = sum(history._knowledge.measured_at.values())
            saved(manager, step)
            taken.append(sum(history._knowledge.measured_at.values()) - before)
        chunks["saves"] = history._knowledge.saves

    played(part)
    assert chunks["saves"] == 11
    assert taken[0] == 3, "each kind was measured in the first save"
    assert sum(count > 0 for count in taken[1:]) < 8


def test_kinds_that_are_skipped_stay_plain_and_are_not_reported() -> None:
    settings = tuned(
        Settings(chunk_bytes=CHUNK, compression="on", compression_skip=("model",), deduplicate=False),
        window_bytes=CHUNK,
        coded_bytes_min=CHUNK,
    )

    def part(manager: CheckpointManager, store: PacedStore) -> None:
        rows = saved(manager, 1)
        assert rows.keys() == {MASTERS, MOMENTS}
        assert {row.why for row in rows.values()} == {'compression="on"'}
        assert all(piece.coding is None for piece in stored_pieces(store, step_folder(1))["model.w"])
        assert stored_tensors(store, step_folder(1)) == bytes_in(state(1))

    played(part, settings)


def test_without_compression_nothing_is_measured(tmp_path: Path) -> None:
    heard = Heard()
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, observers=[heard]) as manager:
        report = manager.save(1, {"a": torch.ones(1 << 16)}).wait()
    assert report is not None and report.codings == ()
    assert not [event for event in heard.events if isinstance(event, Decided)]
    (ended,) = (event for event in heard.events if isinstance(event, Ended))
    assert ended.report.codings == () and ended.report.facts["stored_bytes"] == ended.report.bytes


def test_ranks_decide_for_themselves_and_any_rank_reads_all() -> None:
    """Rank 0 has a slow line to the store, rank 1 a fast one."""
    store, kinds = fresh_store(), dict[int, set[str]]()

    def work(comm: ThreadComm) -> None:
        clock = ClockOfLooks(1e-3)
        paced = PacedStore(store, clock)
        paced.bytes_per_second = FAST if comm.rank else SLOW
        job = Job(comm, clock, AUTO, NumpyFramework(comm.rank), codecs=codecs())
        with CheckpointManager.over(paced, job) as manager:
            for step in (1, 2):
                report = manager.save(step, both(step)).wait(timeout=25.0)
            assert isinstance(report, SaveReport)
            kinds[comm.rank] = {each.kind for each in report.codings if each.codec}
            target = zeros_like(both(2))
            manager.load(target)
            assert bytes_in(target) == bytes_in(both(2))

    for outcome in outcomes_of_ranks(2, work):
        if isinstance(outcome, BaseException):
            raise outcome
    assert kinds == {0: {WEIGHTS, MASTERS}, 1: set()}


def both(step: int) -> dict[str, GlobalTensor]:
    """Two weights and their masters: plain tensors, of which each rank writes one pair."""
    return {f"{part}.{rank}": state(step + 10 * rank)[f"{part}.w"] for part in ("model", "master") for rank in (0, 1)}
