"""Executes a load in which ranks send bytes to each other: threads read and check, the caller's thread communicates.

While one round is exchanged, the next is read and the one before is placed. Every round begins with a status word from
every rank, so that all ranks stop together if one has failed. Bytes that failed their check are never sent. Stored
bytes travel, and a run travels with its bases.

A round passes through these states on each rank:

    planned -> reading (`_begin_reading`) -> ready (`prepare`; status words are gathered) -> exchanged (`exchange`)
    exchanged -> placing (threads check and copy) -> placed (`_finish_placing`)

If any rank reports a failure, no rank goes on to `exchange`, and the load ends on all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace

from holdfast.base.clock import Clock
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.comm import Comm
from holdfast.base.ports.framework import Target
from holdfast.base.ports.packs import Packs
from holdfast.base.types.plan import (
    ExchangePlan,
    ExchangeRound,
    LoadPlan,
    ReadRun,
    Take,
    Throughput,
    give_slot_bytes,
    take_slot_bytes,
)
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.engine.decoding.decode import Decoder
from holdfast.core.engine.parallel_map import WorkerThreads
from holdfast.core.engine.placing import Placing, verify_and_place_all
from holdfast.core.engine.read import execute_placing, read_through
from holdfast.settings import Settings

_STATUS = struct.Struct("<?qdqd")
"""Status word of a rank: whether it failed, then its `Throughput`."""

_AREAS = 2
"""Rounds whose bytes are in memory at once: one is exchanged while the next is read, or the one before is placed."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one rank read and received."""

    read_bytes: int
    """Read from storage."""

    received_bytes: int
    """Received from other ranks."""

    whole: bool = True
    """Whether everything was placed; False if another rank failed, so that all ranks stopped."""

    exchanging_seconds: float = 0.0
    """Seconds from the start to the last round of the exchange; the rest was read alone."""

    sources: Mapping[str, int] = field(default_factory=dict)
    """`read_bytes` by URL of the root that they came from."""


@dataclass(frozen=True, slots=True)
class ExchangeProbe:
    """When to compare measured throughputs, and the decision; the same on every rank."""

    after_rounds: int
    """Rounds to measure first."""

    goes_on: Callable[[Sequence[Throughput]], bool]
    """Whether to exchange the rest too, by the throughput of all ranks; otherwise every rank reads its own."""


@dataclass(frozen=True, slots=True)
class PlannedExchange:
    """One rank's view of an exchange that the ranks agreed on."""

    plan: Callable[[], ExchangePlan]
    """Returns this rank's plan. If it raises, this rank has failed, and the others stop with it."""

    round_count: int
    """Rounds of the plan; the same on every rank."""

    probe: ExchangeProbe | None
    """Whether exchanging may end before the last round; None: never. The same on every rank."""


def execute_exchange(
    exchange: PlannedExchange,
    comm: Comm,
    clock: Clock,
    packs: Packs,
    targets: Sequence[Target],
    settings: Settings,
    codecs: Codecs,
    moved: Callable[[int], None] | None = None,
) -> TransferStats:
    """Read, send, decode, check and place everything a plan lists; a collective of all ranks.

    A receiver checks every chunk again: the reader's check covers neither the network nor the receiver's memory.

    Args:
        exchange: What this rank exchanges.
        comm: The ranks.
        clock: Measures throughput.
        packs: Where each pack is stored.
        targets: Where to place, by wanted number.
        settings: Reads in flight.
        codecs: What decodes coded chunks.
        moved: Called with byte counts of what was read or received, on any thread.
    Raises:
        CorruptError: A chunk that this rank read or received differs from what was saved.
        UnavailableError: The store failed.
    """
    start = clock.monotonic_seconds()
    threads = WorkerThreads(settings._tuning.windows_in_flight, "holdfast-exchange")
    try:
        probe_rounds = exchange.probe.after_rounds if exchange.probe else 0
        placing = Placing(packs, targets, Decoder(codecs))
        rounds = _Rounds(threads, clock, placing, probe_rounds, moved)
        rest = _exchange(exchange, comm, rounds)
    finally:
        threads.stop()
    if rest is None:
        return TransferStats(0, 0, whole=False)
    runs, given, received_bytes = rest
    given_bytes = sum(run.bytes for run in given)
    seconds = clock.monotonic_seconds() - start
    plan = LoadPlan(_joined(runs, settings._tuning.read_window_bytes))
    if moved is not None:
        moved(given_bytes + received_bytes - rounds.moved_bytes)
    execute_placing(plan, placing, settings, moved=moved)
    sources = placing.sources((*given, *plan.runs))
    return TransferStats(given_bytes + plan.bytes, received_bytes, exchanging_seconds=seconds, sources=sources)


def _exchange(exchange: PlannedExchange, comm: Comm, state: _Rounds) -> tuple[list[ReadRun], list[ReadRun], int] | None:
    """Run the rounds; return the runs left to read, those read and bytes received, or None if another rank failed."""
    failure: Exception | None = None
    probe = exchange.probe
    rounds: Sequence[ExchangeRound] = ()
    alone = LoadPlan(())
    try:
        plan = exchange.plan()
        rounds, alone = plan.rounds, plan.alone
        state.begin(rounds)
    except Exception as error:  # noqa: BLE001 - the next status word reports it to the other ranks
        failure = error
    number = 0
    for number in range(exchange.round_count):
        if failure is None:
            try:
                state.prepare(number)
            except Exception as error:  # noqa: BLE001 - the next status word reports it to the other ranks
                failure = error
        own_word = _STATUS.pack(failure is not None, *astuple(state.throughput))
        words = [_STATUS.unpack(word) for word in comm.all_gather(own_word)]
        if failure is not None:
            raise failure
        if any(word[0] for word in words):
            return None
        if probe and number == probe.after_rounds and not probe.goes_on([Throughput(*word[1:]) for word in words]):
            break
        try:
            state.exchange(number, comm)
        except Exception as error:  # noqa: BLE001 - the next status word reports it, or the end of the load
            failure = error
    else:
        number = exchange.round_count
    if failure is not None:
        raise failure
    state.finish()
    # The probe ended the exchange at round `number`. Its readers have read and placed what they would have sent in this
    # round and the next; everybody else still has to read what they would have received.
    takes = [take.run for later in rounds[number:] for take in later.takes]
    gives = [give.run for later in rounds[number + _AREAS :] for give in later.gives]
    given = [give.run for early in rounds[: number + _AREAS] for give in early.gives]
    received_bytes = sum(take.run.bytes for early in rounds[:number] for take in early.takes)
    return [*takes, *gives, *alone.runs], given, received_bytes


class _Rounds:
    """The rounds of one rank: reads, sends and places them in memory that is allocated once."""

    def __init__(
        self,
        threads: WorkerThreads,
        clock: Clock,
        placing: Placing,
        probe_rounds: int,
        moved: Callable[[int], None] | None,
    ) -> None:
        self._moved = moved
        self.moved_bytes = 0
        """Bytes of the rounds that were exchanged."""
        self._threads, self._clock, self._probe_rounds = threads, clock, probe_rounds
        self._placing = placing
        self._rounds: Sequence[ExchangeRound] = ()
        self._reads: dict[int, list[Future[list[memoryview]]]] = {}
        self._places: dict[int, list[Future[None]]] = {}
        self._gives: dict[int, list[memoryview]] = {}
        self._takes: dict[int, list[memoryview]] = {}
        self._taken: list[list[memoryview]] = []
        self._rounds_begun = 0
        self._exchange_began = 0.0
        self.throughput = Throughput(0, 0.0, 0, 0.0)
        """The best of the measured rounds: other work on the machine can only slow a round down."""

    def begin(self, rounds: Sequence[ExchangeRound]) -> None:
        """Allocate memory for the largest round, for each direction."""
        self._rounds = rounds
        give_bytes = max((sum(_give_sizes(planned)) for planned in rounds), default=0)
        take_bytes = max((sum(_take_sizes(planned)) for planned in rounds), default=0)
        areas = _AREAS if len(rounds) > max(self._probe_rounds, 1) else 1
        self._give_areas = [allocate_aligned(max(give_bytes, 1)) for _ in range(areas)]
        self._take_areas = [allocate_aligned(max(take_bytes, 1)) for _ in range(areas)]

    def prepare(self, number: int) -> None:
        """Read what this rank sends in a round, and lay out memory for what it receives.

        Everything that is likely to fail comes before the round's status word; `exchange` is little but the collective.

        The rounds of the probe are read, exchanged and placed one after the other, so that each is timed alone. After
        the probe, the next round is read while this one is exchanged and the one before is placed.
        """
        if 0 < number <= self._probe_rounds:
            self._finish_placing(number - 1)
            self._measure_exchange(number - 1)
        start = self._clock.monotonic_seconds()
        self._begin_reading(number)
        read = [read.result() for read in self._reads.pop(number)]
        if number < self._probe_rounds:
            self._measure_reading(number, start)
        else:
            self._begin_reading(number + 1)
        self._finish_placing(number - _AREAS)
        self._assign_memory(number, read)

    def _area(self, number: int) -> int:
        """Return the memory area of a round: one for the whole probe, so that only its first round pays page faults."""
        return max(number - max(self._probe_rounds, 1) + 1, 0) % _AREAS

    def _begin_reading(self, number: int) -> None:
        """Let the threads read what this rank sends in a round, unless they have begun or the round does not exist."""
        if not self._rounds_begun <= number < len(self._rounds):
            return
        self._rounds_begun = number + 1
        this = self._rounds[number]
        slots = _slots(self._give_areas[self._area(number)], _give_sizes(this))
        self._reads[number] = [
            self._threads.submit(read_through, give.run, self._placing, slot)
            for give, slot in zip(this.gives, slots, strict=True)
        ]

    def _assign_memory(self, number: int, read: Sequence[list[memoryview]]) -> None:
        """Assign memory to the receivers and the senders of a round."""
        this = self._rounds[number]
        self._gives, self._takes = {}, {}
        for give, data in zip(this.gives, read, strict=True):
            for rank in give.receivers:
                self._gives.setdefault(rank, []).extend(data)
        slots = _slots(self._take_areas[self._area(number)], _take_sizes(this))
        self._taken = [_views(slot, take.run) for slot, take in zip(slots, this.takes, strict=True)]
        for take, data in zip(this.takes, self._taken, strict=True):
            self._takes.setdefault(take.reader, []).extend(data)

    def exchange(self, number: int, comm: Comm) -> None:
        """Exchange a prepared round, and let the threads check and place what was received."""
        self._exchange_began = self._clock.monotonic_seconds()
        comm.exchange(self._gives, self._takes)
        self._places[number] = [
            self._threads.submit(verify_and_place_all, take.run, data, self._placing, _sender_of(take))
            for take, data in zip(self._rounds[number].takes, self._taken, strict=True)
        ]
        if self._moved is not None:
            this = self._rounds[number]
            count = sum(give.run.bytes for give in this.gives) + sum(take.run.bytes for take in this.takes)
            self.moved_bytes += count
            self._moved(count)

    def _measure_reading(self, number: int, start: float) -> None:
        read_bytes = sum(give.run.bytes for give in self._rounds[number].gives)
        seconds = self._clock.monotonic_seconds() - start
        if read_bytes * self.throughput.read_seconds >= self.throughput.read_bytes * seconds:
            self.throughput = replace(self.throughput, read_bytes=read_bytes, read_seconds=seconds)

    def _measure_exchange(self, number: int) -> None:
        this = self._rounds[number]
        sent_bytes = sum(give.run.bytes * len(give.receivers) for give in this.gives)
        moved_bytes = max(sent_bytes, sum(take.run.bytes for take in this.takes))
        seconds = self._clock.monotonic_seconds() - self._exchange_began
        if moved_bytes * self.throughput.moved_seconds >= self.throughput.moved_bytes * seconds:
            self.throughput = replace(self.throughput, moved_bytes=moved_bytes, moved_seconds=seconds)

    def _finish_placing(self, number: int) -> None:
        """Wait until everything received in a round is placed, if there was such a round."""
        for place in self._places.pop(number, ()):
            place.result()

    def finish(self) -> None:
        """Wait for all reads and placements under way."""
        for reads in self._reads.values():
            for read in reads:
                read.result()
        for number in list(self._places):
            self._finish_placing(number)


def _sender_of(take: Take) -> str:
    return f", as rank {take.reader} read and sent it"


def _joined(runs: Sequence[ReadRun], run_bytes_max: int) -> tuple[ReadRun, ...]:
    """Return runs by pack and offset, adjacent ones joined up to `run_bytes_max` bytes."""
    joined: list[ReadRun] = []
    for run in sorted(runs, key=lambda run: (run.pack, run.start)):
        last = joined[-1] if joined else None
        if (
            last
            and (last.pack, last.stop) == (run.pack, run.start)
            and last.bytes + run.bytes <= run_bytes_max
            and bool(last.bases) == bool(run.bases)
        ):
            joined[-1] = ReadRun.of(run.pack, last.chunks + run.chunks)
        else:
            joined.append(run)
    return tuple(joined)


def _views(slot: memoryview, run: ReadRun) -> list[memoryview]:
    """Return the memory of a received run and of each of its bases."""
    return _slots(slot, map(_length, (run, *run.bases)))


def _slots(area: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    slots, at = [], 0
    for size in sizes:
        slots.append(area[at : at + size])
        at += size
    return slots


def _length(run: ReadRun) -> int:
    return run.stop - run.start


def _give_sizes(this: ExchangeRound) -> list[int]:
    return [sum(map(give_slot_bytes, map(_length, (give.run, *give.run.bases)))) for give in this.gives]


def _take_sizes(this: ExchangeRound) -> list[int]:
    return [take_slot_bytes(take.run.bytes) for take in this.takes]
