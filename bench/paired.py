"""The statistics of a paired comparison: the ratio of each round, their median, its 95 % interval, a verdict.

Every varying amount is better when it is less: seconds, memory, a slowdown. The ratio of a round is BEFORE ÷ AFTER. A
ratio of 1.05 means that AFTER needs 1/1.05 of the amount. Both runs of a round follow each other directly, so that
whatever slows the machine for minutes slows both.

The interval comes from order statistics: two of the sorted ratios enclose the true median with at least 95 %
probability, whatever their distribution. At least six ratios are necessary. With six to eight, the two are the lowest
and the highest, so a key can fall only if AFTER needs more in every round. With seven rounds, chance alone does that
for one key in 128.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

RATIO_MIN = 0.97
"""A key whose median ratio is lower has fallen, unless its interval contains 1."""

TAIL = 0.025
"""Largest probability that the true median is below the interval, and that it is above."""

Verdict = Literal["holds", "fell", "undecided", "equal", "differs", "missing", "new"]
"""`undecided`: the median is too low, and there are too few rounds for an interval. `equal` and `differs`: exact
amounts. `missing`: only BEFORE has the key. `new`: only AFTER has it."""

FAILED: frozenset[Verdict] = frozenset({"fell", "undecided", "differs", "missing"})
"""Verdicts that make the whole comparison fail."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """What one run of one checkout measured, by key."""

    varying: dict[str, float]
    """Amounts that differ from run to run; less is better."""

    exact: dict[str, float]
    """Bytes and counts that are the same in every run."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: both checkouts, measured one after the other."""

    before: Amounts
    """What BEFORE measured."""

    after: Amounts
    """What AFTER measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result for one key."""

    key: str
    """Its name; the unit is the last word."""

    rounds: int
    """Rounds that measured it with both checkouts."""

    before: float | None
    """Median of BEFORE; None where it has no such key."""

    after: float | None
    """Median of AFTER; None where it has no such key."""

    ratio: float | None = None
    """Median of BEFORE ÷ AFTER, round by round; None for an exact amount."""

    interval: tuple[float, float] | None = None
    """The 95 % interval of that median; None for fewer than six rounds."""

    verdict: Verdict
    """What the rule says of it."""


def rows_of(pairs: Sequence[Pair]) -> Iterator[Row]:
    """Yield one row per key, in the order of measurement."""
    for key in _keys(each.varying for pair in pairs for each in (pair.before, pair.after)):
        yield _varying_row(key, [(pair.before.varying.get(key), pair.after.varying.get(key)) for pair in pairs])
    for key in _keys(each.exact for pair in pairs for each in (pair.before, pair.after)):
        yield _exact_row(key, [(pair.before.exact.get(key), pair.after.exact.get(key)) for pair in pairs])


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the median: the k-th lowest and the k-th highest value, for the largest possible k.

    The true median is below the k-th lowest of n values exactly if fewer than k values are below the median. Each
    value is below it with probability 1/2, so the number of those has a binomial distribution.

    Returns:
        None for fewer than six values: even the lowest and the highest enclose the median with less than 95 %.
    """
    count = len(values)
    outside, cumulated = 0, 0
    while (cumulated + math.comb(count, outside)) / 2**count <= TAIL:
        cumulated += math.comb(count, outside)
        outside += 1
    if not outside:
        return None
    ordered = sorted(values)
    return ordered[outside - 1], ordered[-outside]


def verdict_of(ratio: float, interval: tuple[float, float] | None) -> Verdict:
    """Return the verdict on a key: it holds if the median is at least 0.97 or the interval contains 1."""
    if ratio >= RATIO_MIN:
        return "holds"
    if interval is None:
        return "undecided"
    low, high = interval
    return "holds" if low <= 1 <= high else "fell"


def _varying_row(key: str, values: Sequence[tuple[float | None, float | None]]) -> Row:
    both = [(before, after) for before, after in values if before is not None and after is not None]
    if not both:
        return _one_sided_row(key, values)
    ratios = [before / after for before, after in both]
    ratio, interval = statistics.median(ratios), median_interval(ratios)
    return Row(
        key=key,
        rounds=len(both),
        before=statistics.median(before for before, _ in both),
        after=statistics.median(after for _, after in both),
        ratio=ratio,
        interval=interval,
        verdict=verdict_of(ratio, interval),
    )


def _exact_row(key: str, values: Sequence[tuple[float | None, float | None]]) -> Row:
    both = [(before, after) for before, after in values if before is not None and after is not None]
    if not both:
        return _one_sided_row(key, values)
    # Show the first round that differs, if one does.
    shown = next(((before, after) for before, after in both if before != after), both[0])
    verdict: Verdict = "equal" if shown[0] == shown[1] else "differs"
    return Row(key=key, rounds=len(both), before=shown[0], after=shown[1], verdict=verdict)


def _one_sided_row(key: str, values: Sequence[tuple[float | None, float | None]]) -> Row:
    before = [value for value, _ in values if value is not None]
    after = [value for _, value in values if value is not None]
    return Row(
        key=key,
        rounds=0,
        before=statistics.median(before) if before else None,
        after=statistics.median(after) if after else None,
        verdict="missing" if before else "new",
    )


def _keys(amounts: Iterator[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(key for each in amounts for key in each))
