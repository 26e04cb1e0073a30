"""The order of samples, shares of a step, positions and quotas: pure arithmetic."""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.sampling.mixture import PERIOD, MixedOrder, Quotas
from holdfast.base.sampling.order import BLOCK, Order, Shuffle
from holdfast.base.sampling.position import DataPosition, Epochs, Tail
from holdfast.base.sampling.shares import has_repeats, micro_batches
from holdfast.errors import InvalidError

SHUFFLES: tuple[Shuffle, ...] = ("full", "blocks", False)
TAILS: tuple[Tail, ...] = ("short", "drop", "carry")


def order_of(n: int, shuffle: Shuffle = "full", *, seed: int = 7, epoch: int = 2) -> np.ndarray:
    return Order(n, seed, shuffle).at(epoch, np.arange(n))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_every_small_order_is_a_bijection(shuffle: Shuffle) -> None:
    for n in (*range(1, 2001), BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 17):
        assert np.array_equal(np.sort(order_of(n, shuffle)), np.arange(n)), n


@given(st.integers(2, 10**12), st.sampled_from(SHUFFLES), st.integers(), st.integers(0, 10**6), st.data())
def test_places_of_large_orders_have_samples_of_their_own(
    n: int, shuffle: Shuffle, seed: int, epoch: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, n - 1))
    places = np.arange(first, min(n, first + 3000))
    samples = Order(n, seed, shuffle).at(epoch, places)
    assert len(np.unique(samples)) == len(places)
    assert samples.min() >= 0 and samples.max() < n
    asked_alone = Order(n, seed, shuffle).at(epoch, places[-1:])
    assert asked_alone == samples[-1:]


GOLDEN = {
    ("full", 10): [0, 1, 7, 3, 2, 4, 9, 6, 5, 8],
    ("full", 10**12): [735522800762, 129201307380, 371194540691, 806782618468, 562625650528],
    ("blocks", 10): [8, 9, 5, 1, 0, 2, 7, 4, 3, 6],
    ("blocks", 10**12): [890081901544, 929205938556, 183090017697, 246199119937, 716830379552],
}


@pytest.mark.parametrize(("shuffle", "n"), GOLDEN)
def test_orders_never_change(shuffle: Shuffle, n: int) -> None:
    """A run that resumes under another version or platform goes on in the same order."""
    places = np.arange(10) if n == 10 else np.arange(5) * 10**11
    assert Order(n, 7, shuffle).at(2, places).tolist() == GOLDEN[shuffle, n]


def test_orders_are_as_random_as_permutations_of_numpy() -> None:
    n, bins, epochs = 4000, 20, 40
    drawn = np.random.default_rng(1)

    def statistics(orders: list[np.ndarray]) -> tuple[float, float]:
        table = sum(np.histogram2d(np.arange(n), each, bins)[0] for each in orders)
        expected = n * epochs / bins**2
        correlations = [np.corrcoef(each[:-1], each[1:])[0, 1] for each in orders]
        return float(((table - expected) ** 2 / expected).sum()), float(np.abs(np.mean(correlations)))

    ours = statistics([order_of(n, epoch=epoch) for epoch in range(epochs)])
    numpys = [statistics([drawn.permutation(n) for _ in range(epochs)]) for _ in range(20)]
    spread = np.std([each[0] for each in numpys])
    assert abs(ours[0] - np.mean([each[0] for each in numpys])) < 4 * spread
    assert ours[1] < 4 / np.sqrt(n * epochs)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [order_of(1000, seed=seed, epoch=epoch) for seed in range(5) for epoch in range(5)]
    equal = [int((one == other).sum()) for number, one in enumerate(orders) for other in orders[:number]]
    assert max(equal) < 12  # About one place in a thousand is equal by chance.


def test_blocks_keep_neighbours_near_each_other() -> None:
    n = 20 * BLOCK + 99
    places = order_of(n, "blocks")
    for start in range(0, n, BLOCK):
        inside = places[start : start + BLOCK]
        gap = np.minimum((inside - inside[0]) % n, (inside[0] - inside) % n)
        assert gap.max() < BLOCK
    lasts = {int(order_of(n, "blocks", epoch=epoch)[-1]) // BLOCK for epoch in range(10)}
    assert len(lasts) > 3, "other samples come last in each epoch"


def test_places_of_a_large_order_take_the_memory_of_a_block() -> None:
    order = Order(10**9, 1)
    tracemalloc.start()
    order.at(0, np.arange(5 * 10**8, 5 * 10**8 + 1024))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 40))
def test_shares_cover_a_step_and_differ_by_one_sample(size: int, ranks: int, micro_batch: int) -> None:
    shares = [micro_batches(size, ranks, rank, micro_batch) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    parts = [part for share in shares for part in share]
    counted = [place for part in parts if not part.is_repeat for place in range(part.start, part.stop)]
    assert counted == list(range(size))
    lengths = [sum(part.stop - part.start for part in share if not part.is_repeat) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    for part in parts:
        assert 1 <= part.stop - part.start <= micro_batch
        assert part.start >= 0 and part.stop <= size
    assert any(part.is_repeat for part in parts) == has_repeats(size, ranks, micro_batch)


@given(st.integers(1, 60), st.integers(1, 90), st.sampled_from(TAILS))
def test_steps_of_many_epochs_leave_no_gap(n: int, global_batch: int, tail: Tail) -> None:
    if tail == "drop" and global_batch > n:
        with pytest.raises(InvalidError, match="would have no step"):
            Epochs(n, global_batch, tail)
        return
    epochs, position, counts = Epochs(n, global_batch, tail), DataPosition(), dict[int, int]()
    for number in range(40):
        before, position = position, epochs.settled(position)
        assert position.steps == number
        if tail == "drop" and position.epoch > before.epoch:
            assert n - before.samples < global_batch
        else:
            assert position.epoch * n + position.samples == before.epoch * n + before.samples
        counts[position.epoch] = counts.get(position.epoch, 0) + 1
        assert 1 <= epochs.size(position) <= global_batch
        position = epochs.after(position)
    for epoch in list(counts)[:-1]:
        assert counts[epoch] == epochs.steps_in_epoch(epoch)


WEIGHTS = st.lists(st.floats(0, 100), min_size=1, max_size=12).filter(lambda weights: sum(weights) > 0.01)


@settings(max_examples=20)
@given(WEIGHTS)
def test_every_source_is_within_one_sample_of_its_share(weights: list[float]) -> None:
    quotas = Quotas({0: weights})
    sources, numbers = quotas.sources(np.arange(PERIOD))
    totals = quotas.counts(PERIOD)
    assert np.abs(totals / PERIOD - np.array(weights) / sum(weights)).max() <= 1 / PERIOD
    for source, total in enumerate(totals):
        served = np.cumsum(sources == source)
        assert np.abs(served - np.arange(1, PERIOD + 1) * total / PERIOD).max(initial=0) < 1
        assert np.array_equal(numbers[sources == source], np.arange(total))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=3, unique=True), st.integers(0, 300_000))
def test_phases_change_weights_at_their_sample(starts: list[int], place: int) -> None:
    phases = {0: [1.0, 3.0]} | {start: [float(number + 2), 1.0] for number, start in enumerate(sorted(starts))}
    quotas = Quotas(phases)
    sources, numbers = quotas.sources(np.arange(place, place + 500))
    before = quotas.counts(place)
    for source in (0, 1):
        of_source = numbers[sources == source]
        assert np.array_equal(of_source, before[source] + np.arange(len(of_source)))
    assert quotas.counts(place + 500).sum() == place + 500
    for start, end in pairwise([*sorted(phases), 400_000]):
        share = (quotas.counts(end) - quotas.counts(start)) / (end - start)
        assert abs(share[0] - phases[start][0] / sum(phases[start])) <= 1 / (end - start) + 2 / PERIOD


def test_a_source_of_a_mixture_that_ends_begins_its_next_epoch() -> None:
    order = MixedOrder({"long": 700, "short": 30}, 500, Quotas({0: [0.5, 0.5]}), 3, "full")
    found = [order.samples(epoch, np.arange(500)) for epoch in range(4)]
    epochs, samples = (np.concatenate(each) for each in zip(*found, strict=True))
    short = samples[samples >= 700]
    assert len(short) == 1000
    for start in range(0, 990, 30):
        assert np.array_equal(np.sort(short[start : start + 30]), np.arange(700, 730))
    assert epochs[samples >= 700][-1] == 33
    assert order.served(2, 0) == {"long": 500, "short": 500}


BAD = [
    (lambda: Order(0, 1), r"n=0; expected"),
    (lambda: Order(-3, 1), r"n=-3; expected"),
    (lambda: Order((1 << 62) + 1, 1), r"from 1 to 2\^62"),
    (lambda: Order(1.5, 1), r"n=1.5"),  # type: ignore[arg-type]
    (lambda: Order(3, "x"), r"seed='x'"),  # type: ignore[arg-type]
    (lambda: Order(3, 1, "some"), r"shuffle='some'"),  # type: ignore[arg-type]
    (lambda: Order(3, 1, True), r"shuffle=True"),  # type: ignore[arg-type]
    (lambda: Epochs(3, 0), r"global_batch=0"),
    (lambda: Epochs(3, 1, "long"), r"tail='long'"),  # type: ignore[arg-type]
    (lambda: Quotas({0: [1, -1]}), r"none negative"),
    (lambda: Quotas({0: [1, float("nan")]}), r"finite"),
    (lambda: Quotas({0: [0, 0]}), r"not all 0"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidError, match=message):
        call()


def test_an_order_of_the_largest_size_is_asked_in_milliseconds() -> None:
    begun = time.process_time()
    samples = Order(1 << 62, 1).at(0, np.arange((1 << 62) - 1024, 1 << 62))
    assert len(np.unique(samples)) == 1024
    assert time.process_time() - begun < 1
