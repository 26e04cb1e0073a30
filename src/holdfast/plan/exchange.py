"""Who reads what once for several ranks, who is given it, and whether that beats everybody reading for himself.

Every rank describes what its load plan reads; from all descriptions each rank reckons the same exchange. Cuts are made
only where some rank's description has one, and these are bounds of chunks, so a chunk is never divided.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import CorruptError
from holdfast.plan.balance import water_fill
from holdfast.settings import MIB
from holdfast.types.exchange import (
    ExchangePlan,
    ExchangeRound,
    Give,
    Take,
    Throughput,
    give_slot_bytes,
    take_slot_bytes,
)
from holdfast.types.plan import ChunkRead, LoadPlan, ReadRun

Ints = NDArray[np.int64]

PROBE_ROUNDS = 2
"""Rounds that are measured before exchanging is weighed against reading. The best counts: the first touches every
buffer, and opens every connection, for the first time."""

_CELLS_IN_ROUND = 4
"""Parts a round is cut into at least, so that several reads are in flight and shares come out even."""

_GAIN_BYTES_MIN = 256 * MIB
"""What the busiest rank must save in reading for a probe to be worth it: two rounds through memory touched for the
first time take as long as reading about that much from a page cache."""

_GAIN_MIN = 0.1
"""The same as a share of what it would read alone."""

_MARGIN = 1.2
"""How many times as fast exchanging must be expected to be: both estimates come from a few rounds, and who reads for
himself reads straight into his tensors where he can."""

_FAIR_PART = 0.25
"""What a rank must have done, of what the one did that did most, for its speed to count."""

_PAIRS_MAX = 1 << 21
"""Runs described by ranks that differ, and segments that these are cut into, beyond which an exchange is planned only
if it is forced: every rank plans all of it, in about a second at this size."""

_MEMBERS_MAX = 1 << 27
"""The same for segments times the ranks that want each of them, which putting them into rounds takes time for."""

_DESCRIPTIONS_BYTES_MAX = 64 * MIB
"""What all descriptions together may take; beyond it, to agree costs more than many an exchange saves."""


def description_of(
    plan: LoadPlan, pack_numbers: Mapping[str, int], round_bytes: int, world_size: int, *, forced: bool
) -> bytes:
    """Return what a rank reads, for every other rank to know: a few bytes a run, cut at bounds of chunks.

    Runs are cut where a chunk begins in another cell of the pack than the one before, so ranks that read the same from
    different starts cut it at the same places.

    Args:
        plan: What it would read alone.
        pack_numbers: Number of each pack of the checkpoint, the same on every rank.
        round_bytes: Bytes a rank may read in one round.
        world_size: Ranks.
        forced: Whether to describe at any length; otherwise a description that is too long is empty.
    """
    cell = max(round_bytes // _CELLS_IN_ROUND, 1)
    rows: list[tuple[int, int, int]] = []
    for run in plan.runs:
        pack, start = pack_numbers[run.pack], run.start
        if start // cell != (run.stop - 1) // cell:
            for chunk in run.chunks:
                if chunk.offset // cell != start // cell:
                    rows.append((pack, start, chunk.offset))
                    start = chunk.offset
        rows.append((pack, start, run.stop))
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
    # Gaps and lengths repeat from layer to layer, so they compress to little.
    table[:, 2] -= table[:, 1]
    table[1:, :2] = np.diff(table[:, :2], axis=0)
    packed = zlib.compress(np.ascontiguousarray(table.T).tobytes(), 1)
    return packed if forced or len(packed) * world_size <= _DESCRIPTIONS_BYTES_MAX else b""


def _rows_of(description: bytes) -> Ints:
    """Return pack, start and stop of each run described; shape (runs, 3)."""
    table = np.frombuffer(zlib.decompress(description), dtype=np.int64).reshape(3, -1).T.copy()
    table[:, :2] = np.cumsum(table[:, :2], axis=0)
    table[:, 2] += table[:, 1]
    return table


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes of the busiest rank, each way of loading."""

    alone_bytes: int
    """Read, if every rank reads what it wants."""

    read_bytes: int
    """Read, if bytes are exchanged."""

    moved_bytes: int
    """Sent or received, whichever is more, if bytes are exchanged."""

    @property
    def is_worth_a_probe(self) -> bool:
        """Whether exchanging may save so much that measuring is worth it."""
        gain = self.alone_bytes - self.read_bytes
        return gain >= max(_GAIN_BYTES_MIN, _GAIN_MIN * self.alone_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class JobExchange:
    """An exchange as every rank knows it: by segment, a run of bytes that the same ranks want."""

    pack_starts: Ints
    """Where each pack begins on one line of all packs' bytes."""

    bounds: Ints
    """Bounds of the segments on that line; one more than there are segments."""

    readers: Ints
    """Who reads each segment; -1 where one rank or none wants it."""

    rounds: Ints
    """In which round each segment is passed on; -1 where it is not."""

    group_of: Ints
    """Number of the group of ranks that want each segment; -1 where nobody does."""

    groups: Sequence[Ints]
    """Ranks of each group, ascending."""

    whole: Load
    """The whole load."""

    left: Load
    """What is left of it after `PROBE_ROUNDS`."""

    @property
    def round_count(self) -> int:
        """Rounds until everything is passed on."""
        return int(self.rounds.max()) + 1

    def plan_of(self, rank: int, plan: LoadPlan, pack_numbers: Mapping[str, int]) -> ExchangePlan:
        """Return what one rank does.

        Args:
            rank: The rank.
            plan: What it would read alone; what it described.
            pack_numbers: As it described with.
        Raises:
            CorruptError: Pieces of the checkpoint overlap, so that a chunk would be divided.
        """
        gives: list[list[Give]] = [[] for _ in range(self.round_count)]
        takes: list[list[Take]] = [[] for _ in range(self.round_count)]
        alone: list[ReadRun] = []
        for run in plan.runs:
            pack_start = int(self.pack_starts[pack_numbers[run.pack]])
            starts = pack_start + np.array([chunk.offset for chunk in run.chunks], dtype=np.int64)
            stops = starts + np.array([chunk.bytes for chunk in run.chunks], dtype=np.int64)
            segments = np.searchsorted(self.bounds, starts, side="right") - 1
            divided = np.flatnonzero(stops > self.bounds[segments + 1])
            if len(divided):
                raise _overlap(run, run.chunks[int(divided[0])])
            kept: list[ChunkRead] = []
            cuts = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(run.chunks)]
            for first, last in pairwise(cuts):
                segment, chunks = int(segments[first]), run.chunks[first:last]
                reader = int(self.readers[segment])
                if reader < 0:
                    kept += chunks
                    continue
                _close(kept, run.pack, alone)
                part = ReadRun.of(run.pack, chunks)
                if reader == rank:
                    ranks = self.groups[self.group_of[segment]]
                    others = tuple(ranks[ranks != rank].tolist())
                    gives[self.rounds[segment]].append(Give(part, others))
                else:
                    takes[self.rounds[segment]].append(Take(part, reader))
            _close(kept, run.pack, alone)
        rounds = (ExchangeRound(tuple(give), tuple(take)) for give, take in zip(gives, takes, strict=True))
        return ExchangePlan(tuple(rounds), LoadPlan(tuple(alone)))


def _overlap(run: ReadRun, chunk: ChunkRead) -> CorruptError:
    return CorruptError(
        f"{chunk.piece.tensor.fqn}: {run.pack}: another piece begins or ends inside the chunk at bytes "
        f"{chunk.offset}–{chunk.offset + chunk.bytes}; expected pieces that do not overlap. Read another copy or "
        "another step"
    )


def _close(kept: list[ChunkRead], pack: str, runs: list[ReadRun]) -> None:
    if kept:
        runs.append(ReadRun.of(pack, tuple(kept)))
        kept.clear()


def job_exchange(descriptions: Sequence[bytes], round_bytes: int, *, forced: bool) -> JobExchange | None:
    """Return the exchange that all ranks' descriptions ask for, or None if no byte is wanted twice.

    Unless it is forced it is None, too, where it could not save enough for a probe, or where to reckon it would take
    seconds; either is known before most of the work is done.

    Ranks that want the same are one class, and segments that the same classes want one group; its segments are cut
    into one contiguous share for each member, so that loads come out level and reads stay long. Groups of few come
    first: they have the least choice. The time taken grows with runs described and with segments times the classes
    that want them, not with ranks times chunks; only to put segments into rounds, with the ranks that want each.

    Args:
        descriptions: By rank; none of them empty.
        round_bytes: Memory a rank may read into, and be given bytes in, in one round. A segment that takes more has a
            round of its own.
        forced: Whether it is wanted at any price.
    """
    classes: dict[bytes, list[int]] = {}
    for rank, description in enumerate(descriptions):
        classes.setdefault(description, []).append(rank)
    tables = _tables_of(classes, forced=forced)
    if not tables:
        return None
    rows = np.concatenate(tables)
    owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    if not len(rows):
        return None
    extents = np.zeros(int(rows[:, 0].max()) + 2, dtype=np.int64)
    np.maximum.at(extents, rows[:, 0] + 1, rows[:, 2])
    pack_starts = np.cumsum(extents)[:-1]
    starts, stops = rows[:, 1] + pack_starts[rows[:, 0]], rows[:, 2] + pack_starts[rows[:, 0]]
    shared_whole = any(len(members) > 1 and len(table) for members, table in zip(classes.values(), tables, strict=True))
    if not shared_whole and _are_apart(starts, stops):
        return None
    bounds = _distinct(np.concatenate((starts, stops)))
    first, last = np.searchsorted(bounds, starts), np.searchsorted(bounds, stops)
    if not forced and int((last - first).sum()) > _PAIRS_MAX:
        return None
    segments, wanters = _wanters(first, last, owners)
    group_of, groups = _groups(segments, wanters, list(classes.values()), len(bounds) - 1)
    return _shared_out(pack_starts, bounds, group_of, groups, len(descriptions), round_bytes, forced=forced)


def _tables_of(descriptions: Iterable[bytes], *, forced: bool) -> list[Ints]:
    """Return the rows of each description; none, unless forced, if they are too many or of too few bytes."""
    tables: list[Ints] = []
    count = longest = 0
    for description in descriptions:
        table = _rows_of(description)
        count, longest = count + len(table), max(longest, int((table[:, 2] - table[:, 1]).sum()))
        if count > _PAIRS_MAX and not forced:
            return []
        tables.append(table)
    return tables if forced or longest >= _GAIN_BYTES_MIN else []


def _distinct(numbers: Ints) -> Ints:
    """Return each number once, ascending. What comes in sorted stretches, as descriptions do, is merged quickly."""
    ordered = np.sort(numbers, kind="stable")
    return ordered[np.concatenate(([True], ordered[1:] > ordered[:-1]))]


def _are_apart(starts: Ints, stops: Ints) -> bool:
    order = np.argsort(starts, kind="stable")
    return bool((starts[order][1:] >= np.maximum.accumulate(stops[order])[:-1]).all())


def _wanters(first: Ints, last: Ints, owners: Ints) -> tuple[Ints, Ints]:
    """Return segments and the classes that want them: pairs in order, each once.

    Args:
        first: First segment of each row.
        last: Segment after its last.
        owners: Class of each row.
    """
    counts = last - first
    before = np.cumsum(counts) - counts
    segments = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
    classes = int(owners[-1]) + 1
    keys = _distinct(segments * classes + np.repeat(owners, counts))
    return keys // classes, keys % classes


def _groups(segments: Ints, wanters: Ints, members_of: Sequence[list[int]], count: int) -> tuple[Ints, list[Ints]]:
    """Return the group of each segment, and the ranks of each group; groups are numbered by their first segment."""
    group_of = np.full(count, -1, dtype=np.int64)
    numbers: dict[bytes, int] = {}
    groups: list[Ints] = []
    cuts = np.concatenate(([0], np.flatnonzero(np.diff(segments)) + 1, [len(segments)]))
    found = []
    for first, last in pairwise(cuts.tolist()):
        key = wanters[first:last].tobytes()
        if key not in numbers:
            numbers[key] = len(groups)
            ranks = sorted(rank for each in wanters[first:last].tolist() for rank in members_of[each])
            groups.append(np.array(ranks, dtype=np.int64))
        found.append(numbers[key])
    group_of[segments[cuts[:-1]]] = found
    return group_of, groups


def _shared_out(
    pack_starts: Ints,
    bounds: Ints,
    group_of: Ints,
    groups: Sequence[Ints],
    world_size: int,
    round_bytes: int,
    *,
    forced: bool,
) -> JobExchange | None:
    lengths = np.diff(bounds)
    order = np.argsort(group_of, kind="stable")
    cuts = np.searchsorted(group_of[order], np.arange(len(groups) + 1))
    sizes = np.array([len(ranks) for ranks in groups], dtype=np.int64)
    alone = np.zeros(world_size, dtype=np.int64)
    for number in np.flatnonzero(sizes == 1).tolist():
        alone[groups[number]] += lengths[order[cuts[number] : cuts[number + 1]]].sum()
    read = alone.copy()
    readers = np.full(len(lengths), -1, dtype=np.int64)
    for number in sorted(np.flatnonzero(sizes > 1).tolist(), key=sizes.__getitem__):
        ranks, segments = groups[number], order[cuts[number] : cuts[number + 1]]
        bytes_each = lengths[segments]
        shares = water_fill(read[ranks], int(bytes_each.sum()), max(round_bytes // _CELLS_IN_ROUND, 1))
        middles = np.cumsum(bytes_each) - (bytes_each + 1) // 2
        readers[segments] = ranks[np.searchsorted(np.cumsum(shares), middles, side="right")]
        np.add.at(read, readers[segments], bytes_each)
    shared = np.flatnonzero(readers >= 0)
    if not len(shared):
        return None

    def load_of(passed: Ints) -> Load:
        """Return what is read alone and these segments come to."""
        wanted = alone.copy()
        by_group = np.bincount(group_of[passed], lengths[passed], len(groups)).astype(np.int64)
        for number in np.flatnonzero(by_group).tolist():
            wanted[groups[number]] += by_group[number]
        read = alone + np.bincount(readers[passed], lengths[passed], world_size).astype(np.int64)
        each_sent = lengths[passed] * (sizes[group_of[passed]] - 1)
        sent = np.bincount(readers[passed], each_sent, world_size).astype(np.int64)
        return Load(int(wanted.max()), int(read.max()), int(np.maximum(sent, wanted - read).max()))

    whole = load_of(shared)
    if not forced and (not whole.is_worth_a_probe or int(sizes[group_of[shared]].sum()) > _MEMBERS_MAX):
        return None
    rounds = _rounds(lengths, readers, group_of, groups, world_size, round_bytes)
    left = load_of(np.flatnonzero(rounds >= PROBE_ROUNDS))
    return JobExchange(pack_starts, bounds, readers, rounds, group_of, groups, whole, left)


def _rounds(
    lengths: Ints, readers: Ints, group_of: Ints, groups: Sequence[Ints], world_size: int, round_bytes: int
) -> Ints:
    """Return the round of each segment that is read for several; -1 for the others.

    All readers go through their shares at an even pace. Each rank fills a round of its own: a segment goes to the
    latest of those that its ranks are at, or to the next where one of them would read, or be given, more than fits. So
    groups of ranks that have nothing to do with each other pass their bytes on in the same rounds.
    """
    rounds = np.full(len(lengths), -1, dtype=np.int64)
    shared = np.flatnonzero(readers >= 0)
    passed = np.zeros(world_size, dtype=np.int64)
    before = np.empty(len(shared), dtype=np.int64)
    for at, segment in enumerate(shared.tolist()):
        before[at] = passed[readers[segment]]
        passed[readers[segment]] += lengths[segment]
    # In thousandths of a reader's share, so that all of them are done at the same time.
    pace = before * 1000 // passed[readers[shared]]
    given, taken = np.zeros(world_size, dtype=np.int64), np.zeros(world_size, dtype=np.int64)
    give_slots = [give_slot_bytes(length) for length in lengths.tolist()]
    take_slots = [take_slot_bytes(length) for length in lengths.tolist()]
    at_round = np.zeros(world_size, dtype=np.int64)
    for segment in shared[np.lexsort((shared, pace))].tolist():
        reader, give, take = int(readers[segment]), give_slots[segment], take_slots[segment]
        ranks = groups[group_of[segment]]
        latest = int(at_round[ranks].max())
        behind = ranks[at_round[ranks] < latest]
        given[behind] = taken[behind] = 0
        most = int(taken[ranks].max())
        if (given[reader] or most) and (given[reader] + give > round_bytes or most + take > round_bytes):
            latest += 1
            given[ranks] = taken[ranks] = 0
        at_round[ranks] = rounds[segment] = latest
        given[reader] += give
        taken[ranks] += take
        taken[reader] -= take
    return rounds


def exchanging_beats_reading(left: Load, paces: Sequence[Throughput]) -> bool:
    """Return whether what is left of a load is sooner done by exchanging it, judged by a round that was measured.

    Reading alone takes the busiest rank `alone / storage` seconds, exchanging `read / storage + moved / exchange`:
    all ranks were reading at once when `storage` was measured, and what goes on beside each other (reading one round
    and exchanging another) is counted one after the other, since both may want the same processors and wires.
    Storage that is faster than the exchange, as the page cache is, so speaks for reading whatever the redundancy.
    Each speed is the median of the ranks that did a fair part of a round: one whose few bytes were in the page cache,
    or came from a neighbour on the same machine, says nothing of the others, nor does one that was disturbed.

    Args:
        left: Bytes of the busiest rank.
        paces: Of every rank, the same on each of them.
    """
    storage = _bytes_per_second((each.read_bytes, each.read_seconds) for each in paces)
    exchange = _bytes_per_second((each.moved_bytes, each.moved_seconds) for each in paces)
    alone_seconds = left.alone_bytes / storage
    return alone_seconds >= _MARGIN * (left.read_bytes / storage + left.moved_bytes / exchange)


def _bytes_per_second(measured: Iterable[tuple[int, float]]) -> float:
    """Return the median speed of those who did a fair part; beyond measure if nobody did anything."""
    done = [(count, count / seconds) for count, seconds in measured if count and seconds > 0]
    most = max((count for count, _ in done), default=0)
    fair = [speed for count, speed in done if count >= _FAIR_PART * most]
    return float(np.median(fair)) if fair else math.inf
