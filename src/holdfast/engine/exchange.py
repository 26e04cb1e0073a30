"""Carries out a load in which ranks pass bytes to each other: reads and checks on threads, collectives on the caller's.

While one round is passed on, the next is read and the one before is placed. Every round begins with a word from every
rank, so that all of them stop together when one has failed; nothing that failed its check is ever sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.engine.read import carry_out, read_through, settle_all
from holdfast.engine.slabs import new_slab
from holdfast.ports.clock import Clock
from holdfast.ports.comm import Comm
from holdfast.ports.framework import Target
from holdfast.ports.store import Store
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.spec.exchange import ExchangePlan, ExchangeRound, Give, Pace
from holdfast.spec.plan import LoadPlan, ReadRun

_WORD = struct.Struct("<?qdqd")
_AREAS = 2
"""Rounds whose bytes are in memory at once: one is passed on while the next is read, or the one before placed."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a rank's load came to."""

    read_bytes: int
    """Read from storage."""

    received_bytes: int
    """Given by other ranks."""

    whole: bool = True
    """Whether everything was placed; False where another rank failed, and all of them stopped."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """When to look at what was measured, and what to make of it; the same on every rank."""

    after_rounds: int
    """Rounds that are measured first."""

    goes_on: Callable[[Sequence[Pace]], bool]
    """Whether the rest is to be exchanged too, by the paces of all ranks; otherwise every rank reads its own."""


def carry_out_exchange(
    planned: Callable[[], ExchangePlan],
    round_count: int,
    weighing: Weighing | None,
    comm: Comm,
    clock: Clock,
    store: Store,
    prefix: str,
    targets: Sequence[Target],
    settings: Settings,
) -> Moved:
    """Read, pass on, check and place everything a plan lists; a collective of every rank.

    A receiver checks every chunk again: it must not trust memory and wires that the reader's check never saw.

    Args:
        planned: Returns this rank's plan; what it raises is this rank's failure, and the others hear of it.
        round_count: Rounds of the plan, on every rank.
        weighing: Whether exchanging may end before; None: never.
        comm: The ranks.
        clock: For the paces.
        store: Where from.
        prefix: Folder of the attempt.
        targets: Where to, by wanted number.
        settings: Reads in flight.
    Raises:
        CorruptError: A chunk that this rank read or was given is not what was saved.
        UnavailableError: The store failed.
    """
    with ThreadPoolExecutor(settings.windows_in_flight, thread_name_prefix="holdfast-exchange") as threads:
        try:
            rest = _exchange(planned, round_count, weighing, comm, _Passing(threads, clock, store, prefix, targets))
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise
    if rest is None:
        return Moved(0, 0, whole=False)
    plan, given_bytes, received_bytes = rest
    carry_out(plan, store, prefix, targets, settings)
    return Moved(given_bytes + plan.bytes, received_bytes)


def _exchange(
    planned: Callable[[], ExchangePlan], round_count: int, weighing: Weighing | None, comm: Comm, passing: _Passing
) -> tuple[LoadPlan, int, int] | None:
    """Go through the rounds; return what is left to read, bytes read and bytes received, or None if a rank failed."""
    own: Exception | None = None
    rounds: Sequence[ExchangeRound] = ()
    alone = LoadPlan(())
    try:
        plan = planned()
        rounds, alone = plan.rounds, plan.alone
        passing.begin(rounds)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        own = error
    number = 0
    for number in range(round_count):
        if own is None:
            try:
                passing.finish_reading(number)
                passing.begin_reading(number + 1)
                passing.finish_placing(number - _AREAS)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
                own = error
        words = [_WORD.unpack(word) for word in comm.all_gather(_word(own, passing.pace))]
        if own is not None:
            raise own
        if any(word[0] for word in words):
            return None
        if weighing and number == weighing.after_rounds and not weighing.goes_on([Pace(*word[1:]) for word in words]):
            break
        passing.exchange(number, comm)
        passing.begin_placing(number)
    else:
        number = round_count
    passing.finish()
    # A round that was not exchanged has been read by those who were to pass it on, and so has the one after it.
    takes = [take.run for each in rounds[number:] for take in each.takes]
    gives = [give.run for each in rounds[number + _AREAS :] for give in each.gives]
    given_bytes = sum(_bytes(give.run) for each in rounds[: number + _AREAS] for give in each.gives)
    received_bytes = sum(_bytes(take.run) for each in rounds[:number] for take in each.takes)
    return LoadPlan((*takes, *gives, *alone.runs)), given_bytes, received_bytes


def _word(own: Exception | None, pace: Pace) -> bytes:
    return _WORD.pack(own is not None, pace.read_bytes, pace.read_seconds, pace.moved_bytes, pace.moved_seconds)


class _Passing:
    """The rounds of one rank: what is read, passed on and placed meanwhile, in memory allocated once."""

    def __init__(
        self, threads: ThreadPoolExecutor, clock: Clock, store: Store, prefix: str, targets: Sequence[Target]
    ) -> None:
        self._threads, self._clock, self._store = threads, clock, store
        self._prefix, self._targets = prefix, targets
        self._rounds: Sequence[ExchangeRound] = ()
        self._reads: dict[int, list[Future[tuple[memoryview, float]]]] = {}
        self._places: dict[int, list[Future[None]]] = {}
        self._read: dict[int, list[memoryview]] = {}
        self._taken: dict[int, list[memoryview]] = {}
        self._began: dict[int, float] = {}
        self.pace = Pace(0, 0.0, 0, 0.0)
        """Of the last round that was passed on."""

    def begin(self, rounds: Sequence[ExchangeRound]) -> None:
        """Allocate memory for the largest round, for each direction, and begin to read the first."""
        self._rounds = rounds
        give_bytes = max((sum(_slot_bytes(give.run) for give in each.gives) for each in rounds), default=0)
        take_bytes = max((sum(_slot_bytes(take.run) for take in each.takes) for each in rounds), default=0)
        areas = min(_AREAS, len(rounds))
        self._give_areas = [new_slab(max(give_bytes, 1)) for _ in range(areas)]
        self._take_areas = [new_slab(max(take_bytes, 1)) for _ in range(areas)]
        self.begin_reading(0)

    def begin_reading(self, number: int) -> None:
        """Let the threads read what this rank gives in a round, if there is such a round."""
        if number >= len(self._rounds):
            return
        gives = self._rounds[number].gives
        slots = _slots(self._give_areas[number % _AREAS], [give.run for give in gives])
        self._began[number] = self._clock.monotonic_seconds()
        self._reads[number] = [
            self._threads.submit(self._read_one, give, slot) for give, slot in zip(gives, slots, strict=True)
        ]

    def _read_one(self, give: Give, slot: memoryview) -> tuple[memoryview, float]:
        data = read_through(give.run, self._store, f"{self._prefix}{give.run.pack}", self._targets, slot)
        return data, self._clock.monotonic_seconds()

    def finish_reading(self, number: int) -> None:
        """Wait until everything this rank gives in a round is read, checked and placed here."""
        done = [read.result() for read in self._reads.pop(number)]
        self._read[number] = [data for data, _ in done]
        self._began[number] = max((ended for _, ended in done), default=self._began[number]) - self._began[number]

    def exchange(self, number: int, comm: Comm) -> None:
        """Pass a round on, and take what is given in it."""
        this = self._rounds[number]
        gives: dict[int, list[memoryview]] = {}
        for give, data in zip(this.gives, self._read.pop(number), strict=True):
            for rank in give.receivers:
                gives.setdefault(rank, []).append(data)
        runs = [take.run for take in this.takes]
        slots = _slots(self._take_areas[number % _AREAS], runs)
        self._taken[number] = [slot[: _bytes(run)] for slot, run in zip(slots, runs, strict=True)]
        takes: dict[int, list[memoryview]] = {}
        for take, data in zip(this.takes, self._taken[number], strict=True):
            takes.setdefault(take.reader, []).append(data)
        start = self._clock.monotonic_seconds()
        comm.exchange(gives, takes)
        self.pace = Pace(
            sum(_bytes(give.run) for give in this.gives),
            self._began.pop(number),
            max(_lengths(gives), _lengths(takes)),
            self._clock.monotonic_seconds() - start,
        )

    def begin_placing(self, number: int) -> None:
        """Let the threads check and place what was given in a round."""
        self._places[number] = [
            self._threads.submit(
                settle_all,
                take.run,
                data,
                f"{self._store.url}/{self._prefix}{take.run.pack}, as rank {take.reader} read and passed it on",
                self._targets,
            )
            for take, data in zip(self._rounds[number].takes, self._taken.pop(number), strict=True)
        ]

    def finish_placing(self, number: int) -> None:
        """Wait until everything given in a round is placed, if there was such a round."""
        for place in self._places.pop(number, ()):
            place.result()

    def finish(self) -> None:
        """Wait for everything under way."""
        for number in list(self._reads):
            self.finish_reading(number)
        for number in list(self._places):
            self.finish_placing(number)


def _bytes(run: ReadRun) -> int:
    return run.stop - run.start


def _lengths(buffers: Mapping[int, Sequence[memoryview]]) -> int:
    return sum(len(each) for by_rank in buffers.values() for each in by_rank)


def _slot_bytes(run: ReadRun) -> int:
    """Return the memory a run is read into: whole pages, and one more at either end, as stores may need."""
    return -(-_bytes(run) // PAGE_BYTES) * PAGE_BYTES + 2 * PAGE_BYTES


def _slots(area: memoryview, runs: Sequence[ReadRun]) -> list[memoryview]:
    slots, at = [], 0
    for run in runs:
        slots.append(area[at : at + _slot_bytes(run)])
        at += _slot_bytes(run)
    return slots
