"""Measured compression ratios and speeds, updated after each save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast.base.types.coding import Coded, Compression, Kind, KindCoding, Measured, Rates, Sampling
from holdfast.core.plan.coding.choice import Amounts, KindsChoice, SaveModel, chosen, chosen_for_size

SLOWER_ABOVE = 1.03
"""A coded save was a mistake if its time is above this multiple of the predicted time of a raw save."""

RAW_SAVES = 10
"""Saves for which the slowest kind then stays raw."""

PROBE_SHARE = 0.005
"""Share of the processor time of saves for measuring kinds that stay raw."""

_CHUNKS_PER_SAMPLE = 64
"""One chunk in so many is coded to measure a kind that was never measured."""

_SAMPLE_BYTES_MIN = 64 << 10

_RUNS_PER_SAMPLE = 2
"""A sample is coded twice, since the first run on a thread allocates memory and takes up to twice as long."""

_GOLDEN = 0.618034
"""Multiples of this number, modulo 1, spread evenly: samples of successive saves are far from each other."""

_SAVES_OF_CREDIT_MAX = 64
"""Limit of saved-up allowance, in saves: a chunk costs more than one small save may spend."""

_STRETCH_KEPT, _STRETCH_MAX = 0.9, 16.0

_BUSY_SHARE = 0.9
"""Share of its time that a coded save must spend on writes, to lower the known bandwidth of the store."""


@dataclass(frozen=True, slots=True)
class CodingRates:
    """The measurements of the saves of one job to one place."""

    rates: Mapping[Kind, Rates] = field(default_factory=dict)
    """Compression ratio and speed of each kind."""

    store_bytes_per_second: float | None = None
    """Bytes per second that the store takes from this rank; None before the first save."""

    choice: KindsChoice | None = None
    """The choice of the last save that began."""

    withheld: Mapping[Kind, int] = field(default_factory=dict)
    """Kinds that stay raw after a slow coded save, each with the number of remaining saves."""

    probe_seconds: float = 0.0
    """Processor seconds that later saves may spend on measuring."""

    stretch: float = 1.0
    """Elapsed time of coding, as a multiple of its processor time: threads may wait for processors."""

    saves: int = 0
    """Saves that have ended."""

    measured_at: Mapping[Kind, int] = field(default_factory=dict)
    """By kind, the value of `saves` at the last measurement."""

    def model(self) -> SaveModel | None:
        """Return the model from these measurements; None before the first write."""
        if self.store_bytes_per_second is None:
            return None
        return SaveModel(self.rates, self.store_bytes_per_second, 1 / self.stretch)

    def begun(self, amounts: Amounts, compression: Compression) -> tuple[CodingRates, KindsChoice]:
        """Return the state after the next save has begun, and the choice of that save."""
        model = self.model()
        if compression == "on":
            choice = chosen_for_size(amounts, model)
        else:
            choice = chosen(amounts, model, self.choice, self.withheld)
        withheld = {kind: saves - 1 for kind, saves in self.withheld.items() if saves > 1}
        return replace(self, choice=choice, withheld=withheld), choice

    def samplings(self, choice: KindsChoice, amounts: Amounts, chunk_bytes: int) -> dict[Kind, Sampling]:
        """Return the samples of a save from raw kinds: of all unmeasured kinds, and of others as time allows."""
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
            # The first chunk of a kind is the same tensor every time, so each save takes another chunk.
            first_bytes = int(self.saves * _GOLDEN % 1 * max(amounts.kinds[kind] - chunk_bytes, 0))
            samplings[kind] = Sampling(1, first_bytes, every_bytes, bytes_min, chunk_bytes)
        return samplings

    def ended(self, choice: KindsChoice, measured: Measured, compression: Compression) -> CodingRates:
        """Return the state after a save has ended.

        Args:
            choice: The choice of that save; later saves may have begun meanwhile.
            measured: The measurements of that save.
            compression: The setting. Under `on` no save is compared with a raw save.
        """
        store_bytes_per_second = self._store_bytes_per_second(measured)
        withheld = dict(self.withheld)
        if compression == "auto" and choice.model is not None and store_bytes_per_second is not None:
            # The slower bandwidth of before and after: a change of the store is not a mistake of the choice, and the
            # next choice uses the new bandwidth.
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
            # The first save spends more than its allowance. Later saves do not repay the excess.
            probe_seconds=max(credit, 0.0),
        )

    def _store_bytes_per_second(self, measured: Measured) -> float | None:
        known = self.store_bytes_per_second
        if measured.written_bytes <= 0 or measured.write_seconds <= 0:
            return known
        found = measured.written_bytes / measured.write_seconds
        if known is None or not measured.coded or measured.write_seconds >= _BUSY_SHARE * measured.seconds:
            return found
        # The store waited for the coding thread, and had fewer writes at a time than possible. So the store is at least
        # this fast. Too low an estimate would let later saves code kinds that should stay raw.
        return max(found, known)

    def _stretch(self, measured: Measured) -> float:
        seconds = sum(coded.seconds for coded in measured.coded.values())
        elapsed = sum(coded.elapsed_seconds for coded in measured.coded.values())
        if seconds <= 0:
            # Raw saves do not measure the stretch. The value decays within some ten saves, and then coding is tried.
            return 1 + (self.stretch - 1) * _STRETCH_KEPT
        return min(max(elapsed / seconds, 1.0), _STRETCH_MAX)

    def _rates(self, measured: Measured) -> dict[Kind, Rates]:
        rates = dict(self.rates)
        for kind, coded in measured.probed.items():
            found = rates_of(coded)
            if found is not None:
                known = rates.get(kind, found)
                # One chunk is weaker evidence than a whole save.
                rates[kind] = Rates(
                    (known.ratio + found.ratio) / 2, (known.bytes_per_second + found.bytes_per_second) / 2
                )
        for kind, coded in measured.coded.items():
            found = rates_of(coded)
            if found is not None:
                rates[kind] = found
        return rates


def slow_kind(measured: Measured, store_bytes_per_second: float) -> Kind | None:
    """Return the kind that stays raw after a save slower than a predicted raw save; None after a faster save.

    Args:
        measured: The measurements of the save.
        store_bytes_per_second: Bandwidth for the prediction of the raw save.
    Returns:
        The coded kind that saved the fewest bytes in a processor second.
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
    """Return the rates of a kind; None if too little was coded for a measurement."""
    if coded.raw_bytes <= 0 or coded.stored_bytes <= 0 or coded.seconds <= 0:
        return None
    return Rates(coded.raw_bytes / coded.stored_bytes, coded.raw_bytes / coded.seconds)


def codings_of(
    knowledge: CodingRates, choice: KindsChoice, amounts: Amounts, measured: Measured
) -> tuple[KindCoding, ...]:
    """Return the coding of each kind in a save, the largest kinds first.

    Args:
        knowledge: The rates after the save.
        choice: The choice of the save.
        amounts: The written bytes by kind, without the pieces that an earlier step holds.
        measured: The measurements of the save.
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
