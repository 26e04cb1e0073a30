"""The rules of keepers, in every order of what may happen: no step counts twice, comes back or is forgotten."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.types.epoch import Fence
from holdfast.errors import ConflictError, UnavailableError
from tests.property.peers import keepers_rules as keepers
from tests.property.peers.keepers_model import Budget, Model, Rules, Violation, World, check, first_world, search
from tests.property.peers.keepers_rules import Admission, Answer, Kept, Mark, NoManifest, PutOutcome
from tests.property.states import examples

EXAMPLES = int(os.environ.get("PEER_EXAMPLES", examples(40)))

ABSENT, SILENT, BEHIND, NEWER = NoManifest.ABSENT, NoManifest.SILENT, NoManifest.BEHIND, NoManifest.NEWER

NOTHING = Budget(losses=0, cuts=0, drops=0, removals=0, epochs=2, puts=1, reads=0)
"""One take-over, and one manifest of each writer."""


@pytest.mark.parametrize(
    ("nodes", "budget"),
    [
        (1, Budget(losses=1, cuts=1, drops=1, removals=1, epochs=2, puts=2, reads=0)),
        (2, NOTHING._replace(cuts=1, drops=1, removals=1)),
        (2, NOTHING._replace(losses=1, drops=1, removals=1)),
        (2, NOTHING._replace(cuts=1, drops=1, retries=1)),
        (3, NOTHING._replace(drops=1, reads=1)),
    ],
)
def test_the_rules_hold_in_every_order(nodes: int, budget: Budget) -> None:
    must_see_what_matters(search(Model(), first_world(nodes, budget)), budget)


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "budget"),
    [
        (3, NOTHING._replace(cuts=1, removals=1)),
        (3, NOTHING._replace(puts=2, removals=1, reads=1)),
        (3, NOTHING._replace(losses=1, drops=1)),
    ],
)
def test_the_rules_hold_in_every_order_with_three_keepers(nodes: int, budget: Budget) -> None:
    must_see_what_matters(search(Model(), first_world(nodes, budget)), budget)


def must_see_what_matters(worlds: Collection[World], budget: Budget) -> None:
    """Fail if the search has seen no step that survived a take-over, or none that was removed."""
    assert any(kept.epoch < world.root.epoch for world in worlds for kept in world.acked)
    assert any(kept.epoch == 2 for world in worlds for kept in world.acked)
    assert any(world.removed for world in worlds) is bool(budget.removals)
    assert any(world.root.epoch > world.writers[0].epoch and not world.acked for world in worlds)


@settings(max_examples=EXAMPLES)
@given(
    nodes=st.integers(1, 5),
    budget=st.builds(
        Budget,
        losses=st.integers(0, 2),
        cuts=st.integers(0, 4),
        drops=st.integers(0, 2),
        removals=st.integers(0, 2),
        epochs=st.integers(2, 5),
        puts=st.integers(1, 3),
        steps=st.integers(1, 2),
        reads=st.integers(0, 3),
        retries=st.integers(0, 2),
    ),
    choices=st.lists(st.integers(0, 2**16), min_size=40, max_size=160),
)
def test_the_rules_hold_in_long_lives(nodes: int, budget: Budget, choices: list[int]) -> None:
    world = first_world(nodes, budget)
    for choice in choices:
        moves = list(Model().moves(world))
        if not moves:
            break
        _, world = moves[choice % len(moves)]
        check(world)


# ------------------------------------------------------------------------------------------------- rules that are wrong


def never_refused(own: Mark, asked: Mark) -> None:
    """No keeper minds a mark: writers that were replaced go on."""


def served_behind(own: Mark, asked: Mark) -> NoManifest | None:
    return NoManifest.NEWER if own > asked else None


def counted_of_the_reachable(mine: Kept, answers: Sequence[Answer], roster: int) -> PutOutcome:
    return keepers.put_outcome(mine, answers, sum(answer is not SILENT for answer in answers))


def acknowledged_by_one(mine: Kept, answers: Sequence[Answer], roster: int) -> PutOutcome:
    return PutOutcome.STORED if mine in answers else PutOutcome.UNKNOWN


def acknowledged_though_replaced(mine: Kept, answers: Sequence[Answer], roster: int) -> PutOutcome:
    older = [answer for answer in answers if answer is not NEWER]
    return keepers.put_outcome(mine, older, roster)


def absent_where_silent(answers: Sequence[Answer]) -> tuple[Kept | None, list[int]]:
    return keepers.read([ABSENT if answer is SILENT else answer for answer in answers])


MUTANTS = {
    "the fence is dropped": (Rules(refusal=never_refused), NOTHING._replace(cuts=1)),
    "a keeper serves before it learns the newest mark": (
        Rules(refusal=served_behind),
        NOTHING._replace(removals=1, reads=1),
    ),
    "repairs of a read are not fenced": (Rules(refusal_of_repair=never_refused), NOTHING._replace(cuts=1, reads=1)),
    "a keeper that does not answer counts as one without the step": (
        Rules(read=absent_where_silent),
        NOTHING._replace(cuts=1, reads=1),
    ),
    "reachable keepers are counted": (Rules(put_outcome=counted_of_the_reachable), NOTHING._replace(cuts=1)),
    "one keeper is enough": (Rules(put_outcome=acknowledged_by_one), NOTHING._replace(cuts=1)),
    "a replaced writer acknowledges": (Rules(put_outcome=acknowledged_though_replaced), NOTHING),
    "a keeper that returns drops nothing": (
        Rules(settled_on_return=lambda held, _: frozenset(held)),
        NOTHING._replace(removals=1),
    ),
    "a new job lists what was removed": (
        Rules(settled_in_list=lambda held, _: keepers.settled(held, Admission(Fence(), 0))),
        NOTHING._replace(removals=1),
    ),
    "the list is put before the copies": (
        Rules(too_few_copies=lambda listed, holdings: []),
        NOTHING._replace(losses=1, drops=1),
    ),
    "an empty keeper learns from a writer": (
        Rules(may_learn=lambda own, offered: offered > own),
        NOTHING._replace(losses=1, drops=1),
    ),
    "a writer puts a second manifest of a step": (
        Rules(may_put=lambda step, admission, tried: True),
        NOTHING._replace(drops=1, puts=2, epochs=1),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_found(name: str) -> None:
    rules, budget = MUTANTS[name]
    with pytest.raises(Violation, match="Moves: "):
        search(Model(rules), first_world(3, budget))


def test_each_rule_has_a_mutant() -> None:
    rules = Rules()
    wrong = {name for mutant, _ in MUTANTS.values() for name in Rules.__slots__ if changes(mutant, rules, name)}
    assert wrong == {*Rules.__slots__}


def changes(mutant: Rules, rules: Rules, name: str) -> bool:
    return getattr(mutant, name) is not getattr(rules, name)


# ------------------------------------------------------------------------------------------------- one by one

MINE, OTHER = Kept(7, 2, "mine"), Kept(7, 1, "other")


@pytest.mark.parametrize(
    ("answers", "roster", "expected"),
    [
        ([MINE], 1, PutOutcome.STORED),
        ([MINE, SILENT], 2, PutOutcome.UNKNOWN),
        ([SILENT, MINE, MINE], 3, PutOutcome.STORED),
        ([MINE, BEHIND, SILENT], 3, PutOutcome.UNKNOWN),
        ([MINE, MINE, NEWER], 3, PutOutcome.UNKNOWN),
        ([MINE, OTHER], 3, PutOutcome.UNKNOWN),
        ([OTHER], 3, PutOutcome.CONFLICT),
        ([NEWER], 3, PutOutcome.CONFLICT),
        ([SILENT, OTHER], 3, PutOutcome.UNKNOWN),
        ([BEHIND, BEHIND, BEHIND], 3, PutOutcome.UNKNOWN),
        ([SILENT, SILENT, SILENT], 3, PutOutcome.UNKNOWN),
    ],
)
def test_a_put_counts_keepers_of_the_roster(answers: list[Answer], roster: int, expected: PutOutcome) -> None:
    assert keepers.put_outcome(MINE, answers, roster) is expected


def test_a_read_takes_the_first_manifest_and_names_the_keepers_without() -> None:
    assert keepers.read([ABSENT, MINE, SILENT]) == (MINE, [0])
    assert keepers.read([SILENT, MINE, MINE]) == (MINE, [])
    assert keepers.read([ABSENT, SILENT, ABSENT]) == (None, [])
    assert keepers.read([ABSENT]) == (None, [])


def test_a_keeper_that_does_not_answer_is_never_an_absent_step() -> None:
    with pytest.raises(UnavailableError, match="1 of 3 keepers answered; expected 2"):
        keepers.read([ABSENT, SILENT, BEHIND])
    with pytest.raises(UnavailableError, match="1 of 2 keepers answered; expected 2"):
        keepers.read([ABSENT, SILENT])
    with pytest.raises(ConflictError, match="another writer took over"):
        keepers.read([MINE, NEWER, SILENT])


def test_a_removed_step_may_be_put_again() -> None:
    admission = Admission(Fence(2, {5: "five"}), 1)
    assert not keepers.may_put(5, admission, [])
    assert keepers.may_put(7, admission, [OTHER])
    assert not keepers.may_put(7, admission, [MINE])
    removed = replace(admission, revision=2, excluded=frozenset({(5, "five"), (7, "mine")}))
    assert keepers.may_put(5, removed, []) and keepers.may_put(7, removed, [MINE])
    assert keepers.settled([MINE, OTHER, Kept(5, 1, "five")], removed) == frozenset()
    assert keepers.settled([MINE, OTHER, Kept(5, 1, "five")], admission) == {MINE, Kept(5, 1, "five")}
