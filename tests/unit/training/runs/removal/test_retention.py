"""Which steps are kept: what each rule says, and what holds whatever the rules are."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline
from holdfast.errors import InvalidError
from holdfast.policies import AllOf, AnyOf, BestN, EveryNth, KeepPolicy, LatestN, NewestPer, Tagged
from holdfast.training.runs.removal import retention
from holdfast.training.runs.removal.retention import FORMER_KEPT, LAST_HEALTHY, NEWEST, NEWEST_OF_FORMER, KeptFacts

metrics = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(-3, 3).map(float))
times = st.one_of(
    st.tuples(st.integers(1, 3), st.integers(0, 23), st.integers(0, 59)).map(
        lambda at: f"2026-03-{at[0]:02d}T{at[1]:02d}:{at[2]:02d}:00+00:00"
    ),
    st.sampled_from(["", "yesterday", "1769900000"]),
)


def kept(policy: KeepPolicy | None, run: list[KeptFacts], newest: Timeline | None = None) -> dict[int, tuple[str, ...]]:
    """Return the reasons by step, for runs with one manifest a step."""
    return {step: why for (step, _), why in retention.kept(policy, run, newest).items()}


@st.composite
def runs(draw: st.DrawFn) -> list[KeptFacts]:
    """Steps of a run, of which every one has a loss."""
    steps = draw(st.lists(st.integers(0, 400), min_size=1, max_size=25, unique=True))
    looked_at = draw(st.booleans())
    return [
        KeptFacts(
            step,
            draw(times),
            {"loss": draw(metrics), **({"accuracy": draw(metrics)} if draw(st.booleans()) else {})},
            tuple(draw(st.lists(st.sampled_from(["release", "paper", "x"]), unique=True, max_size=2))),
            draw(st.sampled_from([None, True, False])) if looked_at else None,
        )
        for step in steps
    ]


rules = st.one_of(
    st.builds(LatestN, st.integers(1, 6)),
    st.builds(EveryNth, st.integers(1, 60), st.booleans()),
    st.builds(BestN, st.integers(1, 6), st.just("loss"), st.sampled_from(["min", "max"])),
    st.builds(NewestPer, st.sampled_from(["hour", "day"])),
    st.just(Tagged()),
)
policies = st.recursive(
    rules,
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(
        lambda several: st.sampled_from([AnyOf(*several), AllOf(*several)])
    ),
    max_leaves=6,
)


@given(policy=st.one_of(st.none(), policies), run=runs(), seed=st.integers(0, 9))
def test_whatever_the_policy_the_newest_is_kept_and_the_order_of_steps_says_nothing(
    policy: KeepPolicy | None, run: list[KeptFacts], seed: int
) -> None:
    found = kept(policy, run)
    newest = max(each.step for each in run)
    assert NEWEST in found[newest]
    assert list(found) == sorted(found) and found.keys() <= {each.step for each in run}
    assert all(found.values()), "each is kept for a reason"
    shuffled = list(run)
    random.Random(seed).shuffle(shuffled)
    assert kept(policy, shuffled) == found
    if policy is None:
        assert len(found) == len(run)


@given(policy=policies, run=runs())
def test_once_the_others_are_gone_the_same_steps_are_kept(policy: KeepPolicy, run: list[KeptFacts]) -> None:
    found = kept(policy, run)
    left = [each for each in run if each.step in found]
    assert kept(policy, left).keys() == found.keys()


@given(one=policies, other=policies, run=runs())
def test_any_of_keeps_what_either_keeps_and_all_of_what_both_do(
    one: KeepPolicy, other: KeepPolicy, run: list[KeptFacts]
) -> None:
    newest = {max(each.step for each in run)} | {step for step, why in kept(one, run).items() if LAST_HEALTHY in why}
    first, second = kept(one, run).keys(), kept(other, run).keys()
    assert kept(AnyOf(one, other), run).keys() == first | second
    # The newest and the last healthy one are kept whatever both say.
    assert kept(AllOf(one, other), run).keys() - newest == (first & second) - newest


@given(run=runs(), n=st.integers(1, 6), mode=st.sampled_from(["min", "max"]))
def test_the_best_are_better_than_those_that_are_not_kept(run: list[KeptFacts], n: int, mode: str) -> None:
    found = kept(BestN(n, "loss", mode), run)  # type: ignore[arg-type]
    finite = {each.step: each.metrics["loss"] for each in run if math.isfinite(each.metrics["loss"])}
    best = [step for step, why in found.items() if f"{mode} loss" in why]
    assert len(best) == min(n, len(finite)) and set(best) <= finite.keys()
    for step in finite.keys() - set(best):
        for chosen in best:
            better, worse = finite[chosen], finite[step]
            assert (better < worse if mode == "min" else better > worse) or (better == worse and chosen > step)


@given(run=runs(), n=st.integers(1, 150))
def test_for_each_multiple_the_nearest_step_is_kept(run: list[KeptFacts], n: int) -> None:
    why = f"closest to every {n}"
    found = {step for step, reasons in kept(EveryNth(n, closest=True), run).items() if why in reasons}
    steps = [each.step for each in run]
    multiples = range(0, max(steps) + 2 * n, n)
    assert found == {min(steps, key=lambda step: (abs(step - multiple), step)) for multiple in multiples}
    assert found >= {step for step, reasons in kept(EveryNth(n), run).items() if f"every {n}" in reasons}


@given(run=runs(), n=st.integers(1, 150))
def test_steps_that_go_as_others_come_are_never_the_nearest(run: list[KeptFacts], n: int) -> None:
    policy, left = EveryNth(n, closest=True), list[KeptFacts]()
    for facts in sorted(run, key=lambda facts: facts.step):
        left.append(replace(facts, healthy=None))
        found = kept(policy, left)
        left = [each for each in left if each.step in found]
    assert [each.step for each in left] == list(kept(policy, [replace(each, healthy=None) for each in run]))


def test_of_two_equally_near_steps_the_earlier_stays_and_training_that_went_back_counts_anew() -> None:
    assert list(kept(EveryNth(100, closest=True), [KeptFacts(step) for step in (3, 60, 90, 110, 140, 171)])) == [
        3,
        90,
        171,
    ]
    second = FIRST_TIMELINE.fork(2, "a" * 16, 200, "d" * 32)
    run = [*(KeptFacts(step) for step in (104, 200, 297)), *(KeptFacts(step, timeline=second) for step in (260, 310))]
    assert kept(EveryNth(100, closest=True), run) == {
        104: ("closest to every 100",),
        200: ("closest to every 100",),
        297: ("closest to every 100", NEWEST_OF_FORMER),
        310: ("closest to every 100", NEWEST),
    }


@given(run=runs(), policy=policies, days=st.integers(-2, 2))
def test_a_clock_that_is_set_changes_only_what_is_grouped_by_time(
    run: list[KeptFacts], policy: KeepPolicy, days: int
) -> None:
    later = [replace(each, created=f"2026-04-{15 + days:02d}T00:00:00+00:00") for each in run]
    if "NewestPer" not in str(policy):
        assert kept(policy, later).keys() == kept(policy, run).keys()
    # All at one time: of the hour, the newest by step.
    of_unknown_health = [replace(each, healthy=None) for each in later]
    assert list(kept(NewestPer("hour"), of_unknown_health)) == [max(each.step for each in run)]


def test_the_newest_of_each_period_is_that_of_the_highest_step_not_the_latest_time() -> None:
    at = [
        KeptFacts(1, "2026-03-01T10:00:00+00:00"),
        KeptFacts(2, "2026-03-01T10:59:59+00:00"),
        KeptFacts(3, "2026-03-01T11:00:00+00:00"),
        # The clock was set back.
        KeptFacts(4, "2026-03-01T10:05:00+00:00"),
        KeptFacts(5, "2026-02-28T23:00:00+00:00"),
        KeptFacts(6, "no time"),
    ]
    assert list(kept(NewestPer("hour"), at)) == [3, 4, 5, 6]
    assert list(kept(NewestPer("day"), at)) == [4, 5, 6]


def test_the_latest_are_those_that_a_resume_takes_and_the_last_of_what_was_left() -> None:
    second = FIRST_TIMELINE.fork(2, "a" * 16, 200, "d" * 32)
    old = [KeptFacts(step) for step in (100, 200, 300, 400, 500)]
    new = [KeptFacts(step, timeline=second) for step in (240, 280)]
    assert list(kept(LatestN(2), [*old, new[0]])) == [200, 240, 500]
    assert list(kept(LatestN(3), [*old, *new])) == [200, 240, 280, 500]
    assert list(kept(LatestN(2), [*old, *new])) == [240, 280, 500]
    # A policy that keeps them all keeps these too.
    assert list(kept(AnyOf(LatestN(1), EveryNth(100)), [*old, *new])) == [100, 200, 280, 300, 400, 500]


def gone_back(count: int, length: int) -> tuple[list[KeptFacts], list[Timeline]]:
    """A run that goes back `count` times, to the first step of the newest timeline, and saves `length` steps each time.

    So a step has several manifests, on different timelines.
    """
    timelines = [FIRST_TIMELINE]
    run = [KeptFacts(step, digest=f"1.{step}") for step in range(1, length + 1)]
    for number in range(2, count + 2):
        fork = number - 1
        timelines.append(timelines[-1].fork(number, f"{number:016x}", fork, f"{number - 1}.{fork}"))
        run += [
            KeptFacts(fork + i, timeline=timelines[-1], digest=f"{number}.{fork + i}") for i in range(1, length + 1)
        ]
    return run, timelines


@given(policy=policies, count=st.integers(0, 12), length=st.integers(1, 4), seed=st.integers(0, 9))
def test_how_often_training_went_back_does_not_count(policy: KeepPolicy, count: int, length: int, seed: int) -> None:
    run, timelines = gone_back(count, length)
    run = [replace(facts, metrics={"loss": 1.0, "accuracy": 1.0}) for facts in run]
    random.Random(seed).shuffle(run)
    found = retention.kept(policy, run)
    chain = {facts.name for facts in run if timelines[-1].holds(facts.timeline.id, facts.step)}
    last = {(number + length - 1, f"{number}.{number + length - 1}") for number in range(1, count + 1)[-FORMER_KEPT:]}
    assert {name for name, why in found.items() if NEWEST_OF_FORMER in why} == last
    if "NewestPer" not in str(policy) and "BestN" not in str(policy):
        assert len(found.keys() - chain) <= FORMER_KEPT * length
    # The decision is stable.
    stays = [facts for facts in run if facts.name in found]
    assert retention.kept(policy, stays, timelines[-1]).keys() == found.keys()


def test_a_tag_keeps_what_was_left_whatever_the_policy_and_only_the_manifest_that_has_it() -> None:
    run, _ = gone_back(9, 2)
    tagged = next(facts for facts in run if facts.name == (3, "2.3"))
    run[run.index(tagged)] = replace(tagged, tags=("paper",))
    found = retention.kept(LatestN(1), run)
    assert found[3, "2.3"] == ("tag paper",)
    assert found.keys() == {(3, "2.3"), (9, "8.9"), (8, "7.8"), (10, "9.10"), (11, "10.11")}
    assert found[11, "10.11"] == ("latest 1", NEWEST) and found[9, "8.9"] == (NEWEST_OF_FORMER,)


def test_the_best_of_two_manifests_of_one_step_is_one_of_them() -> None:
    run, _ = gone_back(1, 2)
    run = [replace(facts, metrics={"loss": float(place != 1)}) for place, facts in enumerate(run)]
    assert run[1].name == (2, "1.2") and run[2].name == (2, "2.2")
    found = retention.kept(BestN(1, "loss"), run)
    assert found == {(2, "1.2"): ("min loss", NEWEST_OF_FORMER), (3, "2.3"): (NEWEST,)}


def test_reasons_say_which_rule_it_was() -> None:
    run = [KeptFacts(step, metrics={"loss": -float(step)}, tags=("paper",) * (step == 1)) for step in range(1, 6)]
    assert kept(AnyOf(LatestN(2), BestN(1, "loss"), EveryNth(2), Tagged()), run) == {
        1: ("tag paper",),
        2: ("every 2",),
        4: ("latest 2", "every 2"),
        5: ("latest 2", "min loss", NEWEST),
    }
    assert kept(None, run)[1] == ("no policy",)
    assert kept(Tagged(), []) == {}


def test_a_metric_that_no_step_has_decides_nothing() -> None:
    run = [KeptFacts(1, metrics={"loss": 1.0}), KeptFacts(2)]
    assert list(kept(BestN(1, "loss"), run)) == [1, 2]
    with pytest.raises(InvalidError, match=r"no step has the metric 'los'; they have \['loss'\]"):
        kept(AnyOf(LatestN(1), BestN(1, "los")), run)


@given(policy=st.one_of(st.none(), policies), run=runs())
def test_whatever_the_policy_the_last_healthy_step_is_kept(policy: KeepPolicy | None, run: list[KeptFacts]) -> None:
    healthy = [step for step, why in kept(policy, run).items() if LAST_HEALTHY in why]
    known = {each.healthy for each in run} - {None}
    wanted = True if True in known else None
    candidates = [each.step for each in run if each.healthy is wanted]
    assert healthy == ([max(candidates)] if known and candidates else [])


def test_the_last_healthy_step_outlives_marked_ones() -> None:
    run = [KeptFacts(1, healthy=True), *(KeptFacts(step, healthy=False) for step in range(2, 9))]
    assert kept(LatestN(2), run) == {1: (LAST_HEALTHY,), 7: ("latest 2",), 8: ("latest 2", NEWEST)}
    # Counting was turned on late: what came before is the best there is.
    unknown = [KeptFacts(1), KeptFacts(2), *run[2:]]
    assert list(kept(LatestN(2), unknown)) == [2, 7, 8]
    # Nothing is known, and nothing is said.
    assert kept(LatestN(1), [KeptFacts(1), KeptFacts(2)]) == {2: ("latest 1", NEWEST)}


def test_the_chain_of_a_newest_timeline_without_steps_counts() -> None:
    second = FIRST_TIMELINE.fork(2, "2" * 16, 3, "d" * 32)
    run = [KeptFacts(step, healthy=step < 3) for step in (1, 2, 3, 4, 5)]
    # No step of the second timeline can be loaded: a restart falls back to step 3.
    assert kept(LatestN(1), run, second) == {
        2: (LAST_HEALTHY,),
        3: ("latest 1", NEWEST),
        5: (NEWEST_OF_FORMER,),
    }
    assert kept(LatestN(1), run, replace(second, ancestors=())).keys() == {5}


def waiting(policy: KeepPolicy | None, due: list[KeptFacts], at_root: list[KeptFacts]) -> list[int]:
    return [facts.step for facts in retention.waiting(policy, due, at_root)]


@given(policy=policies, run=runs(), n=st.integers(1, 60), data=st.data())
def test_what_waits_is_what_the_root_would_keep_of_all(
    policy: KeepPolicy, run: list[KeptFacts], n: int, data: st.DataObject
) -> None:
    due = data.draw(st.lists(st.sampled_from(run), unique_by=lambda facts: facts.step))
    at_root = [facts for facts in run if facts not in due]
    waits = waiting(policy, due, at_root)
    assert waits == sorted(waits)
    skipped = {facts.step for facts in due} - set(waits)
    assert skipped.isdisjoint(kept(policy, run))
    assert not [facts for facts in due if facts.tags and facts.step in skipped]
    if due and max(run, key=lambda facts: facts.step) in due:
        assert waits[-1] == max(facts.step for facts in due), "the newest step of the run is never skipped"
    # Drained in order, none of these waits for nothing: at the end the root keeps each, but for the tag alone.
    left = [*at_root, *(facts for facts in due if facts.step in waits)]
    assert {facts.step for facts in due if facts.step in waits and not facts.tags} <= set(kept(policy, left))
    # What a rule of multiples keeps is skipped by no other rule.
    of_multiples = waiting(AnyOf(policy, EveryNth(n)), due, at_root)
    assert {facts.step for facts in due if facts.step % n == 0} <= set(of_multiples)


def test_a_slow_root_skips_the_oldest_and_no_step_that_is_to_stay() -> None:
    due = [KeptFacts(step, tags=("best",) if step == 20 else ()) for step in (50, 40, 30, 20, 10)]
    at_root = [KeptFacts(5)]
    assert waiting(LatestN(3), due, at_root) == [20, 30, 40, 50]
    assert waiting(AnyOf(LatestN(1), EveryNth(30)), due, at_root) == [20, 30, 50]
    assert waiting(None, due, at_root) == [10, 20, 30, 40, 50]
    assert waiting(LatestN(3), [], at_root) == []
    # Of two timelines, the older one first: its step leaves room for the step of the newer one.
    newer = FIRST_TIMELINE.fork(2, "a" * 16, 20, "d" * 32)
    both = [KeptFacts(30, timeline=newer, digest="new"), KeptFacts(30, digest="old")]
    assert [facts.digest for facts in retention.waiting(None, both, at_root)] == ["old", "new"]
