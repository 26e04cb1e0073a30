"""What saves teach later ones, played against stores whose bandwidth is written down."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.types.coding import Coded, Kind, Measured, Rates
from holdfast.core.plan.coding.choice import Amounts, KindsChoice, SaveModel
from holdfast.core.plan.coding.coding_rates import RAW_SAVES, CodingRates, codings_of, rates_of, slow_kind

WEIGHTS, MASTERS, MOMENTS = Kind("bfloat16", "parameter"), Kind("float32", "master"), Kind("float32", "exp_avg")
RATES = {WEIGHTS: Rates(1.5, 700e6), MASTERS: Rates(2.0, 1600e6), MOMENTS: Rates(1.2, 750e6)}
STATE = Amounts({WEIGHTS: 200 << 20, MASTERS: 400 << 20, MOMENTS: 400 << 20}, 1 << 20)


def coded_at(rates: Rates, raw_bytes: int, stretch: float = 1.0) -> Coded:
    seconds = raw_bytes / rates.bytes_per_second
    return Coded(raw_bytes, round(raw_bytes / rates.ratio), seconds, stretch * seconds, {"planes": raw_bytes})


def saved(
    choice: KindsChoice, bytes_per_second: float, *, slowdown: float = 1.0, truth: Mapping[Kind, Rates] = RATES
) -> Measured:
    """Return what a save measures that takes as long as the model says, or longer by a factor."""
    coded = {kind: coded_at(truth[kind], STATE.kinds[kind]) for kind in choice.coded}
    written_bytes = STATE.bytes - sum(each.raw_bytes - each.stored_bytes for each in coded.values())
    seconds = SaveModel(truth, bytes_per_second, 1).seconds(STATE, choice.coded) * slowdown
    left = STATE.kinds.keys() - choice.coded
    return Measured(
        seconds=seconds,
        written_bytes=written_bytes,
        write_seconds=written_bytes / bytes_per_second,
        processor_seconds=0.3,
        coded=coded,
        probed={kind: coded_at(truth[kind], 1 << 20) for kind in left},
    )


def played(
    bandwidths: Sequence[float], knowledge: CodingRates | None = None, *, slow_saves: Collection[int] = ()
) -> tuple[list[KindsChoice], CodingRates]:
    """Return the choices of saves at given bandwidths, and what is known after them."""
    knowledge, choices = knowledge or CodingRates(), []
    for number, bandwidth in enumerate(bandwidths):
        knowledge, choice = knowledge.begun(STATE, "auto")
        measured = saved(choice, bandwidth, slowdown=2.5 if number in slow_saves else 1.0)
        knowledge = knowledge.ended(choice, measured, "auto")
        choices.append(choice)
    return choices, knowledge


def test_the_first_save_is_raw_and_the_second_knows_the_store() -> None:
    choices, knowledge = played([0.1e9, 0.1e9])
    assert not choices[0].coded
    assert choices[1].coded == STATE.kinds.keys()
    assert knowledge.store_bytes_per_second is not None and abs(knowledge.store_bytes_per_second / 0.1e9 - 1) < 1e-6


@given(st.lists(st.sampled_from([0.05e9, 0.2e9, 0.5e9, 2e9, 8e9]), min_size=1, max_size=6))
def test_decisions_follow_a_store_within_two_saves(levels: list[float]) -> None:
    """Bandwidth rises and falls in steps, and stays for three saves on each: the third one is as if it always had."""
    choices, _ = played([level for level in levels for _ in range(3)])
    for number, level in enumerate(levels):
        settled, _ = played([level] * 3)
        assert choices[3 * number + 2].coded == settled[2].coded, f"level {number}"


@given(st.floats(2e7, 5e9), st.lists(st.floats(1.0, 1.099), min_size=3, max_size=30))
def test_no_flapping_while_bandwidth_wavers_by_less_than_a_tenth(lowest: float, wavers: list[float]) -> None:
    choices, _ = played([lowest * waver for waver in wavers])
    past: list[frozenset[Kind]] = []
    for choice in choices[1:]:
        if not past or past[-1] != choice.coded:
            assert choice.coded not in past, "it came back"
            past.append(choice.coded)


@given(st.lists(st.floats(1e7, 1e10), min_size=1, max_size=20), st.sets(st.integers(0, 19)))
def test_no_save_is_ever_predicted_to_be_slower_than_raw(bandwidths: list[float], slow_saves: set[int]) -> None:
    choices, _ = played(bandwidths, slow_saves=slow_saves)
    for choice in choices[1:]:
        assert choice.model is not None
        seconds = choice.predicted_seconds(STATE)
        assert seconds is not None and seconds <= choice.model.seconds(STATE, ())


def test_after_a_coded_save_slower_than_raw_its_slowest_kind_stays_raw_for_ten_saves() -> None:
    choices, knowledge = played([0.3e9] * 3, slow_saves=[2])
    assert choices[2].coded == STATE.kinds.keys()
    assert knowledge.withheld == {MOMENTS: RAW_SAVES}, "it saves the fewest bytes in a processor second"
    later, _ = played([0.3e9] * 11, knowledge)
    assert [MOMENTS in choice.coded for choice in later] == [False] * RAW_SAVES + [True]
    assert all({WEIGHTS, MASTERS} <= choice.coded for choice in later)
    assert later[0].decisions[MOMENTS].why.endswith("it stays raw for 10 saves")


def test_a_store_that_becomes_slow_is_no_reason_to_code_less() -> None:
    """A coded save takes longer than a raw one would have at the old bandwidth. At the new one it is the faster one."""
    choices, knowledge = played([0.3e9, 0.3e9, 0.05e9, 0.05e9])
    assert not knowledge.withheld
    assert choices[3].coded == STATE.kinds.keys()


def test_a_store_that_waits_for_the_coding_threads_is_not_taken_for_slower() -> None:
    coded = coded_at(RATES[MASTERS], 400 << 20)
    idle = Measured(1.0, 200 << 20, 0.5, 0.1, {MASTERS: coded}, {})
    busy = Measured(1.0, 200 << 20, 0.95, 0.1, {MASTERS: coded}, {})
    raw = Measured(1.0, 200 << 20, 0.5, 0.1, {}, {})
    knowledge = CodingRates(RATES, 2e9)
    choice = KindsChoice({})
    assert knowledge.ended(choice, idle, "auto").store_bytes_per_second == 2e9
    assert knowledge.ended(choice, busy, "auto").store_bytes_per_second == (200 << 20) / 0.95
    assert knowledge.ended(choice, raw, "auto").store_bytes_per_second == (200 << 20) / 0.5


def test_threads_that_wait_for_processors_code_less_until_that_is_forgotten() -> None:
    """One save in which coding took 2.5 times its processor time makes the next ones raw; later one tries again."""
    knowledge, choice = CodingRates(RATES, 0.5e9).begun(STATE, "auto")
    assert choice.coded == STATE.kinds.keys()
    seconds = 2.5 * sum(STATE.kinds[kind] / RATES[kind].bytes_per_second for kind in choice.coded)
    coded = {kind: coded_at(RATES[kind], STATE.kinds[kind], 2.5) for kind in choice.coded}
    written_bytes = STATE.bytes - sum(each.raw_bytes - each.stored_bytes for each in coded.values())
    measured = Measured(seconds, written_bytes, written_bytes / 0.5e9, 3.0, coded, {})
    knowledge = knowledge.ended(choice, measured, "auto")
    assert abs(knowledge.stretch - 2.5) < 1e-9
    later, _ = played([0.5e9] * 14, knowledge)
    assert not later[0].coded & {WEIGHTS, MOMENTS}
    assert later[-1].coded == STATE.kinds.keys()


def test_the_guard_compares_with_raw_at_the_bandwidth_of_the_save() -> None:
    coded = {WEIGHTS: Coded(200, 100, 1.0), MOMENTS: Coded(200, 150, 1.0)}
    measured = Measured(4.0, 250, 2.5, 1.0, coded, {})
    assert slow_kind(measured, 100) is None, "raw: 400 bytes in 4.0 s"
    assert slow_kind(measured, 104) == MOMENTS, "raw: in 3.85 s"
    assert slow_kind(Measured(4.0, 250, 2.5, 1.0, {}, coded), 1000) is None, "nothing was coded"


def test_measuring_takes_half_a_percent_of_the_processor_time_of_saves() -> None:
    knowledge = CodingRates(RATES, 5e9)
    raw = Measured(1.0, 5 << 30, 1.0, 2.0, {}, {})
    knowledge = knowledge.ended(KindsChoice({}), raw, "auto")
    assert knowledge.probe_seconds == 0.01
    probe = Measured(1.0, 5 << 30, 1.0, 2.0, {}, {WEIGHTS: Coded(1 << 20, 1 << 19, 0.007)}, 0.015)
    assert abs(knowledge.ended(KindsChoice({}), probe, "auto").probe_seconds - 0.005) < 1e-12
    for _ in range(1000):
        knowledge = knowledge.ended(KindsChoice({}), raw, "auto")
    assert knowledge.probe_seconds == 64 * 0.01, "idle hours save up no burst"


def test_a_sample_counts_half_and_a_save_whole() -> None:
    knowledge = CodingRates({WEIGHTS: Rates(1.5, 100.0)}, 1e9)
    sample = Measured(1.0, 100, 1.0, 1.0, {}, {WEIGHTS: Coded(100, 100, 0.5), MOMENTS: Coded(100, 50, 0.5)})
    assert knowledge.ended(KindsChoice({}), sample, "auto").rates == {
        WEIGHTS: Rates(1.25, 150.0),
        MOMENTS: Rates(2.0, 200.0),
    }
    whole = Measured(1.0, 100, 1.0, 1.0, {WEIGHTS: Coded(100, 80, 1.0)}, {})
    assert knowledge.ended(KindsChoice({}), whole, "auto").rates[WEIGHTS] == Rates(1.25, 100.0)
    assert rates_of(Coded(0, 0, 0.0)) is None


def test_the_rows_of_a_report_say_what_the_packs_hold() -> None:
    knowledge, choice = CodingRates(RATES, 0.1e9).begun(STATE, "auto")
    measured = saved(choice, 0.1e9)
    rows = codings_of(knowledge.ended(choice, measured, "auto"), choice, STATE, measured)
    assert [row.kind for row in rows] == ["float32 exp_avg", "float32 master", "bfloat16 parameter"]
    by_kind = {row.kind: row for row in rows}
    master = by_kind["float32 master"]
    assert (master.codec, master.raw_bytes, master.stored_bytes, master.ratio) == ("planes", 400 << 20, 200 << 20, 2.0)
    assert master.predicted_seconds == master.found_seconds == choice.predicted_seconds(STATE)
    assert master.store_bytes_per_second is not None and abs(master.store_bytes_per_second - 0.1e9) < 1
    raw_knowledge, raw_choice = CodingRates(RATES, 90e9).begun(STATE, "auto")
    raw = saved(raw_choice, 90e9)
    (row, *_) = codings_of(raw_knowledge, raw_choice, STATE, raw)
    assert (row.codec, row.stored_bytes, row.ratio) == ("", row.raw_bytes, 1.2), "the ratio that coding would have"


def test_on_tries_every_kind_and_leaves_out_what_does_not_shrink() -> None:
    knowledge, choice = CodingRates().begun(STATE, "on")
    assert choice.coded == STATE.kinds.keys()
    truth = {**RATES, MOMENTS: Rates(1.01, 750e6)}
    knowledge = knowledge.ended(choice, saved(choice, 50e9, truth=truth, slowdown=9), "on")
    assert not knowledge.withheld, "size comes first"
    knowledge, choice = knowledge.begun(STATE, "on")
    assert choice.coded == {WEIGHTS, MASTERS}


def test_the_first_raw_save_samples_one_chunk_in_64_of_each_kind() -> None:
    knowledge, choice = CodingRates().begun(STATE, "auto")
    samplings = knowledge.samplings(choice, STATE, 1 << 20)
    assert {kind: each.count for kind, each in samplings.items()} == {WEIGHTS: 4, MASTERS: 7, MOMENTS: 7}
    assert {(each.first_bytes, each.every_bytes) for each in samplings.values()} == {(0, 64 << 20)}


def test_later_raw_saves_sample_in_turn_what_they_have_time_for() -> None:
    chunk = 1 << 20
    cost = max(chunk / rates.bytes_per_second for rates in RATES.values())
    knowledge = CodingRates(
        RATES, 5e9, probe_seconds=4.4 * cost, measured_at={WEIGHTS: 3, MASTERS: 1, MOMENTS: 2}, saves=3
    )
    knowledge, choice = knowledge.begun(STATE, "auto")
    assert not choice.coded
    assert list(knowledge.samplings(choice, STATE, chunk)) == [MASTERS, MOMENTS], "longest ago first"
    poor = CodingRates(RATES, 5e9, probe_seconds=1.9 * cost)
    assert not poor.samplings(choice, STATE, chunk)
    firsts = {
        CodingRates(RATES, 5e9, probe_seconds=1, saves=n).samplings(choice, STATE, chunk)[WEIGHTS].first_bytes
        for n in range(9)
    }
    assert len(firsts) == 9 and max(firsts) < STATE.kinds[WEIGHTS]


def test_coded_kinds_are_not_sampled() -> None:
    knowledge, choice = CodingRates(RATES, 0.1e9, probe_seconds=1.0).begun(STATE, "auto")
    assert choice.coded and not knowledge.samplings(choice, STATE, 1 << 20)
