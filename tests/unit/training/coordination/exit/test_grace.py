"""What a save is expected to take, and whether it fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.training.coordination.exit.grace import expected_seconds, fits, usable_seconds

SECONDS = st.floats(0, 1e4)
LISTS = st.lists(SECONDS, max_size=5)


@given(LISTS, LISTS, st.integers(0, 2**50), st.none() | st.floats(1, 1e12), SECONDS)
def test_more_to_do_never_takes_less(
    measured: list[float], under_way: list[float], held: int, speed: float | None, more: float
) -> None:
    found = expected_seconds(measured, under_way, held, speed)
    assert found >= max([0.0, *measured])
    assert expected_seconds(measured, [*under_way, more], held, speed) >= found
    assert expected_seconds([*measured, more], under_way, held, speed) >= found or not measured
    if measured:
        assert expected_seconds(measured, under_way, 0, None) == found, "what was measured counts, not a guess"


def test_a_save_that_has_nearly_ended_adds_little() -> None:
    assert expected_seconds([4.0, 10.0], [9.0], 0, None) == 11.0
    assert expected_seconds([4.0, 10.0], [90.0], 0, None) == 10.0
    assert expected_seconds([], [1.0], 400, 100.0) == 7.0


@given(st.lists(SECONDS, min_size=1), SECONDS)
def test_what_fits_fits_for_the_slowest_and_with_more_time(expected: list[float], left: float) -> None:
    if fits(expected, left):
        assert max(expected) <= left and fits(expected, left + 1) and fits(expected[:1], left)


@given(st.floats(0.001, 1e6))
def test_some_of_a_grace_is_left_for_the_end(grace: float) -> None:
    assert 0.85 * grace <= usable_seconds(grace) < grace
    assert grace - usable_seconds(grace) <= 2.1
