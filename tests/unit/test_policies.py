"""Policies refuse what can never be right when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from holdfast._face.arguments import policies_of
from holdfast.errors import InvalidError
from holdfast.policies import (
    AllOf,
    AnyOf,
    AtSteps,
    BestN,
    EveryNSteps,
    EveryNth,
    EverySeconds,
    LatestN,
    NewestPer,
    OnRequest,
    Tagged,
)

IMPOSSIBLE: dict[str, tuple[Callable[[], object], str]] = {
    "no steps apart": (lambda: EveryNSteps(0), "positive whole number"),
    "half a step apart": (lambda: EveryNSteps(1.5), "positive whole number"),  # type: ignore[arg-type]
    "true steps": (lambda: LatestN(True), "positive whole number"),
    "no seconds": (lambda: EverySeconds(0), "positive, finite"),
    "endless seconds": (lambda: EverySeconds(math.inf), "positive, finite"),
    "seconds that are none": (lambda: EverySeconds(math.nan), "positive, finite"),
    "no step at all": (lambda: AtSteps(), "at least one step"),
    "steps in a list": (lambda: AtSteps([1, 2]), "whole numbers"),  # type: ignore[arg-type]
    "keep none": (lambda: LatestN(0), "positive whole number"),
    "no metric": (lambda: BestN(3, ""), "name of a metric"),
    "best of what": (lambda: BestN(3, "loss", "lowest"), "'min' or 'max'"),  # type: ignore[arg-type]
    "per week": (lambda: NewestPer("week"), "'hour' or 'day'"),  # type: ignore[arg-type]
    "any of none": (lambda: AnyOf(), "at least one policy"),
    "of both kinds": (lambda: AnyOf(EveryNSteps(1), AllOf(LatestN(1))), "policies of one kind"),
    "of no policy": (lambda: AnyOf(EveryNSteps(1), 5), "expected policies"),  # type: ignore[arg-type]
    "steps that never come": (lambda: AllOf(AtSteps(5, 7), EveryNSteps(10)), "nothing would ever be saved"),
    "steps that exclude each other": (lambda: AllOf(AtSteps(5), AtSteps(7)), "nothing would ever be saved"),
    "two words on saving": (lambda: policies_of(OnRequest(), 100, None, None), "expected one of them"),
    "two words on keeping": (lambda: policies_of(None, None, Tagged(), 3), "expected one of them"),
    "keep none, in short": (lambda: policies_of(None, None, None, 0), "keep_last=0"),
    "every none": (lambda: policies_of(None, -1, None, None), "every=-1"),
    "keeping for saving": (lambda: policies_of(LatestN(3), None, None, None), "Give it as keep="),
    "saving for keeping": (lambda: policies_of(None, None, AnyOf(EveryNSteps(3)), None), "Give it as save="),
    "a number for a policy": (lambda: policies_of(100, None, None, None), "holdfast.policies"),
    "a class for a policy": (lambda: policies_of(OnRequest, None, None, None), "holdfast.policies"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_can_never_be_right_is_refused_and_says_what_to_do(name: str) -> None:
    make, said = IMPOSSIBLE[name]
    with pytest.raises(InvalidError, match=said.replace(".", r"\.")):
        make()


def test_short_forms_are_the_policies_they_stand_for() -> None:
    short = policies_of(None, 100, None, 3)
    assert short.save == AnyOf(EveryNSteps(100), OnRequest())
    assert short.keep == AnyOf(LatestN(3), Tagged())
    nothing = policies_of(None, None, None, None)
    assert (nothing.save, nothing.keep) == (None, None)


def test_policies_are_values() -> None:
    assert AnyOf(AtSteps(1, 2), EveryNSteps(3)) == AnyOf(AtSteps(2, 1), EveryNSteps(3))
    assert len({AllOf(LatestN(1), EveryNth(2)), AllOf(LatestN(1), EveryNth(2))}) == 1
