"""Decides which kinds of tensors a save codes: those that make it shorter, never slower than raw.

A save is a pipeline of coding and writing, so it takes as long as the slower of both:
`T = max(stored bytes / bytes per second of the store, raw bytes of coded kinds / bytes per second of coding)`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.base.types.coding import Kind, KindDecision, Rates

CODED_BELOW = 0.97
"""Kinds are coded only if the save takes less than this part of its time raw: less is within the noise of a store."""

STANDS_WITHIN = 1.10
"""A decision stands until a prediction changes by this factor: bandwidth that wavers changes nothing."""

SHRUNK_BELOW = 0.95
"""With `compression="on"` a kind is coded if its stored bytes are at most this part of its raw bytes."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """What one rank writes in a save."""

    kinds: Mapping[Kind, int]
    """Raw bytes of the pieces that may be coded, by kind."""

    plain_bytes: int = 0
    """Bytes of the pieces that never are."""

    @property
    def bytes(self) -> int:
        """All raw bytes."""
        return sum(self.kinds.values()) + self.plain_bytes


@dataclass(frozen=True, slots=True)
class SaveModel:
    """What is known before a save, and so how long it takes."""

    rates: Mapping[Kind, Rates]
    """What coding a kind costs and gains, where it has been measured."""

    store_bytes_per_second: float
    """Bytes per second that the store takes from this rank."""

    processor_share: float
    """The share of a processor that the thread that codes has: less than one if it waits for processors."""

    def seconds(self, amounts: Amounts, coded: Collection[Kind]) -> float:
        """Return how long a save takes that codes some kinds, all of them measured."""
        # Rounded once, so the order of a set, which differs from one process to the next, changes no digit.
        saved_bytes = math.fsum(self.saved_bytes(kind, amounts.kinds[kind]) for kind in coded)
        coding_seconds = math.fsum(self.coding_seconds(kind, amounts.kinds[kind]) for kind in coded)
        return max((amounts.bytes - saved_bytes) / self.store_bytes_per_second, coding_seconds)

    def saved_bytes(self, kind: Kind, raw_bytes: int) -> float:
        """Return by how much coding shrinks so many bytes of a kind."""
        return raw_bytes * (1 - 1 / self.rates[kind].ratio)

    def coding_seconds(self, kind: Kind, raw_bytes: int) -> float:
        """Return how long coding takes for so many bytes of a kind."""
        return raw_bytes / (self.processor_share * self.rates[kind].bytes_per_second)

    def gain(self, kind: Kind) -> float:
        """Return the bytes that coding a kind saves in a processor second."""
        rates = self.rates[kind]
        return rates.bytes_per_second * (1 - 1 / rates.ratio)

    def keeps_up(self, kind: Kind) -> bool:
        """Return whether coding a kind is faster than writing it raw.

        Chunks are stored in file order, through a short queue. Where many chunks of a slower kind follow one another,
        the store waits for the thread that codes, whatever the sum over all kinds says.
        """
        return self.processor_share * self.rates[kind].bytes_per_second > self.store_bytes_per_second

    def best_first(self, kinds: Iterable[Kind]) -> list[Kind]:
        """Return the kinds that are known to shrink, those first that save most bytes in a processor second."""
        known = [kind for kind in kinds if kind in self.rates and self.rates[kind].ratio > 1]
        return sorted(known, key=lambda kind: (-self.gain(kind), kind))

    def ideal_seconds(self, amounts: Amounts, kinds: Iterable[Kind]) -> float:
        """Return the shortest time if any part of a kind could be coded: the fractional knapsack, greedy and exact.

        It changes by no larger factor than the bandwidth does, so hysteresis can rely on it. Time that whole kinds
        need is no such measure: it jumps where another set of kinds becomes the best.
        """
        writing = amounts.bytes / self.store_bytes_per_second
        coding = 0.0
        for kind in self.best_first(kinds):
            less_writing = self.saved_bytes(kind, amounts.kinds[kind]) / self.store_bytes_per_second
            more_coding = self.coding_seconds(kind, amounts.kinds[kind])
            part = min((writing - coding) / (less_writing + more_coding), 1.0) if more_coding else 1.0
            if part <= 0:
                break
            writing, coding = writing - part * less_writing, coding + part * more_coding
        return max(writing, coding)


@dataclass(frozen=True, slots=True)
class Basis:
    """The predictions on which a choice was made, in seconds for each raw byte. A choice stands while they hold."""

    raw: float
    """Everything raw."""

    chosen: float
    """What was chosen."""

    ideal: float
    """The shortest time of any choice that codes parts of kinds too."""

    candidates: frozenset[Kind]
    """The kinds that might have been coded."""


@dataclass(frozen=True, slots=True)
class KindsChoice:
    """What one save codes, and why."""

    decisions: Mapping[Kind, KindDecision]
    """The decision on each kind."""

    model: SaveModel | None = None
    """What was known when it was made; None before anything was measured."""

    basis: Basis | None = None
    """The predictions that it stands on; None: it does not stand."""

    coded: frozenset[Kind] = field(init=False)
    """The kinds that are coded."""

    def __post_init__(self) -> None:
        coded = frozenset(kind for kind, decision in self.decisions.items() if decision.is_coded)
        object.__setattr__(self, "coded", coded)

    def predicted_seconds(self, amounts: Amounts) -> float | None:
        """Return how long a save of these amounts is expected to take; None if that is unknown."""
        coded = self.coded & amounts.kinds.keys()
        if self.model is None or not coded <= self.model.rates.keys():
            return None
        return self.model.seconds(amounts, coded)


def chosen(
    amounts: Amounts, model: SaveModel | None, before: KindsChoice | None, withheld: Mapping[Kind, int] | None = None
) -> KindsChoice:
    """Return what a save under `compression="auto"` codes. Its predicted time never exceeds that of a raw save.

    Kinds are added while the time falls, those first that save most bytes in a processor second. A kind that a thread
    codes more slowly than the store takes it is never added.

    Args:
        amounts: What the save writes.
        model: What is known; None: nothing, so nothing is coded.
        before: The choice of the save before.
        withheld: Kinds that stay raw because coding them was slow, each with the number of saves that is left.
    """
    withheld = withheld or {}
    if model is None:
        return KindsChoice(
            dict.fromkeys(amounts.kinds, KindDecision(False, "nothing is measured yet: the first save is raw"))
        )
    candidates = frozenset(kind for kind in amounts.kinds if kind in model.rates and kind not in withheld)
    raw_seconds = model.seconds(amounts, ())
    ideal_seconds = model.ideal_seconds(amounts, candidates)
    coded = None
    if before is not None and before.basis is not None and before.basis.candidates == candidates:
        coded = before.coded if _stands(before, model, amounts, ideal_seconds) else None
    basis = before.basis if before is not None and coded is not None else None
    if coded is None:
        coded = _best(amounts, model, candidates)
        scale = 1 / max(amounts.bytes, 1)
        chosen_seconds = model.seconds(amounts, coded)
        basis = Basis(raw_seconds * scale, chosen_seconds * scale, ideal_seconds * scale, candidates)
    share = model.seconds(amounts, coded) / raw_seconds if raw_seconds else 1.0
    decisions = {
        kind: KindDecision(kind in coded, _why(kind, model, coded, share, withheld.get(kind, 0)))
        for kind in amounts.kinds
    }
    return KindsChoice(decisions, model, basis)


def chosen_for_size(amounts: Amounts, model: SaveModel | None) -> KindsChoice:
    """Return what a save under `compression="on"` codes: whatever shrinks by 5 %, and what nobody has measured yet."""
    rates = {} if model is None else model.rates
    decisions = {}
    for kind in amounts.kinds:
        shrinks = kind not in rates or 1 / rates[kind].ratio <= SHRUNK_BELOW
        why = 'compression="on"' if shrinks else 'compression="on", but coding it saves less than 5 %'
        decisions[kind] = KindDecision(shrinks, why)
    return KindsChoice(decisions, model)


def _best(amounts: Amounts, model: SaveModel, candidates: Collection[Kind]) -> frozenset[Kind]:
    """Return the kinds to code, none unless the save gets shorter by 3 %."""
    coded: list[Kind] = []
    writing = seconds = raw_seconds = model.seconds(amounts, ())
    coding = 0.0
    for kind in model.best_first(filter(model.keeps_up, candidates)):
        less_writing = writing - model.saved_bytes(kind, amounts.kinds[kind]) / model.store_bytes_per_second
        more_coding = coding + model.coding_seconds(kind, amounts.kinds[kind])
        # Not the end of the search if the time does not fall: a smaller kind may still fit in.
        if max(less_writing, more_coding) < seconds:
            coded.append(kind)
            writing, coding = less_writing, more_coding
            seconds = max(writing, coding)
    return frozenset(coded) if model.seconds(amounts, coded) < CODED_BELOW * raw_seconds else frozenset()


def _stands(before: KindsChoice, model: SaveModel, amounts: Amounts, ideal_seconds: float) -> bool:
    """Return whether the predictions on which a choice was made still hold, and it is no slower than raw."""
    basis, scale = before.basis, 1 / max(amounts.bytes, 1)
    assert basis is not None, "the choice was made by predictions"
    raw_seconds, seconds = model.seconds(amounts, ()), model.seconds(amounts, before.coded)
    return seconds <= raw_seconds and all(
        _is_near(now * scale, then)
        for now, then in ((raw_seconds, basis.raw), (seconds, basis.chosen), (ideal_seconds, basis.ideal))
    )


def _is_near(one: float, other: float) -> bool:
    return max(one, other) < STANDS_WITHIN * min(one, other) or one == other


def _why(kind: Kind, model: SaveModel, coded: Collection[Kind], share: float, saves_left: int) -> str:
    """Return the reason of a decision, for people."""
    if saves_left:
        return f"a save that coded it took longer than raw: it stays raw for {saves_left} saves"
    if kind not in model.rates:
        return "it is not measured yet"
    if kind in coded:
        return f"the save is predicted to take {share:.0%} of its time raw"
    if model.rates[kind].ratio <= 1:
        return "coding does not shrink it"
    if not model.keeps_up(kind):
        return "the store takes it raw faster than it can be coded"
    if coded:
        return "to code it too would take longer than it saves"
    return "coding is predicted to save less than 3 % of the time"
