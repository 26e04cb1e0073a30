"""Carries out a load in which ranks pass bytes to each other: reads and checks on threads, collectives on the caller's.

While one round is passed on, the next is read and the one before is placed. Every round begins with a word from every
rank, so that all of them stop together when one has failed; nothing that failed its check is ever sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from holdfast.clock import Clock
from holdfast.engine.buffers import allocate_aligned
from holdfast.engine.read import execute, read_through, verify_and_place_all
from holdfast.ports.comm import Comm
from holdfast.ports.framework import Target
from holdfast.ports.store import Packs
from holdfast.settings import Settings
from holdfast.types.exchange import ExchangePlan, ExchangeRound, Take, Throughput, give_slot_bytes, take_slot_bytes
from holdfast.types.plan import LoadPlan, ReadRun

_WORD = struct.Struct("<?qdqd")
_AREAS = 2
"""Rounds whose bytes are in memory at once: one is passed on while the next is read, or the one before placed."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What a rank's load came to."""

    read_bytes: int
    """Read from storage."""

    received_bytes: int
    """Given by other ranks."""

    whole: bool = True
    """Whether everything was placed; False where another rank failed, and all of them stopped."""

    exchanging_seconds: float = 0.0
    """How long the rounds of an exchange took, from the start; what came after them was read."""


@dataclass(frozen=True, slots=True)
class ExchangeProbe:
    """When to look at what was measured, and what to make of it; the same on every rank."""

    after_rounds: int
    """Rounds that are measured first."""

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
    moved: Callable[[int], None] | None = None,
) -> TransferStats:
    """Read, pass on, check and place everything a plan lists; a collective of every rank.

    A receiver checks every chunk again: it must not trust memory and wires that the reader's check never saw.

    Args:
        exchange: What this rank exchanges.
        comm: The ranks.
        clock: Measures throughput.
        packs: Where from.
        targets: Where to, by wanted number.
        settings: Reads in flight.
        moved: Told how many bytes were read or received, on any thread.
    Raises:
        CorruptError: A chunk that this rank read or was given is not what was saved.
        UnavailableError: The store failed.
    """
    start = clock.monotonic_seconds()
    with ThreadPoolExecutor(settings.windows_in_flight, thread_name_prefix="holdfast-exchange") as threads:
        try:
            probe_rounds = exchange.probe.after_rounds if exchange.probe else 0
            passing = _Passing(threads, clock, packs, targets, probe_rounds, moved)
            rest = _exchange(exchange, comm, passing)
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise
    if rest is None:
        return TransferStats(0, 0, whole=False)
    runs, given_bytes, received_bytes = rest
    seconds = clock.monotonic_seconds() - start
    plan = LoadPlan(tuple(_joined(runs, settings.read_window_bytes)))
    if moved is not None:
        moved(given_bytes + received_bytes - passing.moved_bytes)
    execute(plan, packs, targets, settings, moved=moved)
    return TransferStats(given_bytes + plan.bytes, received_bytes, exchanging_seconds=seconds)


def _exchange(exchange: PlannedExchange, comm: Comm, passing: _Passing) -> tuple[list[ReadRun], int, int] | None:
    """Go through the rounds; return what is left to read, bytes read and bytes received, or None if a rank failed."""
    own: Exception | None = None
    probe = exchange.probe
    rounds: Sequence[ExchangeRound] = ()
    alone = LoadPlan(())
    try:
        plan = exchange.plan()
        rounds, alone = plan.rounds, plan.alone
        passing.begin(rounds)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        own = error
    number = 0
    for number in range(exchange.round_count):
        if own is None:
            try:
                passing.prepare(number)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
                own = error
        words = [_WORD.unpack(word) for word in comm.all_gather(_word(own, passing.pace))]
        if own is not None:
            raise own
        if any(word[0] for word in words):
            return None
        if probe and number == probe.after_rounds and not probe.goes_on([Throughput(*word[1:]) for word in words]):
            break
        try:
            passing.exchange(number, comm)
        except Exception as error:  # noqa: BLE001 - the next word tells the other ranks, or what ends the load
            own = error
    else:
        number = exchange.round_count
    if own is not None:
        raise own
    passing.finish()
    # A round that was not exchanged has been read by those who were to pass it on, and the one after it too.
    takes = [take.run for each in rounds[number:] for take in each.takes]
    gives = [give.run for each in rounds[number + _AREAS :] for give in each.gives]
    given_bytes = sum(_bytes(give.run) for each in rounds[: number + _AREAS] for give in each.gives)
    received_bytes = sum(_bytes(take.run) for each in rounds[:number] for take in each.takes)
    return [*takes, *gives, *alone.runs], given_bytes, received_bytes


def _word(own: Exception | None, pace: Throughput) -> bytes:
    return _WORD.pack(own is not None, pace.read_bytes, pace.read_seconds, pace.moved_bytes, pace.moved_seconds)


class _Passing:
    """The rounds of one rank: what is read, passed on and placed meanwhile, in memory allocated once."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        clock: Clock,
        packs: Packs,
        targets: Sequence[Target],
        probe_rounds: int,
        moved: Callable[[int], None] | None,
    ) -> None:
        self._moved = moved
        self.moved_bytes = 0
        """Bytes of the rounds that were passed on."""
        self._threads, self._clock, self._probe_rounds = threads, clock, probe_rounds
        self._packs, self._targets = packs, targets
        self._rounds: Sequence[ExchangeRound] = ()
        self._reads: dict[int, list[Future[memoryview]]] = {}
        self._places: dict[int, list[Future[None]]] = {}
        self._gives: dict[int, list[memoryview]] = {}
        self._takes: dict[int, list[memoryview]] = {}
        self._taken: list[memoryview] = []
        self._begun = 0
        self._exchange_began = 0.0
        self.pace = Throughput(0, 0.0, 0, 0.0)
        """The best of the rounds that were measured: other work on the machine only ever slows them."""

    def begin(self, rounds: Sequence[ExchangeRound]) -> None:
        """Allocate memory for the largest round, for each direction."""
        self._rounds = rounds
        give_bytes = max((sum(_give_sizes(each)) for each in rounds), default=0)
        take_bytes = max((sum(_take_sizes(each)) for each in rounds), default=0)
        areas = _AREAS if len(rounds) > max(self._probe_rounds, 1) else 1
        self._give_areas = [allocate_aligned(max(give_bytes, 1)) for _ in range(areas)]
        self._take_areas = [allocate_aligned(max(take_bytes, 1)) for _ in range(areas)]

    def prepare(self, number: int) -> None:
        """Read what this rank gives in a round, and have memory ready for what it takes.

        Whatever can fail here does so before the round's word; to pass it on is the collective and little else.

        The rounds of the probe are read, passed on and placed one after the other, so that each is timed alone; after
        them, the next round is read while this one is passed on and the one before is placed.
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
        self._lay_out(number, read)

    def _area(self, number: int) -> int:
        """Return which memory a round uses. Rounds of the probe all use the same, so that only one touches it first."""
        return max(number - max(self._probe_rounds, 1) + 1, 0) % _AREAS

    def _begin_reading(self, number: int) -> None:
        """Let the threads read what this rank gives in a round, if there is such a round and they are not at it."""
        if not self._begun <= number < len(self._rounds):
            return
        self._begun = number + 1
        this = self._rounds[number]
        slots = _slots(self._give_areas[self._area(number)], _give_sizes(this))
        self._reads[number] = [
            self._threads.submit(read_through, give.run, self._packs(give.run.pack), self._targets, slot)
            for give, slot in zip(this.gives, slots, strict=True)
        ]

    def _lay_out(self, number: int, read: Sequence[memoryview]) -> None:
        """Note which memory goes to whom in a round, and which is filled by whom."""
        this = self._rounds[number]
        self._gives, self._takes = {}, {}
        for give, data in zip(this.gives, read, strict=True):
            for rank in give.receivers:
                self._gives.setdefault(rank, []).append(data)
        slots = _slots(self._take_areas[self._area(number)], _take_sizes(this))
        self._taken = [slot[: _bytes(take.run)] for slot, take in zip(slots, this.takes, strict=True)]
        for take, data in zip(this.takes, self._taken, strict=True):
            self._takes.setdefault(take.reader, []).append(data)

    def exchange(self, number: int, comm: Comm) -> None:
        """Pass a round on that was prepared, and let the threads check and place what was given in it."""
        self._exchange_began = self._clock.monotonic_seconds()
        comm.exchange(self._gives, self._takes)
        self._places[number] = [
            self._threads.submit(verify_and_place_all, take.run, data, self._way_of(take), self._targets)
            for take, data in zip(self._rounds[number].takes, self._taken, strict=True)
        ]
        if self._moved is not None:
            this = self._rounds[number]
            count = sum(_bytes(give.run) for give in this.gives) + sum(_bytes(take.run) for take in this.takes)
            self.moved_bytes += count
            self._moved(count)

    def _way_of(self, take: Take) -> str:
        return f"{self._packs(take.run.pack).url}, as rank {take.reader} read and passed it on"

    def _measure_reading(self, number: int, start: float) -> None:
        read_bytes = sum(_bytes(give.run) for give in self._rounds[number].gives)
        seconds = self._clock.monotonic_seconds() - start
        if read_bytes * self.pace.read_seconds >= self.pace.read_bytes * seconds:
            self.pace = replace(self.pace, read_bytes=read_bytes, read_seconds=seconds)

    def _measure_exchange(self, number: int) -> None:
        this = self._rounds[number]
        sent_bytes = sum(_bytes(give.run) * len(give.receivers) for give in this.gives)
        moved_bytes = max(sent_bytes, sum(_bytes(take.run) for take in this.takes))
        seconds = self._clock.monotonic_seconds() - self._exchange_began
        if moved_bytes * self.pace.moved_seconds >= self.pace.moved_bytes * seconds:
            self.pace = replace(self.pace, moved_bytes=moved_bytes, moved_seconds=seconds)

    def _finish_placing(self, number: int) -> None:
        """Wait until everything given in a round is placed, if there was such a round."""
        for place in self._places.pop(number, ()):
            place.result()

    def finish(self) -> None:
        """Wait for everything under way."""
        for reads in self._reads.values():
            for read in reads:
                read.result()
        for number in list(self._places):
            self._finish_placing(number)


def _joined(runs: Sequence[ReadRun], run_bytes_max: int) -> Iterator[ReadRun]:
    """Yield runs by pack and offset, neighbours in one as far as they may be."""
    kept: ReadRun | None = None
    for run in sorted(runs, key=lambda run: (run.pack, run.start)):
        if kept and (kept.pack, kept.stop) == (run.pack, run.start) and run.stop - kept.start <= run_bytes_max:
            kept = ReadRun(run.pack, kept.start, run.stop, kept.chunks + run.chunks)
            continue
        if kept:
            yield kept
        kept = run
    if kept:
        yield kept


def _bytes(run: ReadRun) -> int:
    return run.stop - run.start


def _slots(area: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    slots, at = [], 0
    for size in sizes:
        slots.append(area[at : at + size])
        at += size
    return slots


def _give_sizes(this: ExchangeRound) -> list[int]:
    return [give_slot_bytes(_bytes(give.run)) for give in this.gives]


def _take_sizes(this: ExchangeRound) -> list[int]:
    return [take_slot_bytes(_bytes(take.run)) for take in this.takes]
