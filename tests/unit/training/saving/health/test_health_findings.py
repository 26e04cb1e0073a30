"""From what ranks found to the health of a checkpoint, held against plain models of both rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.types.health import (
    NAMED_RANKS_MAX,
    Counted,
    Expectation,
    Health,
    ReplicaGroup,
    Replicas,
    findings_of,
    is_healthy,
)
from holdfast.errors import CorruptError
from holdfast.training.saving.health.health_findings import Findings

EXPECTATIONS: tuple[Expectation, ...] = ("parameter", "optimizer", "buffer", "expected")
COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5))


def found(counts: Mapping[str, int], expectation: Expectation, before: Health | None = None) -> Health:
    findings = Findings()
    findings.add(0, {fqn: (count, expectation) for fqn, count in counts.items()}, None)
    health = findings.health(before)
    assert health is not None
    return health


def test_where_nothing_was_looked_at_nothing_is_said() -> None:
    findings = Findings()
    findings.add(0, None, None)
    assert findings.health(None) is None
    assert is_healthy(None) is None


def test_where_one_rank_did_not_look_nothing_is_said() -> None:
    findings = Findings()
    findings.add(0, {"w": (3, "parameter")}, None)
    findings.add(1, None, None)
    assert findings.health(None) is None


def test_the_counts_of_ranks_are_added_up() -> None:
    findings = Findings()
    findings.add(0, {"w": (3, "parameter")}, None)
    findings.add(1, {"w": (4, "parameter"), "v": (1, "optimizer")}, None)
    health = findings.health(None)
    assert health == Health(nonfinite={"v": 1, "w": 7}, new={"v": 0, "w": 0})
    assert is_healthy(health) is False
    assert findings_of(health) == ("v: 1 non-finite elements, 0 before", "w: 7 non-finite elements, 0 before")


@pytest.mark.parametrize(
    ("expectation", "news"), [("parameter", 0), ("optimizer", 0), ("buffer", None), ("expected", None)]
)
def test_where_no_earlier_count_is_known(expectation: Expectation, news: int | None) -> None:
    health = found({"w": 2}, expectation)
    assert health.new == ({} if news is None else {"w": news})
    assert found({"w": 2}, expectation, Health(divergent={})) == health


@given(st.lists(COUNTS, max_size=8), st.sampled_from(EXPECTATIONS))
def test_a_mark_stays_until_its_cause_is_gone(history: list[dict[str, int]], expectation: Expectation) -> None:
    before: Health | None = None
    accepted: dict[str, int] = {}
    for number, counts in enumerate(history):
        health = found(counts, expectation, before)
        assert health.nonfinite == counts
        if expectation == "expected" or (expectation == "buffer" and number == 0):
            worse = {}
        else:
            worse = {fqn: accepted.get(fqn, 0) for fqn in counts if counts[fqn] > accepted.get(fqn, 0)}
        assert health.new == worse and is_healthy(health) is (not worse)
        if expectation != "expected":
            accepted = {fqn: accepted.get(fqn, 0) if fqn in worse else counts.get(fqn, 0) for fqn in "abcd"}
        before = health


@pytest.mark.parametrize(
    ("expectation", "news"), [("parameter", 0), ("optimizer", 0), ("buffer", None), ("expected", None)]
)
def test_what_the_checkpoint_before_did_not_hold_is_counted_for_the_first_time(
    expectation: Expectation, news: int | None
) -> None:
    findings = Findings()
    findings.add(0, {"grown": (2, expectation), "known": (2, expectation), "clean": (2, expectation)}, None)
    health = findings.health(Health({"known": 2}), lambda fqn: fqn in {"known", "clean"})
    assert health is not None
    expected = {} if expectation == "expected" else {"clean": 0}
    assert health.new == (expected if news is None else expected | {"grown": news})


def test_a_name_steers_no_terminal_that_hears_of_it() -> None:
    health = Health({"a\x1b[31m\nb": 3}, {"a\x1b[31m\nb": 0}, {"c\r": (1,)}, (), {1: "host\x07"})
    assert findings_of(health) == (
        r"'a\x1b[31m\nb': 3 non-finite elements, 0 before",
        r"'c\r': the copy of rank 1 ('host\x07') differs from most others",
    )


def replicas(rank: int, held: Mapping[str, bytes], *, speaker: int = 0, holders: bytes = b"all") -> Replicas:
    names = tuple(sorted(held))
    group = ReplicaGroup(holders, tuple(range(len(names))), b"".join(held[name] for name in names))
    return Replicas(f"node{rank}", speaker, names if rank == speaker else (), (group,))


def compared(copies: Sequence[Mapping[str, bytes]]) -> Health:
    findings = Findings()
    for rank, held in enumerate(copies):
        findings.add(rank, None, replicas(rank, held))
    health = findings.health(None)
    assert health is not None and health.nonfinite is None
    return health


@given(st.data())
def test_who_differs_from_most_is_named(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 7))
    names = data.draw(st.lists(st.sampled_from("wxyz"), min_size=1, unique=True))
    contents = st.sampled_from([b"aaaaaaaa", b"bbbbbbbb", b"cccccccc"])
    copies = [{name: data.draw(contents) for name in names} for _ in range(world_size)]
    health = compared(copies)
    expected, undecided = {}, []
    for name in names:
        counts = Counter(held[name] for held in copies).most_common()
        if len(counts) == 1:
            continue
        if counts[0][1] == counts[1][1]:
            expected[name] = tuple(range(world_size))
            undecided.append(name)
        else:
            expected[name] = tuple(rank for rank, held in enumerate(copies) if held[name] != counts[0][0])
    assert health.divergent == expected
    assert sorted(health.undecided) == sorted(undecided)
    assert health.hosts == {rank: f"node{rank}" for ranks in expected.values() for rank in ranks}
    assert is_healthy(health) is (not expected)


def test_two_copies_name_both_and_say_that_nobody_can_tell() -> None:
    health = compared([{"w": b"a" * 8}, {"w": b"b" * 8}])
    assert health.divergent == {"w": (0, 1)} and health.undecided == ("w",)
    assert findings_of(health) == (
        "w: the copies of ranks 0 (node0), 1 (node1) differ, and none has a majority: the right one is unknown",
    )


def test_of_three_copies_the_odd_one_is_named() -> None:
    health = compared([{"w": b"a" * 8}, {"w": b"b" * 8}, {"w": b"a" * 8}])
    assert findings_of(health) == ("w: the copy of rank 1 (node1) differs from most others",)


def test_classes_that_hold_other_tensors_besides_are_compared() -> None:
    """Pipeline stages that tie an embedding: the same tensor at other places in the order of their names."""
    findings = Findings()
    findings.add(0, None, Replicas("h", 0, ("a", "tied"), (ReplicaGroup(b"both", (1,), b"x" * 8),)))
    findings.add(1, None, Replicas("h", 1, ("tied", "z"), (ReplicaGroup(b"both", (0,), b"y" * 8),)))
    health = findings.health(None)
    assert health is not None and health.divergent == {"tied": (0, 1)}


def test_what_different_ranks_hold_is_not_compared() -> None:
    findings = Findings()
    for rank in range(4):
        held = {"w": bytes([rank // 2]) * 8}
        findings.add(rank, None, replicas(rank, held, holders=bytes([rank // 2])))
    health = findings.health(None)
    assert health is not None and health.divergent == {}


def test_many_ranks_are_named_up_to_a_limit() -> None:
    health = compared([{"w": rank.to_bytes(8, "little")} for rank in range(3 * NAMED_RANKS_MAX)])
    assert health.divergent == {"w": tuple(range(NAMED_RANKS_MAX))}
    (said,) = findings_of(health)
    assert len(said) < 400


def test_many_tensors_are_told_up_to_a_limit() -> None:
    counts: Counted = {f"w{number:03d}": (1, "parameter") for number in range(300)}
    findings = Findings()
    findings.add(0, counts, None)
    health = findings.health(None)
    assert health is not None
    said = findings_of(health)
    assert len(said) == 21 and said[-1] == "and 280 more tensors"


def test_a_tensor_that_nobody_named_is_refused() -> None:
    with pytest.raises(CorruptError, match="tensor 1 of 0"):
        Findings().add(1, None, Replicas("h", 0, (), (ReplicaGroup(b"x", (1,), b"x" * 8),)))
