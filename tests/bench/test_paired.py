"""What the rounds of two checkouts say: ratios by pair, an interval without assumptions, one rule for every key."""

from __future__ import annotations

import math
import random

import pytest

from bench.paired import Amounts, Pair, median_interval, rows_of, verdict_of


def pairs(key: str, *values: tuple[float, float]) -> list[Pair]:
    return [Pair(Amounts({key: before}, {}), Amounts({key: after}, {})) for before, after in values]


def exact_pairs(key: str, *values: tuple[float, float]) -> list[Pair]:
    return [Pair(Amounts({}, {key: before}), Amounts({}, {key: after})) for before, after in values]


@pytest.mark.parametrize(
    ("count", "left_out"),
    [(6, 0), (7, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5), (100, 39)],
)
def test_the_interval_is_that_of_the_sign_test(count: int, left_out: int) -> None:
    values = [float(number) for number in range(count)]
    random.Random(3).shuffle(values)
    assert median_interval(values) == (left_out, count - 1 - left_out)
    outside = 2 * sum(math.comb(count, few) for few in range(left_out + 1)) / 2**count
    assert outside <= 0.05
    one_more = 2 * sum(math.comb(count, few) for few in range(left_out + 2)) / 2**count
    assert one_more > 0.05, "no narrower interval has 95 %"


@pytest.mark.parametrize("count", range(1, 6))
def test_fewer_than_six_rounds_have_no_interval(count: int) -> None:
    assert median_interval([1.0] * count) is None


def test_the_interval_holds_the_median_of_a_skewed_distribution_as_often_as_promised() -> None:
    chance = random.Random(11)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([chance.expovariate(1.0) for _ in range(7)]) or (0.0, 0.0)
        hits += low <= math.log(2) <= high
    assert hits / 2000 > 0.97, "exactly 98.4 %"


@pytest.mark.parametrize(
    ("ratio", "interval", "verdict"),
    [
        (1.2, (1.1, 1.3), "holds"),
        (0.97, (0.9, 0.99), "holds"),
        (0.969, (0.9, 0.999), "fell"),
        (0.9, (0.8, 1.0), "holds"),
        (0.5, (0.3, 1.2), "holds"),
        (0.99, None, "holds"),
        (0.9, None, "undecided"),
    ],
)
def test_a_key_falls_below_the_margin_unless_its_interval_contains_1(
    ratio: float, interval: tuple[float, float] | None, verdict: str
) -> None:
    assert verdict_of(ratio, interval) == verdict


def test_a_ratio_is_taken_round_by_round_and_more_is_better_for_after() -> None:
    # The machine slows down by ten from round to round, both sides alike; AFTER always takes half of the time.
    (row,) = rows_of(pairs("save_seconds", *((2.0 * 10**n, 1.0 * 10**n) for n in range(7))))
    assert (row.ratio, row.interval, row.verdict, row.rounds) == (2.0, (2.0, 2.0), "holds", 7)
    assert (row.before, row.after) == (2000.0, 1000.0)
    (row,) = rows_of(pairs("save_seconds", *((1.0, 1.1) for _ in range(7))))
    assert row.verdict == "fell"
    (row,) = rows_of(pairs("save_seconds", *((1.0, 1.1) for _ in range(6)), (1.0, 0.99)))
    assert row.verdict == "holds", "one round of seven speaks against it"


def test_exact_amounts_must_be_equal_in_every_round() -> None:
    (row,) = rows_of(exact_pairs("index_bytes", (7, 7), (7, 7)))
    assert (row.verdict, row.before, row.after, row.ratio) == ("equal", 7, 7, None)
    (row,) = rows_of(exact_pairs("index_bytes", (7, 7), (7, 6), (7, 7)))
    assert (row.verdict, row.before, row.after) == ("differs", 7, 6)


def test_a_key_of_one_side_alone_is_named() -> None:
    one_sided = [Pair(Amounts({"gone_seconds": 1.0}, {"gone_bytes": 3}), Amounts({"new_seconds": 2.0}, {}))]
    rows = {row.key: row for row in rows_of(one_sided)}
    assert {key: row.verdict for key, row in rows.items()} == {
        "gone_seconds": "missing",
        "new_seconds": "new",
        "gone_bytes": "missing",
    }
    assert (rows["gone_seconds"].before, rows["gone_seconds"].after) == (1.0, None)
