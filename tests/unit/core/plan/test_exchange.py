"""Who reads what for whom: every wanted chunk reaches everyone who wants it, read once, evenly, in bounded rounds."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import (
    ExchangePlan,
    LoadPlan,
    Piece,
    ReadRun,
    Throughput,
    WantedBoxes,
    give_slot_bytes,
    take_slot_bytes,
)
from holdfast.core.plan.balance import water_fill
from holdfast.core.plan.exchange import (
    JobExchange,
    Load,
    description_of,
    exchanging_beats_reading,
    job_exchange,
)
from holdfast.core.plan.reads import load_plan
from holdfast.errors import CorruptError

CHUNK = 1 << 16
ROUND = 1 << 20
GIB = 1 << 30


def pieces_of_packs(packs: Sequence[Sequence[int]]) -> dict[str, list[Piece]]:
    """Return one tensor of bytes per piece, pieces of these lengths one after the other in each pack."""
    found = {}
    for pack, lengths in enumerate(packs):
        offset = 4096
        for number, length in enumerate(lengths):
            spec = TensorSpec(f"{pack}.{number}", "uint8", (length,))
            digests = bytes(16 * chunk_count(length, CHUNK))
            name = f"r{pack:05d}.safetensors"
            found[spec.fqn] = [Piece(spec, Box.whole((length,)), name, offset, digests, CHUNK)]
            offset += length
    return found


def plan_of(pieces: dict[str, list[Piece]], wanted: dict[str, tuple[int, int]]) -> LoadPlan:
    """Return the reads for a run of bytes of each tensor named."""
    boxes = [WantedBoxes(fqn, (Box((start,), (stop,)),)) for fqn, (start, stop) in wanted.items() if start < stop]
    return load_plan(boxes, lambda fqn, _: pieces[fqn], 4 * CHUNK)


def whole(pieces: dict[str, list[Piece]]) -> dict[str, tuple[int, int]]:
    return {fqn: (0, each[0].bytes) for fqn, each in pieces.items()}


def exchanged(
    plans: Sequence[LoadPlan], packs: int, round_bytes: int = ROUND, *, forced: bool = True
) -> JobExchange | None:
    numbers = {f"r{pack:05d}.safetensors": pack for pack in range(packs)}
    said = [description_of(plan, numbers, round_bytes, forced=True) for plan in plans]
    return job_exchange(said, round_bytes, forced=forced)


def plans_of(job: JobExchange, plans: Sequence[LoadPlan], packs: int) -> list[ExchangePlan]:
    numbers = {f"r{pack:05d}.safetensors": pack for pack in range(packs)}
    return [job.plan_of(rank, plan, numbers) for rank, plan in enumerate(plans)]


def chunks_in(runs: Sequence[ReadRun]) -> list[tuple[str, int]]:
    return [(run.pack, chunk.offset) for run in runs for chunk in run.chunks]


def bytes_in(runs: Sequence[ReadRun]) -> int:
    return sum(run.stop - run.start for run in runs)


def read_by(plan: ExchangePlan) -> list[ReadRun]:
    return [*plan.alone.runs, *(give.run for each in plan.rounds for give in each.gives)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[LoadPlan]]:
    """Packs of pieces of many sizes, and ranks that want runs of them: alike, shifted, or at random."""
    lengths = st.sampled_from((1, 16, 4096, CHUNK, 3 * CHUNK, 3 * CHUNK + 100, 40 * CHUNK))
    packs = draw(st.lists(st.lists(lengths, min_size=1, max_size=6), min_size=1, max_size=3))
    pieces = pieces_of_packs(packs)
    kinds: list[dict[str, tuple[int, int]]] = [whole(pieces)]
    for _ in range(draw(st.integers(0, 3))):
        wanted = {}
        for fqn, (_, stop) in whole(pieces).items():
            edges = sorted((draw(st.integers(0, stop)), draw(st.integers(0, stop))))
            wanted[fqn] = edges[0], edges[1]
        kinds.append(wanted)
    ranks = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=6))
    return len(packs), [plan_of(pieces, kinds[kind]) for kind in ranks]


@given(jobs(), st.sampled_from((1 << 14, ROUND, 1 << 22)))
@hypothesis_settings(max_examples=150, deadline=None)
def test_every_wanted_chunk_reaches_everyone_who_wants_it_and_is_read_once(
    case: tuple[int, list[LoadPlan]], round_bytes: int
) -> None:
    packs, plans = case
    wanted = Counter(chunk for plan in plans for chunk in chunks_in(plan.runs))
    job = exchanged(plans, packs, round_bytes)
    if job is None:
        assert all(count == 1 for count in wanted.values())
        return
    assert any(count > 1 for count in wanted.values())
    found = plans_of(job, plans, packs)
    read = Counter(chunk for plan in found for chunk in chunks_in(read_by(plan)))
    assert read == dict.fromkeys(wanted, 1)
    for plan, own in zip(plans, found, strict=True):
        came = [*read_by(own), *(take.run for each in own.rounds for take in each.takes)]
        assert Counter(chunks_in(came)) == dict.fromkeys(chunks_in(plan.runs), 1)
    require_matched(found)
    require_bounded(job, found, round_bytes)


def require_matched(found: Sequence[ExchangePlan]) -> None:
    """What one rank gives another is, round by round and run by run, what that one takes."""
    assert len({len(plan.rounds) for plan in found}) == 1
    for number in range(len(found[0].rounds)):
        for giver, plan in enumerate(found):
            for taker, other in enumerate(found):
                given_runs = [give.run for give in plan.rounds[number].gives if taker in give.receivers]
                taken_runs = [take.run for take in other.rounds[number].takes if take.reader == giver]
                assert [chunks_in([run]) for run in given_runs] == [chunks_in([run]) for run in taken_runs]


def require_bounded(job: JobExchange, found: Sequence[ExchangePlan], round_bytes: int) -> None:
    """No round is larger than allowed, but for one that holds a single run; and none is empty for everybody."""
    assert job.round_count == len(found[0].rounds)
    for each in zip(*(plan.rounds for plan in found), strict=True):
        assert any(own.gives for own in each)
        for own in each:
            for runs, slot_bytes in (
                ([give.run for give in own.gives], give_slot_bytes),
                ([take.run for take in own.takes], take_slot_bytes),
            ):
                assert len(runs) <= 1 or sum(slot_bytes(bytes_in([run])) for run in runs) <= round_bytes


@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_copies_are_read_in_even_shares(ranks: int) -> None:
    pieces = pieces_of_packs([[100 * CHUNK, 7, 60 * CHUNK + 5], [40 * CHUNK]])
    plans = [plan_of(pieces, whole(pieces))] * ranks
    job = exchanged(plans, 2)
    assert job is not None
    read = [bytes_in(read_by(plan)) for plan in plans_of(job, plans, 2)]
    assert max(read) - min(read) <= 2 * ROUND // 4 + 2 * CHUNK
    assert job.whole.read_bytes == max(read)
    assert job.whole.alone_bytes == plans[0].bytes
    assert job.whole.moved_bytes >= plans[0].bytes - max(read)


def test_a_rank_that_reads_much_alone_reads_less_for_others() -> None:
    pieces = pieces_of_packs([[100 * CHUNK], [200 * CHUNK]])
    both = plan_of(pieces, whole(pieces))
    plans = [both, plan_of(pieces, {"1.0": (0, 200 * CHUNK)})]
    job = exchanged(plans, 2)
    assert job is not None
    first, second = (bytes_in(read_by(plan)) for plan in plans_of(job, plans, 2))
    assert abs(first - second) <= ROUND // 4 + CHUNK


def test_shares_are_runs_long_enough_to_be_read_in_windows() -> None:
    pieces = pieces_of_packs([[400 * CHUNK]])
    plans = [plan_of(pieces, whole(pieces))] * 4
    job = exchanged(plans, 1)
    assert job is not None
    for plan in plans_of(job, plans, 1):
        runs = sorted((run.start, run.stop) for run in read_by(plan))
        assert sum(stop != start for (_, stop), (start, _) in pairwise(runs)) == 0, "one share is one stretch"
        assert all(stop - start >= ROUND // 4 - CHUNK for start, stop in runs[1:-1])


def test_nothing_is_exchanged_where_nobody_wants_what_another_reads() -> None:
    pieces = pieces_of_packs([[30 * CHUNK], [30 * CHUNK]])
    own = [plan_of(pieces, {f"{rank}.0": (0, 30 * CHUNK)}) for rank in range(2)]
    assert exchanged(own, 2) is None
    assert exchanged([LoadPlan(()), LoadPlan(())], 2) is None
    assert exchanged([own[0], LoadPlan(()), own[1], LoadPlan(())], 2) is None


def test_a_cut_inside_a_chunk_is_read_by_one_of_the_two() -> None:
    pieces = pieces_of_packs([[30 * CHUNK]])
    cut = 10 * CHUNK + 77
    plans = [plan_of(pieces, {"0.0": (0, cut)}), plan_of(pieces, {"0.0": (cut, 30 * CHUNK)})]
    job = exchanged(plans, 1)
    assert job is not None
    assert job.round_count == 1
    first, second = plans_of(job, plans, 1)
    assert bytes_in(read_by(first)) + bytes_in(read_by(second)) == 30 * CHUNK
    assert bytes_in([give.run for each in first.rounds for give in each.gives]) == CHUNK, "it reads less than the other"
    assert not job.whole.is_worth_a_probe
    assert exchanged(plans, 1, forced=False) is None


def test_what_takes_too_long_to_describe_is_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = pieces_of_packs([[2 * CHUNK] * 2000])
    plan = plan_of(pieces, {fqn: (0, 1 + number % 1000) for number, fqn in enumerate(pieces)})
    numbers = {"r00000.safetensors": 0}
    assert description_of(plan, numbers, ROUND, forced=False)
    monkeypatch.setattr("holdfast.core.plan.exchange._DESCRIPTION_BYTES_MAX", 64)
    assert description_of(plan, numbers, ROUND, forced=False) == b""
    assert 64 < len(description_of(plan, numbers, ROUND, forced=True)) < 16 * len(plan.runs)


def described(first: int, count: int, length: int) -> bytes:
    """What a rank says that reads so many runs of one pack, none next to another."""
    pieces = pieces_of_packs([[length, 1] * count])
    plan = plan_of(pieces, {f"0.{2 * number}": (0, length) for number in range(first, count)})
    return description_of(plan, {"r00000.safetensors": 0}, ROUND, forced=True)


def test_what_could_save_too_little_is_planned_by_force_only() -> None:
    little, much = described(0, 100, CHUNK), described(0, 100, 80 * CHUNK)
    assert job_exchange([little] * 8, ROUND, forced=False) is None
    assert job_exchange([little] * 8, ROUND, forced=True) is not None
    assert job_exchange([much] * 8, ROUND, forced=False) is not None


def test_what_would_take_seconds_to_plan_is_planned_by_force_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that differ describe many runs, or many ranks want each of many segments."""
    same, differing = [described(0, 100, 80 * CHUNK)] * 4, [described(rank, 100, 80 * CHUNK) for rank in range(4)]
    runs = sum(len(zlib.decompress(each)) // 32 for each in differing)
    monkeypatch.setattr("holdfast.core.plan.exchange._PAIRS_MAX", runs)
    assert job_exchange(differing, ROUND, forced=False) is not None
    monkeypatch.setattr("holdfast.core.plan.exchange._PAIRS_MAX", runs - 1)
    assert job_exchange(differing, ROUND, forced=False) is None
    assert job_exchange(differing, ROUND, forced=True) is not None
    found = job_exchange(same, ROUND, forced=False)
    assert found is not None, "ranks that say the same are one"
    monkeypatch.setattr("holdfast.core.plan.exchange._MEMBERS_MAX", 4 * int((found.readers >= 0).sum()) - 1)
    assert job_exchange(same, ROUND, forced=False) is None
    assert job_exchange(same, ROUND, forced=True) is not None


def test_pieces_that_overlap_are_damage() -> None:
    """As a crafted index may state them: one begins inside a chunk of another that some rank reads alone."""
    pieces = pieces_of_packs([[100], [100]])
    inside = replace(pieces["1.0"][0], pack="r00000.safetensors", offset=4146)
    pieces["1.0"] = [inside]
    plans = [plan_of(pieces, wanted) for wanted in (whole(pieces), whole(pieces), {"1.0": (0, 100)})]
    job = exchanged(plans, 1)
    assert job is not None
    numbers = {"r00000.safetensors": 0}
    with pytest.raises(CorruptError, match=r"^0\.0: r00000\.safetensors: .* inside the chunk at bytes 4096–4196;"):
        job.plan_of(0, plans[0], numbers)


def test_pieces_that_share_bytes_are_found_before_they_are_exchanged() -> None:
    """In a file of another system a tensor may be a part of another one: a rank alone sees only what it reads."""
    pieces = pieces_of_packs([[100], [30], [100]])
    numbers = {"r00000.safetensors": 0}
    pieces["1.0"] = [replace(pieces["1.0"][0], pack="r00000.safetensors", offset=4146)]
    both = whole({fqn: pieces[fqn] for fqn in ("0.0", "1.0")})
    plans = [plan_of(pieces, wanted) for wanted in (both, {"0.0": (0, 100)}, {"1.0": (0, 30)})]
    job = exchanged(plans, 1)
    assert job is not None
    assert [job.divides(plan.runs, numbers) for plan in plans] == [True, True, False]
    words = TensorSpec("2.0", "float32", (25,))
    pieces["2.0"] = [Piece(words, Box.whole((25,)), "r00000.safetensors", 4096, bytes(16), CHUNK)]
    plans = [plan_of(pieces, wanted) for wanted in ({"0.0": (0, 100), "2.0": (0, 25)}, {"2.0": (0, 25)})]
    job = exchanged(plans, 1)
    assert job is not None
    assert [job.divides(plan.runs, numbers) for plan in plans] == [True, False], "two elements of other sizes"


def test_a_job_of_many_ranks_is_planned_quickly() -> None:
    """4096 ranks, 64 replicas of 64 shards that are cut inside chunks: time grows with what is described."""
    pieces = pieces_of_packs([[640 * CHUNK]])
    cuts = [number * 640 * CHUNK // 64 + 5 for number in range(64)] + [640 * CHUNK]
    plans = [plan_of(pieces, {"0.0": (start, stop)}) for start, stop in pairwise(cuts)] * 64
    job = exchanged(plans, 1)
    assert job is not None
    numbers = {"r00000.safetensors": 0}
    read = [bytes_in(read_by(job.plan_of(rank, plan, numbers))) for rank, plan in enumerate(plans)]
    assert sum(read) == 640 * CHUNK
    assert max(read) <= ROUND // 4 + 2 * CHUNK, "its share, and a chunk at either cut"


@pytest.mark.parametrize("shards", (2, 16))
def test_groups_that_share_nothing_pass_on_in_the_same_rounds(shards: int) -> None:
    """As many rounds as one group of replicas takes alone, however many groups there are."""
    pieces = pieces_of_packs([[200 * CHUNK] for _ in range(shards)])
    plans = [plan_of(pieces, {f"{shard}.0": (0, 200 * CHUNK)}) for shard in range(shards) for _ in range(4)]
    one, all_of_them = exchanged(plans[:4], shards), exchanged(plans, shards)
    assert one is not None
    assert all_of_them is not None
    assert all_of_them.round_count == one.round_count
    for plan in plans_of(all_of_them, plans, shards):
        assert all(each.gives or each.takes for each in plan.rounds), "nobody sits a round out"


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9), st.integers(0, 5000), st.integers(0, 700))
def test_shares_are_all_of_it_and_as_level_as_can_be(loads: list[int], amount: int, share_min: int) -> None:
    shares = water_fill(np.array(loads, dtype=np.int64), amount, share_min).tolist()
    assert sum(shares) == amount
    assert min(shares) >= 0
    after = [load + share for load, share in zip(loads, shares, strict=True)]
    taking = [each for each, share in zip(after, shares, strict=True) if share]
    assert not taking or max(taking) - min(taking) <= 1
    assert len(taking) <= max(amount // max(share_min, 1), 1)
    if share_min == 0 and taking:
        left_out = [each for each, share in zip(after, shares, strict=True) if not share]
        assert min(left_out, default=max(taking)) >= max(taking) - 1, "nobody less loaded was passed over"


def pace(read_gib_per_second: float, moved_gib_per_second: float) -> Throughput:
    return Throughput(GIB, 1 / read_gib_per_second, GIB, 1 / moved_gib_per_second)


@pytest.mark.parametrize(
    ("storage", "exchange", "goes_on"),
    [
        (0.5, 10.0, True),  # network storage, fast network
        (2.5, 1.2, False),  # a local disk, gloo over loopback: 0.4 against 0.2 + 0.42 seconds
        (0.5, 1.2, True),  # 2.0 against 1.0 + 0.42
        (15.0, 10.0, False),  # the page cache
    ],
)
def test_exchanging_is_weighed_by_what_was_measured(storage: float, exchange: float, goes_on: bool) -> None:
    """Two copies of a GiB: each rank reads it all, or reads half and is given half."""
    left = Load(alone_bytes=GIB, read_bytes=GIB // 2, moved_bytes=GIB // 2)
    assert exchanging_beats_reading(left, [pace(storage, exchange)] * 2) is goes_on


def test_ranks_that_neither_read_nor_moved_say_nothing_of_the_speed() -> None:
    left = Load(alone_bytes=GIB, read_bytes=GIB // 4, moved_bytes=GIB)
    idle = Throughput(0, 0.0, 0, 0.0)
    assert exchanging_beats_reading(left, [idle, pace(0.5, 10.0), idle])
    assert not exchanging_beats_reading(left, [idle, pace(15.0, 10.0), idle])


@pytest.mark.parametrize("odd", [pace(15.0, 10.0), Throughput(100, 1e-8, GIB, 0.1), pace(0.01, 0.01)])
def test_one_rank_that_is_faster_or_slower_than_all_others_decides_nothing(odd: Throughput) -> None:
    """Its bytes were in the page cache, or were few, or its machine was busy with something else."""
    left = Load(alone_bytes=64 * GIB, read_bytes=GIB, moved_bytes=64 * GIB)
    assert exchanging_beats_reading(left, [pace(0.2, 5.0)] * 63 + [odd])
    assert not exchanging_beats_reading(left, [pace(0.5, 0.1)] * 63 + [odd])


def test_speed_is_that_of_ranks_that_did_a_fair_part() -> None:
    """Most ranks were given next to nothing to read in the rounds measured, and that was fast."""
    left = Load(alone_bytes=64 * GIB, read_bytes=GIB, moved_bytes=64 * GIB)
    few = Throughput(100, 1e-8, GIB, 0.2)
    assert exchanging_beats_reading(left, [pace(0.2, 5.0)] * 2 + [few] * 62)
