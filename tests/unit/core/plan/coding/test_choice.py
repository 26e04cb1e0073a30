"""What a save codes: never what is predicted to be slower than raw, and the same while bandwidth wavers."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.types.coding import Kind, Rates
from holdfast.core.plan.coding.choice import Amounts, KindsChoice, SaveModel, chosen, chosen_for_size

WEIGHTS, MASTERS = Kind("bfloat16", "parameter"), Kind("float32", "master")
FIRST, SECOND = Kind("float32", "exp_avg"), Kind("float32", "exp_avg_sq")
KINDS = (WEIGHTS, MASTERS, FIRST, SECOND, Kind("uint8", "state1"), Kind("int64", "buffer"))

RATES = {
    WEIGHTS: Rates(1.5, 715e6),
    MASTERS: Rates(2.0, 1640e6),
    FIRST: Rates(1.2, 780e6),
    SECOND: Rates(1.26, 780e6),
}
"""As measured on a training state (`docs/compression.md`)."""

STATE = Amounts({WEIGHTS: 2 << 20, MASTERS: 4 << 20, FIRST: 4 << 20, SECOND: 4 << 20}, 1 << 10)

rates = st.builds(Rates, st.floats(0.98, 20), st.floats(1e6, 1e10))
models = st.builds(
    SaveModel, st.dictionaries(st.sampled_from(KINDS), rates), st.floats(1e6, 1e11), st.floats(0.05, 1.0)
)
amounts = st.builds(Amounts, st.dictionaries(st.sampled_from(KINDS), st.integers(0, 1 << 40)), st.integers(0, 1 << 30))


def at(bytes_per_second: float, processor_share: float = 1.0) -> SaveModel:
    return SaveModel(RATES, bytes_per_second, processor_share)


@given(amounts, models, st.lists(st.tuples(amounts, models), max_size=3))
def test_the_predicted_time_never_exceeds_that_of_a_raw_save(
    now: Amounts, model: SaveModel, earlier: list[tuple[Amounts, SaveModel]]
) -> None:
    choice = None
    for each, known in [*earlier, (now, model)]:
        choice = chosen(each, known, choice)
    assert choice is not None
    seconds = choice.predicted_seconds(now)
    assert seconds is not None and seconds <= model.seconds(now, ())
    assert choice.decisions.keys() == now.kinds.keys()


@given(amounts, models)
def test_the_order_of_kinds_changes_no_digit_of_a_prediction(now: Amounts, model: SaveModel) -> None:
    """Sets of kinds are walked in another order in every process."""
    known = [kind for kind in now.kinds if kind in model.rates][:4]
    assert len({model.seconds(now, order) for order in permutations(known)}) == 1


@given(amounts, models)
def test_a_fresh_choice_codes_only_for_a_gain_of_three_percent(now: Amounts, model: SaveModel) -> None:
    choice = chosen(now, model, None)
    if choice.coded:
        assert model.seconds(now, choice.coded) < 0.97 * model.seconds(now, ())


@given(amounts, models)
def test_no_choice_beats_the_ideal_time(now: Amounts, model: SaveModel) -> None:
    ideal = model.ideal_seconds(now, now.kinds)
    known = [kind for kind in now.kinds if kind in model.rates]
    for count in range(len(known) + 1):
        for some in combinations(known, count):
            assert model.seconds(now, some) >= ideal * (1 - 1e-9)


@settings(max_examples=40)
@given(amounts, models)
def test_kinds_cut_into_crumbs_take_the_ideal_time(now: Amounts, model: SaveModel) -> None:
    """The greedy choice is the exact solution of the fractional knapsack, up to one crumb."""
    known = [kind for kind in now.kinds if kind in model.rates and model.keeps_up(kind)]
    ideal = model.ideal_seconds(now, known)
    rates_of_crumbs = {Kind(kind.dtype, f"{kind.name}{n}"): model.rates[kind] for kind in known for n in range(50)}
    crumbs = {Kind(kind.dtype, f"{kind.name}{n}"): now.kinds[kind] // 50 for kind in known for n in range(50)}
    cut = Amounts(crumbs, now.bytes - sum(crumbs.values()))
    fine = SaveModel(rates_of_crumbs, model.store_bytes_per_second, model.processor_share)
    one_crumb = max((fine.coding_seconds(kind, count) for kind, count in crumbs.items()), default=0.0)
    rounding = 50 * len(known) / min(model.store_bytes_per_second, 1e6)
    bound = (ideal + one_crumb + rounding) * (1 + 1e-9)
    coded = chosen(cut, fine, None).coded
    assert fine.seconds(cut, coded) <= (bound if coded else bound / 0.97)


def test_a_slow_store_codes_all_and_a_fast_one_nothing() -> None:
    assert chosen(STATE, at(0.1e9), None).coded == RATES.keys()
    assert not chosen(STATE, at(5e9), None).coded
    assert chosen(STATE, at(1.2e9), None).coded == {MASTERS}, "the only kind that a thread codes so fast"


def test_a_thread_that_waits_for_a_processor_codes_at_a_slower_store() -> None:
    assert chosen(STATE, at(1.2e9), None).coded
    assert not chosen(STATE, at(1.2e9, processor_share=0.5), None).coded
    assert chosen(STATE, at(0.5e9, processor_share=0.5), None).coded


def test_the_first_save_is_raw_and_says_why() -> None:
    choice = chosen(STATE, None, None)
    assert not choice.coded and choice.predicted_seconds(STATE) is None
    assert {decision.why for decision in choice.decisions.values()} == {
        "nothing is measured yet: the first save is raw"
    }


def test_every_decision_has_a_reason() -> None:
    unmeasured = Kind("uint8", "state1")
    choice = chosen(Amounts({**STATE.kinds, unmeasured: 1 << 20}), at(0.1e9), None, {SECOND: 7})
    coded = "the save is predicted to take 78% of its time raw"
    assert {kind: decision.why for kind, decision in choice.decisions.items()} == {
        WEIGHTS: coded,
        MASTERS: coded,
        FIRST: coded,
        SECOND: "a save that coded it took longer than raw: it stays raw for 7 saves",
        unmeasured: "it is not measured yet",
    }
    assert chosen(STATE, at(1.2e9), None).decisions[WEIGHTS].why == "the store takes it raw faster than it can be coded"
    few = Amounts({MASTERS: 1 << 10}, 1 << 30)
    assert chosen(few, at(1e9), None).decisions[MASTERS].why == "coding is predicted to save less than 3 % of the time"


@given(st.floats(1e7, 1e10), st.floats(0.1, 1.0), st.lists(st.floats(1.0, 1.0999), min_size=2, max_size=40))
def test_bandwidth_that_wavers_by_less_than_a_tenth_brings_nothing_back(
    lowest: float, processor_share: float, wavers: list[float]
) -> None:
    """The choice may get away from one that became slower than raw; it never returns."""
    choice: KindsChoice | None = None
    past: list[frozenset[Kind]] = []
    for waver in wavers:
        choice = chosen(STATE, at(lowest * waver, processor_share), choice)
        if not past or past[-1] != choice.coded:
            assert choice.coded not in past
            past.append(choice.coded)
    assert len(past) <= 3


@given(st.floats(1e7, 1e10), st.floats(1.12, 50))
def test_a_choice_follows_bandwidth_that_changes_for_good(before: float, factor: float) -> None:
    choice = chosen(STATE, at(before), None)
    faster = chosen(STATE, at(before * factor), choice)
    assert faster.coded == chosen(STATE, at(before * factor), None).coded
    back = chosen(STATE, at(before), faster)
    assert back.coded == choice.coded


def test_kinds_that_are_withheld_stay_raw_and_come_back() -> None:
    choice = chosen(STATE, at(0.1e9), None)
    without = chosen(STATE, at(0.1e9), choice, {FIRST: 10})
    assert without.coded == choice.coded - {FIRST}
    assert chosen(STATE, at(0.1e9), without).coded == choice.coded


@pytest.mark.parametrize(("ratio", "is_coded"), [(1.04, False), (1.0527, True), (1.5, True)])
def test_on_codes_whatever_shrinks_by_five_percent(ratio: float, is_coded: bool) -> None:
    model = SaveModel({FIRST: Rates(ratio, 1e6)}, 1e12, 1)
    choice = chosen_for_size(STATE, model)
    assert choice.decisions[FIRST].is_coded is is_coded
    assert choice.coded >= {WEIGHTS, MASTERS, SECOND}, "what nobody has measured is tried"
    assert chosen_for_size(STATE, None).coded == STATE.kinds.keys()
