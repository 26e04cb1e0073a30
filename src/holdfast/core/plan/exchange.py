"""Plans an exchange: which rank reads bytes that several ranks want, who receives them, and whether it saves time.

Every rank describes what its load plan reads. From all descriptions each rank computes the same exchange. Segments are
cut only at bounds in some rank's description. These are bounds of chunks, so a chunk is never divided. Bytes count as
they are stored. A run with bases lies at its own bytes, and counts with those of its bases.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from holdfast.base.types.plan import (
    ExchangePlan,
    ExchangeRound,
    Give,
    LoadPlan,
    ReadRun,
    Take,
    Throughput,
    give_slot_bytes,
    take_slot_bytes,
)
from holdfast.core.plan.balance import water_fill
from holdfast.errors import CorruptError
from holdfast.settings import MIB

Ints = NDArray[np.int64]

PROBE_ROUNDS = 2
"""Rounds that are measured before the ranks compare exchanging with reading. The best one counts: the first round also
pays for page faults and for opening connections."""

_CELLS_IN_ROUND = 4
"""Smallest number of parts of a round, so that several reads are in flight and shares are balanced."""

_GAIN_BYTES_MIN = 256 * MIB
"""Reading that the busiest rank must save before a probe pays off: two rounds through fresh memory take as long as
reading about this much from the page cache."""

_GAIN_MIN = 0.1
"""The same, as a fraction of the bytes it would read alone."""

_MARGIN = 1.2
"""Factor by which exchanging must be expected to be faster. Both estimates come from a few rounds, and a rank that
reads alone can read straight into its tensors."""

_BYTES_FRACTION_MIN = 0.25
"""A rank's throughput counts if it handled at least this fraction of the bytes of the rank with most bytes."""

_PAIRS_MAX = 1 << 21
"""Limit of described runs, and of pairs of segment and class, for an exchange that is not forced. Every rank plans the
whole exchange, which takes about a second at this size."""

_MEMBERS_MAX = 1 << 27
"""The same limit for pairs of segment and rank: assigning rounds takes time in proportion to them."""

_DESCRIPTION_BYTES_MAX = MIB
"""Limit of one description; beyond it, sending descriptions often costs more than the exchange saves."""


def description_of(plan: LoadPlan, pack_numbers: Mapping[str, int], round_bytes: int, *, forced: bool) -> bytes:
    """Return a description of a rank's reads for the other ranks: a few bytes per run, cut at bounds of chunks.

    A pack is divided into cells of equal size. A run is cut before each chunk that starts in a new cell, so ranks that
    read the same bytes from different starts cut them at the same offsets. No cut is inside a unit.

    Args:
        plan: What the rank would read alone.
        pack_numbers: Number of each pack of the checkpoint, the same on every rank.
        round_bytes: Bytes that a rank may read in one round.
        forced: Whether the description may have any length; otherwise one that is too long is empty.
    """
    cell = max(round_bytes // _CELLS_IN_ROUND, 1)
    parts = (part for run in plan.runs for part in _in_cells(run, cell))
    rows = [(pack_numbers[part.pack], part.start, part.stop, part.bytes) for part in parts]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
    # Gaps and lengths repeat from layer to layer, so differences compress well.
    table[:, 2] -= table[:, 1]
    table[:, 3] -= table[:, 2]
    table[1:, :2] = np.diff(table[:, :2], axis=0)
    packed = zlib.compress(np.ascontiguousarray(table.T).tobytes(), 1)
    return packed if forced or len(packed) <= _DESCRIPTION_BYTES_MAX else b""


def _in_cells(run: ReadRun, cell: int) -> Iterator[ReadRun]:
    """Yield a run, cut before each unit that starts in another cell than the unit after the last cut."""
    if run.start // cell == (run.stop - 1) // cell:
        yield run
        return
    first = 0
    for number, chunk in enumerate(run.chunks):
        is_new_cell = chunk.offset // cell != run.chunks[first].offset // cell
        if is_new_cell and (chunk.base is None or chunk.base is not run.chunks[number - 1].base):
            yield ReadRun.of(run.pack, run.chunks[first:number])
            first = number
    yield ReadRun.of(run.pack, run.chunks[first:])


def reads_enough(plan: LoadPlan) -> bool:
    """Return whether a rank reads so much that an exchange may pay off. If no rank does, ranks need no descriptions."""
    return plan.bytes >= _GAIN_BYTES_MIN


def _rows_of(description: bytes) -> Ints:
    """Return pack, start, stop and bytes of the bases of each described run; shape (runs, 4)."""
    table = np.frombuffer(zlib.decompress(description), dtype=np.int64).reshape(4, -1).T.copy()
    table[:, :2] = np.cumsum(table[:, :2], axis=0)
    table[:, 2] += table[:, 1]
    return table


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes of the busiest rank for either way of loading."""

    alone_bytes: int
    """Bytes read if every rank reads what it wants."""

    read_bytes: int
    """Bytes read if bytes are exchanged."""

    moved_bytes: int
    """Bytes sent or received, whichever is more, if bytes are exchanged."""

    @property
    def is_worth_a_probe(self) -> bool:
        """Whether exchanging may save enough to justify a probe."""
        gain = self.alone_bytes - self.read_bytes
        return gain >= max(_GAIN_BYTES_MIN, _GAIN_MIN * self.alone_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class JobExchange:
    """The exchange of a whole job, the same on every rank. A segment is a run of bytes wanted by the same ranks."""

    pack_starts: Ints
    """Offset of each pack in the concatenation of all packs."""

    bounds: Ints
    """Bounds of the segments in that concatenation; one more than segments."""

    readers: Ints
    """Reader of each segment; -1 if at most one rank wants it."""

    rounds: Ints
    """Round in which each segment is exchanged; -1 if it is not."""

    group_of: Ints
    """Number of the group of ranks that want each segment; -1 if no rank does."""

    groups: Sequence[Ints]
    """Ranks of each group, ascending."""

    whole: Load
    """The whole load."""

    left: Load
    """The rest of the load after `PROBE_ROUNDS`."""

    @property
    def round_count(self) -> int:
        """Number of rounds."""
        return int(self.rounds.max()) + 1

    def plan_of(self, rank: int, plan: LoadPlan, pack_numbers: Mapping[str, int]) -> ExchangePlan:
        """Return what one rank reads, sends and receives.

        Args:
            rank: The rank.
            plan: What it would read alone; the plan that it described.
            pack_numbers: The numbers used in its description.
        Raises:
            CorruptError: Pieces of the checkpoint overlap, so that a chunk would be divided.
        """
        gives: list[list[Give]] = [[] for _ in range(self.round_count)]
        takes: list[list[Take]] = [[] for _ in range(self.round_count)]
        alone: list[ReadRun] = []
        for run in plan.runs:
            segments, divided = self._segments_of(run, pack_numbers)
            if len(divided):
                chunk = run.chunks[int(divided[0])]
                raise CorruptError(
                    f"{chunk.piece.tensor.fqn}: {run.pack}: another piece begins or ends inside the chunk at bytes "
                    f"{chunk.offset}–{chunk.offset + chunk.stored_bytes}; expected pieces that do not overlap. Read "
                    "another copy or another step"
                )
            # Adjacent chunks of unshared segments stay one run.
            segments = np.where(self.readers[segments] < 0, -1, segments)
            cuts = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(run.chunks)]
            for first, last in pairwise(cuts):
                segment, part = int(segments[first]), ReadRun.of(run.pack, run.chunks[first:last])
                reader = int(self.readers[segment])
                if segment < 0:
                    alone.append(part)
                elif reader == rank:
                    ranks = self.groups[self.group_of[segment]]
                    others = tuple(ranks[ranks != rank].tolist())
                    gives[self.rounds[segment]].append(Give(part, others))
                else:
                    takes[self.rounds[segment]].append(Take(part, reader))
        rounds = (ExchangeRound(tuple(give), tuple(take)) for give, take in zip(gives, takes, strict=True))
        return ExchangePlan(tuple(rounds), LoadPlan(tuple(alone)))

    def divides(self, runs: Sequence[ReadRun], pack_numbers: Mapping[str, int]) -> bool:
        """Return whether pieces that share bytes keep a rank from exchanging some of its reads.

        Either a chunk is divided, because another piece begins or ends inside it, or two chunks are the same bytes.

        Args:
            runs: Reads of the rank, in the order of its plan.
            pack_numbers: The numbers used in its description.
        """
        if any((run.pack, run.start) == (later.pack, later.start) for run, later in pairwise(runs)):
            return True
        return any(len(self._segments_of(run, pack_numbers)[1]) for run in runs)

    def _segments_of(self, run: ReadRun, pack_numbers: Mapping[str, int]) -> tuple[Ints, Ints]:
        """Return the segment in which each chunk of a run begins, and the numbers of chunks that end in another one."""
        pack_start = int(self.pack_starts[pack_numbers[run.pack]])
        starts = pack_start + np.array([chunk.offset for chunk in run.chunks], dtype=np.int64)
        stops = starts + np.array([chunk.stored_bytes for chunk in run.chunks], dtype=np.int64)
        segments = np.searchsorted(self.bounds, starts, side="right") - 1
        return segments, np.flatnonzero(stops > self.bounds[segments + 1])


def job_exchange(descriptions: Sequence[bytes], round_bytes: int, *, forced: bool) -> JobExchange | None:
    """Return the exchange of the reads that all ranks described, or None if no byte is wanted twice.

    An exchange that is not forced is also None if it cannot save enough for a probe, or if planning would take seconds.
    Both are known before most of the work is done.

    Ranks with equal descriptions form a class. Segments that the same classes want form a group. A group's segments are
    divided into one contiguous share per rank, so that reads are balanced and long. Small groups come first: they have
    the least choice. The time grows with the number of described runs and with segments times their classes, not
    with ranks times chunks. Only assigning rounds takes time in proportion to segments times their ranks.

    Args:
        descriptions: By rank; none of them empty.
        round_bytes: Memory for the bytes that a rank reads in one round, and for those it receives. A larger segment
            has a round of its own.
        forced: Whether to exchange even if it does not pay off.
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
    costs = np.diff(bounds) + _base_bytes(rows[:, 3], starts, stops, first, last, bounds)
    return _with_readers(pack_starts, bounds, costs, group_of, groups, len(descriptions), round_bytes, forced=forced)


def _tables_of(descriptions: Iterable[bytes], *, forced: bool) -> list[Ints]:
    """Return the rows of each description. Unless forced, return none if there are too many rows or too few bytes."""
    tables: list[Ints] = []
    count = longest = 0
    for description in descriptions:
        table = _rows_of(description)
        count, longest = count + len(table), max(longest, int((table[:, 2] - table[:, 1] + table[:, 3]).sum()))
        if count > _PAIRS_MAX and not forced:
            return []
        tables.append(table)
    return tables if forced or longest >= _GAIN_BYTES_MIN else []


def _distinct(numbers: Ints) -> Ints:
    """Return each number once, ascending. Descriptions are sorted, and a stable sort merges them quickly."""
    ordered = np.sort(numbers, kind="stable")
    return ordered[np.concatenate(([True], ordered[1:] > ordered[:-1]))]


def _are_apart(starts: Ints, stops: Ints) -> bool:
    order = np.argsort(starts, kind="stable")
    return bool((starts[order][1:] >= np.maximum.accumulate(stops[order])[:-1]).all())


def _wanters(first: Ints, last: Ints, owners: Ints) -> tuple[Ints, Ints]:
    """Return pairs of a segment and a class that wants it, as two columns, sorted and distinct.

    Args:
        first, last: Half-open range of segments of each row.
        owners: Class of each row.
    """
    counts = last - first
    segments = _positions(first, counts)
    classes = int(owners[-1]) + 1
    keys = _distinct(segments * classes + np.repeat(owners, counts))
    return keys // classes, keys % classes


def _positions(first: Ints, counts: Ints) -> Ints:
    """Return the numbers of several runs, one after the other, each from its first number on."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def _base_bytes(of_rows: Ints, starts: Ints, stops: Ints, first: Ints, last: Ints, bounds: Ints) -> Ints:
    """Return about how many bytes of bases go with each segment: the share of the run that is described there.

    Only memory and balance depend on it. Whoever reads or receives a segment knows its bases exactly.

    Args:
        of_rows: Bytes of the bases of each row.
        starts, stops: Half-open range of bytes of each row.
        first, last: Half-open range of segments of each row.
        bounds: Bounds of the segments.
    """
    found = np.zeros(len(bounds) - 1, dtype=np.int64)
    with_bases = np.flatnonzero(of_rows)
    if not len(with_bases):
        return found
    counts = (last - first)[with_bases]
    segments = _positions(first[with_bases], counts)
    ratios = np.repeat(of_rows[with_bases] / (stops - starts)[with_bases], counts)
    np.maximum.at(found, segments, np.ceil(ratios * np.diff(bounds)[segments]).astype(np.int64))
    return found


def _groups(segments: Ints, wanters: Ints, members_of: Sequence[list[int]], count: int) -> tuple[Ints, list[Ints]]:
    """Return the group of each segment, and the ranks of each group; groups are numbered by their first segment."""
    group_of = np.full(count, -1, dtype=np.int64)
    numbers: dict[bytes, int] = {}
    groups: list[Ints] = []
    cuts = np.concatenate(([0], np.flatnonzero(np.diff(segments)) + 1, [len(segments)]))
    numbers_of_segments = []
    for first, last in pairwise(cuts.tolist()):
        key = wanters[first:last].tobytes()
        if key not in numbers:
            numbers[key] = len(groups)
            ranks = sorted(rank for wanter in wanters[first:last].tolist() for rank in members_of[wanter])
            groups.append(np.array(ranks, dtype=np.int64))
        numbers_of_segments.append(numbers[key])
    group_of[segments[cuts[:-1]]] = numbers_of_segments
    return group_of, groups


def _with_readers(
    pack_starts: Ints,
    bounds: Ints,
    lengths: Ints,
    group_of: Ints,
    groups: Sequence[Ints],
    world_size: int,
    round_bytes: int,
    *,
    forced: bool,
) -> JobExchange | None:
    """Return the exchange with a reader and a round for each shared segment; None if it is not worth a probe.

    `lengths` are bytes of segments with their bases.
    """
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
        segment_bytes = lengths[segments]
        shares = water_fill(read[ranks], int(segment_bytes.sum()), max(round_bytes // _CELLS_IN_ROUND, 1))
        # A segment goes to the rank whose share holds its middle byte.
        middles = np.cumsum(segment_bytes) - (segment_bytes + 1) // 2
        readers[segments] = ranks[np.searchsorted(np.cumsum(shares), middles, side="right")]
        np.add.at(read, readers[segments], segment_bytes)
    shared = np.flatnonzero(readers >= 0)
    if not len(shared):
        return None

    def load_of(passed: Ints) -> Load:
        """Return the load of the unshared segments together with these shared ones."""
        wanted = alone.copy()
        by_group = np.bincount(group_of[passed], lengths[passed], len(groups)).astype(np.int64)
        for number in np.flatnonzero(by_group).tolist():
            wanted[groups[number]] += by_group[number]
        read = alone + np.bincount(readers[passed], lengths[passed], world_size).astype(np.int64)
        sent_bytes = lengths[passed] * (sizes[group_of[passed]] - 1)
        sent = np.bincount(readers[passed], sent_bytes, world_size).astype(np.int64)
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
    """Return the round of each segment that several ranks want; -1 for the others.

    Segments are taken in such an order that all readers progress through their shares at the same relative pace. Each
    rank has a current round. A segment goes to the latest current round of its ranks, or to the next one if the reader
    or a receiver has no memory left in that round. So groups without a common rank use the same rounds.
    """
    rounds = np.full(len(lengths), -1, dtype=np.int64)
    shared = np.flatnonzero(readers >= 0)
    passed = np.zeros(world_size, dtype=np.int64)  # Bytes that each reader has read so far.
    before = np.empty(len(shared), dtype=np.int64)
    for at, segment in enumerate(shared.tolist()):
        before[at] = passed[readers[segment]]
        passed[readers[segment]] += lengths[segment]
    # In thousandths of a reader's share, so that all readers finish at the same time.
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


def exchanging_beats_reading(left: Load, measured: Sequence[Throughput]) -> bool:
    """Return whether exchanging the rest of a load is faster than reading it, judged by measured rounds.

    Reading alone takes the busiest rank `alone / storage` seconds, exchanging `read / storage + moved / exchange`.
    All ranks were reading at once when `storage` was measured. Reading and exchanging overlap, but count one after the
    other, since both may need the same processors and network. So storage that is faster than the exchange, such as the
    page cache, always favours reading. Each speed is the median over the ranks that handled enough bytes. A rank whose
    few bytes were in the page cache, or came from the same machine, is not representative; nor is a disturbed one.

    Args:
        left: Bytes of the busiest rank.
        measured: Throughput by rank, the same list on every rank.
    """
    storage = _bytes_per_second((rank.read_bytes, rank.read_seconds) for rank in measured)
    exchange = _bytes_per_second((rank.moved_bytes, rank.moved_seconds) for rank in measured)
    alone_seconds = left.alone_bytes / storage
    return alone_seconds >= _MARGIN * (left.read_bytes / storage + left.moved_bytes / exchange)


def _bytes_per_second(measured: Iterable[tuple[int, float]]) -> float:
    """Return the median speed of the ranks that handled enough bytes; infinity if none handled any."""
    done = [(count, count / seconds) for count, seconds in measured if count and seconds > 0]
    most = max((count for count, _ in done), default=0)
    representative = [speed for count, speed in done if count >= _BYTES_FRACTION_MIN * most]
    return float(np.median(representative)) if representative else math.inf
