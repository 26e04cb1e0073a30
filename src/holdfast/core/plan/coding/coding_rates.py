"""What the saves of a run have shown about coding and its store, and what a save adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast.base.types.coding import Coded, Compression, Kind, KindCoding, Measured, Rates, Sampling
from holdfast.core.plan.coding.choice import Amounts, KindsChoice, SaveModel, chosen, chosen_for_size

SLOWER_ABOVE = 1.03
"""A coded save that takes more than this part of the predicted time of a raw one was a mistake."""

RAW_SAVES = 10
"""Saves for which the slowest kind then stays raw."""

PROBE_SHARE = 0.005
"""Part of the processor time of saves that goes into measuring kinds that stay raw."""

_CHUNKS_PER_SAMPLE = 64
"""Of a kind that was never measured, one chunk in so many is coded to measure it."""

_SAMPLE_BYTES_MIN = 64 << 10

_RUNS_PER_SAMPLE = 2
"""A sample is coded twice, since the first run on a thread allocates memory: it takes up to twice as long."""

_GOLDEN = 0.618034
"""Multiples of it, modulo 1, spread evenly: the samples of successive saves lie far from each other."""

_SAVES_OF_CREDIT_MAX = 64
"""A chunk costs more than a small save may spend, so the allowance of so many saves adds up, and no more."""

_STRETCH_KEPT, _STRETCH_MAX = 0.9, 16.0

_BUSY_SHARE = 0.9
"""Share of its time for which a coded save must have been writing, to say how slow the store is."""


@dataclass(frozen=True, slots=True)
class CodingRates:
    """What the saves of one job to one place have shown."""

    rates: Mapping[Kind, Rates] = field(default_factory=dict)
    """What coding a kind costs and gains."""

    store_bytes_per_second: float | None = None
    """Bytes per second that the store takes from this rank; None before the first save."""

    choice: KindsChoice | None = None
    """The choice of the last save that has begun."""

    withheld: Mapping[Kind, int] = field(default_factory=dict)
    """Kinds that stay raw because a save that coded them was slow, each with the number of saves that is left."""

    probe_seconds: float = 0.0
    """Processor seconds that later saves may spend on measuring."""

    stretch: float = 1.0
    """By how much longer coding takes than its processor time, because threads wait for processors."""

    saves: int = 0
    """Saves that have ended."""

    measured_at: Mapping[Kind, int] = field(default_factory=dict)
    """By kind, `saves` when it was last measured."""

    def model(self) -> SaveModel | None:
        """Return what is known; None if nothing was written yet."""
        if self.store_bytes_per_second is None:
            return None
        return SaveModel(self.rates, self.store_bytes_per_second, 1 / self.stretch)

    def begun(self, amounts: Amounts, compression: Compression) -> tuple[CodingRates, KindsChoice]:
        """Return the knowledge once the next save has begun, and the choice of that save."""
        model = self.model()
        if compression == "on":
            choice = chosen_for_size(amounts, model)
        else:
            choice = chosen(amounts, model, self.choice, self.withheld)
        withheld = {kind: saves - 1 for kind, saves in self.withheld.items() if saves > 1}
        return replace(self, choice=choice, withheld=withheld), choice

    def samplings(self, choice: KindsChoice, amounts: Amounts, chunk_bytes: int) -> dict[Kind, Sampling]:
        """Return where a save measures the kinds that it writes raw: all that are unknown, others as time allows."""
        samplings = {}
        seconds_left = self.probe_seconds
        raw = sorted(amounts.kinds.keys() - choice.coded, key=lambda kind: (self.measured_at.get(kind, -1), kind))
        bytes_min = min(_SAMPLE_BYTES_MIN, chunk_bytes // 2)
        for kind in raw:
            every_bytes = _CHUNKS_PER_SAMPLE * chunk_bytes
            if kind not in self.rates:
                count = -(-amounts.kinds[kind] // every_bytes)
                samplings[kind] = Sampling(count, 0, every_bytes, bytes_min, chunk_bytes)
                continue
            seconds_left -= _RUNS_PER_SAMPLE * chunk_bytes / self.rates[kind].bytes_per_second
            if seconds_left < 0:
                break
            # The first chunk of a kind is the same tensor every time, so each save takes another one.
            first_bytes = int(self.saves * _GOLDEN % 1 * max(amounts.kinds[kind] - chunk_bytes, 0))
            samplings[kind] = Sampling(1, first_bytes, every_bytes, bytes_min, chunk_bytes)
        return samplings

    def ended(self, choice: KindsChoice, measured: Measured, compression: Compression) -> CodingRates:
        """Return the knowledge once a save has ended.

        Args:
            choice: The choice of that save; later ones may have begun meanwhile.
            measured: What it measured.
            compression: The setting. Under `on` no save is compared with a raw one.
        """
        store_bytes_per_second = self._store_bytes_per_second(measured)
        withheld = dict(self.withheld)
        if compression == "auto" and choice.model is not None and store_bytes_per_second is not None:
            # The slower of before and after: a change of the store is no mistake of the choice, and the next one
            # takes it into account by itself.
            slow = slow_kind(measured, min(choice.model.store_bytes_per_second, store_bytes_per_second))
            if slow is not None:
                withheld[slow] = RAW_SAVES
        allowance = PROBE_SHARE * measured.processor_seconds
        credit = min(self.probe_seconds + allowance - measured.probe_seconds, _SAVES_OF_CREDIT_MAX * allowance)
        return replace(
            self,
            rates=self._rates(measured),
            saves=self.saves + 1,
            measured_at={**self.measured_at, **dict.fromkeys((*measured.probed, *measured.coded), self.saves + 1)},
            store_bytes_per_second=store_bytes_per_second,
            stretch=self._stretch(measured),
            withheld=withheld,
            # The first save spends more than its allowance. That is not held against the later ones.
            probe_seconds=max(credit, 0.0),
        )

    def _store_bytes_per_second(self, measured: Measured) -> float | None:
        known = self.store_bytes_per_second
        if measured.written_bytes <= 0 or measured.write_seconds <= 0:
            return known
        found = measured.written_bytes / measured.write_seconds
        if known is None or not measured.coded or measured.write_seconds >= _BUSY_SHARE * measured.seconds:
            return found
        # The store waited for the thread that codes, and had fewer writes at a time than it can take. So the store is
        # at least this fast. Too low an estimate would let later saves code kinds that should stay raw.
        return max(found, known)

    def _stretch(self, measured: Measured) -> float:
        seconds = sum(coded.seconds for coded in measured.coded.values())
        elapsed = sum(coded.elapsed_seconds for coded in measured.coded.values())
        if seconds <= 0:
            # Raw saves do not show it. It is forgotten within some ten saves, and then tried again.
            return 1 + (self.stretch - 1) * _STRETCH_KEPT
        return min(max(elapsed / seconds, 1.0), _STRETCH_MAX)

    def _rates(self, measured: Measured) -> dict[Kind, Rates]:
        rates = dict(self.rates)
        for kind, coded in measured.probed.items():
            found = rates_of(coded)
            if found is not None:
                known = rates.get(kind, found)
                # One chunk says less than a save does.
                rates[kind] = Rates(
                    (known.ratio + found.ratio) / 2, (known.bytes_per_second + found.bytes_per_second) / 2
                )
        for kind, coded in measured.coded.items():
            found = rates_of(coded)
            if found is not None:
                rates[kind] = found
        return rates


def slow_kind(measured: Measured, store_bytes_per_second: float) -> Kind | None:
    """Return the kind that stays raw after a save that took longer than a raw one would have; None if it did not.

    Args:
        measured: What the save measured.
        store_bytes_per_second: Bandwidth with which the raw save is predicted.
    Returns:
        Of the coded kinds, the one that saved the fewest bytes in a processor second.
    """
    saved_bytes = sum(coded.raw_bytes - coded.stored_bytes for coded in measured.coded.values())
    raw_seconds = (measured.written_bytes + saved_bytes) / store_bytes_per_second
    if not measured.coded or measured.seconds <= SLOWER_ABOVE * raw_seconds:
        return None

    def gain(kind: Kind) -> float:
        coded = measured.coded[kind]
        return (coded.raw_bytes - coded.stored_bytes) / max(coded.seconds, 1e-9)

    return min(sorted(measured.coded), key=gain)


def rates_of(coded: Coded) -> Rates | None:
    """Return what was measured of a kind; None if too little was coded to tell."""
    if coded.raw_bytes <= 0 or coded.stored_bytes <= 0 or coded.seconds <= 0:
        return None
    return Rates(coded.raw_bytes / coded.stored_bytes, coded.raw_bytes / coded.seconds)


def codings_of(
    knowledge: CodingRates, choice: KindsChoice, amounts: Amounts, measured: Measured
) -> tuple[KindCoding, ...]:
    """Return what a save did with each kind, the largest kinds first.

    Args:
        knowledge: What is known after the save.
        choice: Its choice.
        amounts: What it wrote, without the pieces that an earlier step holds.
        measured: What it measured.
    """
    predicted_seconds = choice.predicted_seconds(amounts)
    writes = measured.write_seconds > 0 and measured.written_bytes > 0
    rows = []
    for kind, raw_bytes in sorted(amounts.kinds.items(), key=lambda each: (-each[1], each[0])):
        coded, rates = measured.coded.get(kind), knowledge.rates.get(kind)
        rows.append(
            KindCoding(
                kind=str(kind),
                codec="" if coded is None else coded.codec,
                raw_bytes=raw_bytes,
                stored_bytes=raw_bytes if coded is None else raw_bytes - coded.raw_bytes + coded.stored_bytes,
                ratio=None if rates is None else rates.ratio,
                encode_bytes_per_second=None if rates is None else rates.bytes_per_second,
                store_bytes_per_second=measured.written_bytes / measured.write_seconds if writes else None,
                predicted_seconds=predicted_seconds,
                found_seconds=measured.seconds,
                why=choice.decisions[kind].why if kind in choice.decisions else "",
            )
        )
    return tuple(rows)
