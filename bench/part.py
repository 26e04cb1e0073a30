"""A part of the bench: one question, measured in its own processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Entry = TypeVar("Entry")

Round = dict[str, float]
"""What one round measured, by contender: seconds, or what the part says."""

Params = dict[str, int]
"""How large and how often; `rivals` 0 leaves out rivals and limits."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of a key over the rounds."""

    median: float
    """The middle of the rounds."""

    low: float
    """The lowest round."""

    high: float
    """The highest round."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of one part."""

    rounds: list[Round]
    """One entry a round; not every contender is in every round."""

    notes: list[str]
    """What could not run, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One question of the bench."""

    name: str
    """What `--only` calls it."""

    question: str
    """What it asks."""

    ranks: int
    """Processes it runs in; more than one are a gloo job."""

    full: Params
    """Sizes and counts of the full bench."""

    quick: Params
    """The same with QUICK=1."""

    measure: Callable[[Path, Params], Measured]
    """Runs on every rank; what rank 0 returns counts."""

    keys: Callable[[Sequence[Round], Params], dict[str, Spread]]
    """What the rounds say."""

    devices: tuple[str, ...] = ("cpu",)
    """Where its states may lie."""

    values: Callable[[Sequence[Round], Params], dict[str, list[float]]] | None = None
    """What each round says by itself, by key; for the 95 % interval of a median. None: no interval is stated."""


def spread_of(values: Sequence[float]) -> Spread:
    """Return median, lowest and highest."""
    return Spread(statistics.median(values), min(values), max(values))


def spreads_of(values: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """Return median, lowest and highest of each key."""
    return {key: spread_of(each) for key, each in values.items()}


def times_as_fast(rounds: Sequence[Round], ours: str, theirs: Sequence[str]) -> Spread:
    """Return how many times faster ours was than the best of theirs, round by round."""
    return spread_of([min(each[name] for name in theirs) / each[ours] for each in _complete(rounds, ours, theirs)])


def share_of(rounds: Sequence[Round], ours: str, theirs: Sequence[str]) -> Spread:
    """Return how many times as long ours took as the best of theirs, round by round."""
    return spread_of([each[ours] / min(each[name] for name in theirs) for each in _complete(rounds, ours, theirs)])


def present(rounds: Sequence[Round], *names: str) -> bool:
    """Return whether some round measured all of these contenders."""
    return any(all(name in each for name in names) for each in rounds)


def with_rivals(params: Params) -> bool:
    """Return whether rivals and limits are measured beside Holdfast. They are, unless the parameters exclude them."""
    return bool(params.get("rivals", 1))


def contenders(rounds: Sequence[Round], prefix: str) -> list[str]:
    """Return the names that begin with a prefix, in order of appearance."""
    return list(dict.fromkeys(name for each in rounds for name in each if name.startswith(prefix)))


def slowest_tenth(seconds: Sequence[float]) -> float:
    """Return the seconds that a tenth of the saves exceeds."""
    return statistics.quantiles(seconds, n=10, method="inclusive")[-1]


def slowest_tenths_ratio(rounds: Sequence[Round], ours: str, theirs: Sequence[str]) -> Spread:
    """Return the slowest tenth of theirs over the slowest tenth of ours, theirs being the one that does best by that.

    Lowest and highest are what the same ratio becomes when any one round is left out.
    """
    complete = _complete(rounds, ours, theirs)

    def ratio(chosen: Sequence[Round]) -> float:
        best = min(slowest_tenth([each[name] for each in chosen]) for name in theirs)
        return best / slowest_tenth([each[ours] for each in chosen])

    whole = ratio(complete)
    if len(complete) < 3:
        return Spread(whole, whole, whole)
    left_out = [ratio([*complete[:n], *complete[n + 1 :]]) for n in range(len(complete))]
    return Spread(whole, min(left_out), max(left_out))


def in_turn(entries: Sequence[Entry], number: int) -> list[Entry]:
    """Return the contenders in the order of one round. Each one is first as often as last."""
    shift = number // 2 % len(entries)
    turned = [*entries[shift:], *entries[:shift]]
    return turned if number % 2 == 0 else turned[::-1]


def _complete(rounds: Sequence[Round], ours: str, theirs: Sequence[str]) -> list[Round]:
    return [each for each in rounds if ours in each and all(name in each for name in theirs)]
