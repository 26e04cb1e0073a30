"""When a step is due, and how far ahead rank 0 announces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policies import AllOf, AnyOf, AtSteps, EveryNSteps, EverySeconds, OnRequest, SavePolicy
from holdfast.training.coordination.save_due import (
    AHEAD_CALLS_MAX,
    Announcement,
    LastSave,
    is_due,
    needs_announcements,
    next_until,
)

NOTHING_SAVED = LastSave(None, 0.0)


def due(
    policy: SavePolicy, step: int, seconds: float = 0.0, requested: int | None = None, since: LastSave = NOTHING_SAVED
) -> bool:
    return is_due(policy, step, Announcement(step, seconds, requested), since)


def test_rules_by_step() -> None:
    assert [step for step in range(25) if due(EveryNSteps(10), step)] == [0, 10, 20]
    assert [step for step in range(25) if due(AtSteps(3, 20), step)] == [3, 20]
    both = AllOf(EveryNSteps(2), AnyOf(EveryNSteps(3), AtSteps(4)))
    assert [step for step in range(13) if due(both, step)] == [0, 4, 6, 12]


def test_time_counts_from_the_last_save() -> None:
    rule = EverySeconds(60)
    assert not due(rule, 7, 59.9) and due(rule, 7, 60.0)
    assert not due(rule, 9, 60.0, since=LastSave(8, 1.0))
    # Before time was ever told none has passed.
    assert not due(rule, 7, 1e9, since=LastSave())


def test_a_request_is_served_by_any_save_of_its_step_or_a_later_one() -> None:
    rule = OnRequest()
    assert not due(rule, 7)
    assert due(rule, 7, requested=5)
    assert due(rule, 7, requested=5, since=LastSave(4, 0.0))
    assert not due(rule, 7, requested=5, since=LastSave(5, 0.0))


def test_only_time_and_requests_need_rank_0() -> None:
    assert not needs_announcements(AnyOf(EveryNSteps(3), AllOf(AtSteps(4), EveryNSteps(2))))
    assert needs_announcements(AnyOf(EveryNSteps(3), AllOf(AtSteps(4), OnRequest())))
    assert needs_announcements(EverySeconds(3))


@given(
    start=st.integers(0, 10**9),
    strides=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    seconds=st.lists(st.floats(0, 1e4, allow_nan=False), min_size=40, max_size=40),
)
def test_announcements_follow_one_another_and_never_fall_behind(
    start: int, strides: list[int], seconds: list[float]
) -> None:
    step, until = start, None
    for number in range(len(strides) + 1):
        told = next_until(step, until, strides[:number][-8:], seconds[:number][-8:])
        if told is not None:
            assert told >= step
            assert until is None or told > until, "none says anything of steps told of before"
            assert told <= max(step + AHEAD_CALLS_MAX * max(strides), (until or 0) + 1)
            until = told
        assert until is not None and until >= step, "rank 0 never comes to a step it has not announced"
        step += strides[number] if number < len(strides) else 0


def test_slow_steps_are_announced_one_ahead_and_quick_ones_many() -> None:
    assert next_until(10, 10, [1] * 8, [30.0] * 8) == 11
    assert next_until(10, 11, [1] * 8, [30.0] * 8) is None
    assert next_until(10, 10, [1] * 8, [0.1] * 8) == 20
    assert next_until(10, 16, [1] * 8, [0.1] * 8) is None
    # One slow step among quick ones: as if all were slow, for the next may be.
    assert next_until(10, 10, [1] * 8, [0.001] * 7 + [0.5]) == 12
    assert next_until(100, 100, [50, 50], [0.5, 0.5]) == 200
