"""Which source of a mixture serves a place: exact quotas, from a table that repeats."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from holdfast.base.sampling.order import Order, Places, Shuffle, sample_seed
from holdfast.errors import InvalidError

PERIOD = 1 << 16
"""Places of a table. Weights are rounded to 1/65,536."""


class Quotas:
    """The sources that serve the places of a run, in phases of constant weights.

    After k samples of a phase, each source has served its share of k, within one sample.

    Args:
        phases: Weights of each source by the sample of the run from which they count; the first is 0.
    Raises:
        InvalidError: A weight is negative, not finite, or all are 0; or a phase begins below 0.
    """

    def __init__(self, phases: Mapping[int, Sequence[float]]) -> None:
        self._phases: list[_Phase] = []
        for start in sorted(phases):
            if type(start) is not int or start < 0:
                raise InvalidError(f"phases: {start!r}; expected the sample of the run at which the phase begins")
            served = self.counts(start) if self._phases else np.zeros(len(phases[start]), np.int64)
            self._phases.append(_phase(start, served, phases[start]))

    def counts(self, place: int) -> Places:
        """Return how many samples each source has served before a place of the run."""
        phase = max((each for each in self._phases if each.start <= place), key=lambda each: each.start)
        periods, rest = divmod(place - phase.start, PERIOD)
        inside = np.bincount(phase.sources[:rest], minlength=len(phase.quotas))
        return phase.served + periods * phase.quotas + inside

    def sources(self, places: Places) -> tuple[npt.NDArray[np.uint16], Places]:
        """Return the source of each place, and the number of the sample among all that the source serves.

        Args:
            places: Places of the run, in ascending order.
        """
        sources, numbers = np.empty(len(places), np.uint16), np.empty(len(places), np.int64)
        bounds = [*(phase.start for phase in self._phases), np.iinfo(np.int64).max]
        for phase, (begin, end) in zip(self._phases, pairwise(np.searchsorted(places, bounds)), strict=True):
            periods, inside = np.divmod(places[begin:end] - phase.start, PERIOD)
            source = phase.sources[inside]
            sources[begin:end] = source
            numbers[begin:end] = phase.served[source] + periods * phase.quotas[source] + phase.earlier[inside]
        return sources, numbers


class MixedOrder:
    """The order of a mixture: each source has an order and epochs of its own, and quotas say which source is next.

    Args:
        sources: Number of samples of each source, by name.
        n: Samples of an epoch of the mixture.
        quotas: The source of each place.
        seed, shuffle: As of `Order`, for every source.
    """

    def __init__(self, sources: Mapping[str, int], n: int, quotas: Quotas, seed: int, shuffle: Shuffle) -> None:
        self.n, self._names, self._quotas = n, list(sources), quotas
        self._orders = [
            Order(samples, sample_seed(seed, -1, number), shuffle) for number, samples in enumerate(sources.values())
        ]
        self.lengths = dict(sources)
        self._starts = np.cumsum([0, *sources.values()])

    def samples(self, epoch: int, places: Places) -> tuple[Places, Places]:
        """Return the source's epoch and the sample at each place; samples count through the sources, one after another.

        Args:
            epoch: Number of the epoch of the mixture, from 0.
            places: int64 numbers in ascending order; those of n and more are in later epochs.
        """
        sources, numbers = self._quotas.sources(epoch * self.n + places)
        epochs, samples = np.empty_like(numbers), np.empty_like(numbers)
        for source in np.unique(sources):
            inside = sources == source
            epochs[inside], found = self._orders[source].samples_of(numbers[inside])
            samples[inside] = found + self._starts[source]
        return epochs, samples

    def served(self, epoch: int, samples: int) -> dict[str, int]:
        """Return the samples that each source has served before a place, by name."""
        return dict(zip(self._names, self._quotas.counts(epoch * self.n + samples).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class _Phase:
    start: int
    served: Places
    """Samples that each source has served before the phase."""

    quotas: Places
    """Places of each source in the table."""

    sources: npt.NDArray[np.uint16]
    """The table: the source of each place."""

    earlier: Places
    """For each place of the table, the places before it with the same source."""


def _phase(start: int, served: Places, weights: Sequence[float]) -> _Phase:
    quotas = _rounded(weights)
    sources = _table(quotas)
    earlier = np.empty(PERIOD, np.int64)
    for source, quota in enumerate(quotas):
        earlier[sources == source] = np.arange(quota)
    return _Phase(start, served, np.array(quotas, np.int64), sources, earlier)


def _rounded(weights: Sequence[float]) -> list[int]:
    """Return weights as whole numbers that add up to the period, by largest remainder."""
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise InvalidError(f"weights {list(weights)}; expected finite numbers, none negative and not all 0")
    exact = [weight / math.fsum(weights) * PERIOD for weight in weights]
    quotas = [int(each) for each in exact]
    by_remainder = sorted(range(len(weights)), key=lambda source: quotas[source] - exact[source])
    for source in by_remainder[: PERIOD - sum(quotas)]:
        quotas[source] += 1
    return quotas


def _table(quotas: Sequence[int]) -> npt.NDArray[np.uint16]:
    """Return the source of each place of a period.

    The k-th place of a source may not come before its share has passed k - 1, and must come before its share has
    passed k. Of the sources that may come, the one with the earliest deadline does.

    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
    """
    table, served = np.empty(PERIOD, np.uint16), [0] * len(quotas)
    later = [(0, source) for source, quota in enumerate(quotas) if quota]
    ready: list[tuple[int, int]] = []
    for place in range(PERIOD):
        while later and later[0][0] <= place:
            source = heapq.heappop(later)[1]
            heapq.heappush(ready, (-(-(served[source] + 1) * PERIOD // quotas[source]), source))
        source = heapq.heappop(ready)[1]
        table[place] = source
        served[source] += 1
        if served[source] < quotas[source]:
            heapq.heappush(later, (served[source] * PERIOD // quotas[source], source))
    return table
