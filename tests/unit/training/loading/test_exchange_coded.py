"""Ranks pass on coded chunks as they are stored, and decode what they receive; the job reads each byte once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._face import wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.ports.packs import Packs, Stored
from holdfast.base.types.plan import LoadPlan, WantedBoxes
from holdfast.core.engine.exchange import ExchangeProbe, PlannedExchange, TransferStats, execute_exchange
from holdfast.core.engine.target import HostTarget
from holdfast.core.plan.exchange import description_of, job_exchange
from holdfast.core.plan.reads import load_plan
from holdfast.errors import CorruptError
from holdfast.settings import PAGE_BYTES, Settings
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.support.coded_states import ATTEMPT, CHUNK, CodedPieces, stored_training
from tests.support.tuning import tuned

SETTINGS = tuned(Settings(chunk_bytes=CHUNK), window_bytes=CHUNK, read_window_bytes=4 * CHUNK, windows_in_flight=2)
SHAPE = (120, 211)
WHOLE = Box.whole(SHAPE)
ROUND_BYTES = 16 * CHUNK
"""Small, so that a load takes several rounds."""

Wanted = list[tuple[str, Box]]


def rows(count: int) -> list[Box]:
    """The tensor in even shards of rows."""
    cuts = [SHAPE[0] * number // count for number in range(count + 1)]
    return [Box((a, 0), (b, SHAPE[1])) for a, b in pairwise(cuts)]


SAVED: dict[str, Sequence[Region]] = {
    "three": rows(3),
    "one": [WHOLE],
    "flat": [FlatRange(0, 9001), FlatRange(9001, math.prod(SHAPE))],
}
STORED = {name: stored_training(SHAPE, regions, seed=20 + at) for at, (name, regions) in enumerate(SAVED.items())}


def data_bytes(stored: CodedPieces) -> int:
    return sum(len(data) - PAGE_BYTES for data in stored.packs.values())


DATA_BYTES = {name: data_bytes(stored) for name, stored in STORED.items()}

LAYOUTS: dict[str, list[Wanted]] = {
    "sharded in two": [[(fqn, box) for fqn in "wmv"] for box in rows(2)],
    "sharded in five": [[(fqn, box) for fqn in "wmv"] for box in rows(5)],
    "replicated": [[(fqn, WHOLE) for fqn in "wmv"]] * 3,
    "columns": [[(fqn, box) for fqn in "wmv"] for box in (Box((0, 0), (120, 70)), Box((0, 70), SHAPE))],
    "two by two": [[(fqn, box) for fqn in "wmv"] for box in rows(2) for _ in range(2)],
}


def plan_of(stored: CodedPieces, wanted: Wanted) -> LoadPlan:
    boxes = [WantedBoxes(fqn, (box,)) for fqn, box in wanted]
    return load_plan(boxes, stored.near, SETTINGS._tuning.read_window_bytes, whole_units=True)


def exchanged(
    stored: CodedPieces, layout: Sequence[Wanted], *, after_rounds: int | None = None, packs: Packs | None = None
) -> list[TransferStats | BaseException]:
    """Load on as many ranks as the layout has, exchange forced; require every element to be what was saved."""
    numbers = {name: number for number, name in enumerate(sorted(stored.packs))}
    plans = [plan_of(stored, wanted) for wanted in layout]
    descriptions = [description_of(plan, numbers, ROUND_BYTES, forced=True) for plan in plans]
    agreed = job_exchange(descriptions, ROUND_BYTES, forced=True)
    assert agreed is not None
    probe = None if after_rounds is None else ExchangeProbe(after_rounds, lambda _: False)

    def load(comm: ThreadComm) -> TransferStats:
        wanted = layout[comm.rank]
        targets = [HostTarget(stored.pieces[fqn][0].tensor.dtype, box) for fqn, box in wanted]
        for target in targets:
            target.array.view(np.uint8)[...] = 0xA5
        moved = execute_exchange(
            PlannedExchange(lambda: agreed.plan_of(comm.rank, plans[comm.rank], numbers), agreed.round_count, probe),
            comm,
            SystemClock(),
            packs or stored.packs_in(stored.store),
            targets,
            SETTINGS,
            wiring.codecs(),
        )
        if moved.whole:
            for (fqn, box), target in zip(wanted, targets, strict=True):
                expected = stored.values[fqn][box.relative_to((0, 0))]
                assert target.array.tobytes() == expected.tobytes(), f"rank {comm.rank}: {fqn} {box}"
        return moved

    return list(outcomes_of_ranks(len(layout), load))


def read_bytes(outcomes: Sequence[TransferStats | BaseException]) -> int:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return sum(outcome.read_bytes for outcome in outcomes if isinstance(outcome, TransferStats))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("saved", STORED)
def test_a_job_reads_each_stored_byte_once(saved: str, layout: str) -> None:
    assert read_bytes(exchanged(STORED[saved], LAYOUTS[layout])) == DATA_BYTES[saved]


def test_replicated_weights_of_sharded_masters_are_read_at_most_twice() -> None:
    """ZeRO-1: the rank that holds masters reads their pairs with them, and the others read the weights among them."""
    stored = STORED["three"]
    layout = [[("w", WHOLE), *((fqn, box) for fqn in "mv")] for box in rows(4)]
    found = read_bytes(exchanged(stored, layout))
    weights = sum(piece.stored_bytes for piece in stored.pieces["w"])
    assert DATA_BYTES["three"] < found <= DATA_BYTES["three"] + weights + 4 * 2 * CHUNK


@pytest.mark.parametrize("after_rounds", (0, 1, 2))
def test_ranks_may_stop_exchanging_and_read_the_rest(after_rounds: int) -> None:
    outcomes = exchanged(STORED["three"], LAYOUTS["replicated"], after_rounds=after_rounds)
    assert read_bytes(outcomes) > DATA_BYTES["three"]


@st.composite
def layouts(draw: st.DrawFn) -> list[Wanted]:
    def box() -> Box:
        edges = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in SHAPE]
        start, stop = zip(*((a, b if b > a else a + 1) for a, b in edges), strict=True)
        return Box(start, stop)

    shared = box()
    return [
        [("w", shared), ("m", shared)] + [(draw(st.sampled_from("wmv")), box()) for _ in range(draw(st.integers(0, 3)))]
        for _ in range(draw(st.integers(2, 4)))
    ]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(STORED)), layouts())
def test_any_layout_comes_to_the_same_bits(saved: str, layout: list[Wanted]) -> None:
    stored = STORED[saved]
    alone = sum(plan_of(stored, wanted).bytes for wanted in layout)
    assert read_bytes(exchanged(stored, layout)) <= alone


def test_a_base_that_is_damaged_stops_all_ranks_and_is_named() -> None:
    stored = stored_training(SHAPE, rows(3), seed=77)
    pack = "coded/r00001.safetensors"
    whole = bytearray(stored.store.get(ATTEMPT + pack, 1 << 30))
    start, stop = stored.pieces["w"][1].stored_range(1)
    whole[start + 50] ^= 4
    stored.store.put(ATTEMPT + pack, bytes(whole))
    outcomes = exchanged(stored, LAYOUTS["replicated"])
    errors = [outcome for outcome in outcomes if isinstance(outcome, CorruptError)]
    assert errors and f"{start}–{stop}" in str(errors[0]) and "w" in str(errors[0])
    assert all(isinstance(each, CorruptError) or each == TransferStats(0, 0, whole=False) for each in outcomes)


@pytest.mark.parametrize("after_rounds", (None, 0, 1))
def test_damaged_chunks_come_from_the_other_place_to_every_rank(
    after_rounds: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = stored_training(SHAPE, rows(2), seed=78)
    near, far = (LocalStore(tmp_path / each, settings=SETTINGS) for each in ("near", "far"))
    (first, second) = sorted(stored.packs)
    damaged = {near: [("w", 0), ("m", 3)], far: [("w", 1), ("m", 2), ("v", 0)]}
    for store, chunks in damaged.items():
        data = stored.packs[first].copy()
        for fqn, number in chunks:
            data[stored.pieces[fqn][0].stored_range(number)[0] + 30] ^= 4
        store.put(ATTEMPT + first, bytes(data))
    far.put(ATTEMPT + second, bytes(stored.packs[second]))
    outcomes = exchanged(
        stored,
        LAYOUTS["replicated"][:2],
        after_rounds=after_rounds,
        packs=lambda name: Stored(near, ATTEMPT + name, (Stored(far, ATTEMPT + name),)),
    )
    read = read_bytes(outcomes)
    sources = sum((Counter(each.sources) for each in outcomes if isinstance(each, TransferStats)), Counter())
    assert sum(sources.values()) == read
    elsewhere = sum(stored.pieces[fqn][0].stored_range(number)[1] for fqn, number in damaged[near])
    elsewhere -= sum(stored.pieces[fqn][0].stored_range(number)[0] for fqn, number in damaged[near])
    if after_rounds is None:
        assert read == data_bytes(stored)
        assert sources[far.url] == elsewhere + len(stored.packs[second]) - PAGE_BYTES
    said = Counter(record.message.partition(": ")[0] for record in caplog.records)
    assert set(said) == {f"{near.url}/{ATTEMPT}{name}" for name in stored.packs}
    assert max(said.values()) <= 2, "one warning a pack and rank"


def test_units_are_never_cut_by_cells() -> None:
    """Whatever a description is cut at, both chunks of a base and the base go with one rank."""
    stored = STORED["three"]
    plan = plan_of(stored, [(fqn, WHOLE) for fqn in "wmv"])
    numbers = {name: number for number, name in enumerate(sorted(stored.packs))}
    for round_bytes in (1, CHUNK, 3 * CHUNK, 40 * CHUNK):
        descriptions = [description_of(plan, numbers, round_bytes, forced=True)] * 3
        agreed = job_exchange(descriptions, round_bytes, forced=True)
        assert agreed is not None
        seen: list[tuple[str, int]] = []
        for rank in range(3):
            exchange = agreed.plan_of(rank, plan, numbers)
            gives = [give.run for each in exchange.rounds for give in each.gives]
            for run in [*gives, *exchange.alone.runs]:
                for base in {id(chunk.base): chunk.base for chunk in run.chunks if chunk.base is not None}.values():
                    sharing = [chunk.number for chunk in run.chunks if chunk.base is base]
                    count = chunk_count(run.chunks[0].piece.bytes, CHUNK)
                    assert len(sharing) == min(2, count - sharing[0])
                    seen.append((base.piece.pack, base.offset))
        assert len(seen) == len(set(seen)), "a base is read once"
