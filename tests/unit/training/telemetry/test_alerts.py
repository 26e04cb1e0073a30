"""Each rule fires just over the threshold, and stays silent just under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast.base.types.epoch import Holder
from holdfast.base.types.events import Operation, Phase, RankReport
from holdfast.base.types.timeline import Timeline
from holdfast.errors import InvalidError
from holdfast.training.telemetry.alerts import AlertRules, Situation, StepFact, alerts_of
from holdfast.training.telemetry.event_lines import EventLine
from holdfast.training.telemetry.work import Work, works_of

START = 1_000_000.0
INTERVAL = 100.0
HOLDER = Holder("trainer-3", "boot", "namespaces", 17, 5, "1970-01-12T00:00:00+00:00", "nonce", 60.0)


def save(
    number: int,
    write_seconds: Sequence[float] = (2.0, 2.0, 2.0, 2.0),
    *,
    held: float = 0.05,
    throttled: int = 0,
    wait: float = 0.5,
) -> Work:
    """A save of step `number`, made of reports: every rank writes, then waits."""
    reports = [
        RankReport(
            Operation("save", number, "root", rank, len(write_seconds)),
            f"{number:016x}",
            f"host-{rank}",
            rank,
            START + INTERVAL * number,
            seconds + wait,
            (Phase("write", 0.0, seconds), Phase("wait", seconds, wait)),
            1000,
            {"staging": "copy", "staged_seconds": held, "fence_seconds": 0.0, "throttled": throttled},
        )
        for rank, seconds in enumerate(write_seconds)
    ]
    (work,) = works_of(reports)
    return work


def steps(*works: Work) -> list[StepFact]:
    return [
        StepFact(
            work.step or 0,
            str(work.step),
            "committed",
            created_unix_seconds=START + INTERVAL * (work.step or 0),
            bytes=1000,
            work=work,
        )
        for work in works
    ]


def quiet(count: int = 12, **of_save: Any) -> list[StepFact]:
    return steps(*(save(number, **of_save) for number in range(count)))


def situation(facts: Sequence[StepFact], **changes: Any) -> Situation:
    last = max(fact.created_unix_seconds or START for fact in facts)
    return replace(Situation(last + 1.0, facts, writer=HOLDER, free_bytes=10**9), **changes)


def failed(seconds: float, verb: str = "save", rank: int = 2, message: str = "the disk is full") -> EventLine:
    time = datetime.fromtimestamp(seconds, UTC)
    return EventLine(time, "failed", rank, verb, 12, 4, f"host-{rank}", error="UnavailableError", message=message)  # type: ignore[arg-type]


def since(seconds: float) -> Holder:
    return replace(HOLDER, since=datetime.fromtimestamp(seconds, UTC).isoformat())


def changed(facts: Sequence[StepFact], **last: Any) -> list[StepFact]:
    return [*facts[:-1], replace(facts[-1], **last)]


def slow(saves: int, seconds: float) -> list[StepFact]:
    """Rank 3 is slow in some of the newest five saves."""
    return steps(*(save(n, (1.0, 1.0, 1.1, seconds if n >= 12 - saves else 1.0)) for n in range(12)))


def long_saves(saves: int, seconds: float, *, usual: float = 1.0) -> list[StepFact]:
    return steps(*(save(n, (seconds if n >= 12 - saves else usual,) * 4, wait=0.0) for n in range(12)))


def often(seconds: float, *works: Work) -> list[StepFact]:
    """The same saves, with another interval between them."""
    closer = [replace(work, began_unix_seconds=START + seconds * number) for number, work in enumerate(works)]
    return [replace(fact, created_unix_seconds=fact.work.began_unix_seconds) for fact in steps(*closer) if fact.work]


LAST = START + 11 * INTERVAL
SUPERSEDED = [replace(fact, status="superseded") for fact in quiet()[5:]]
WENT_BACK = [*quiet()[:5], *SUPERSEDED]
"""Training went back to step 4, and has not committed since."""
OVER: dict[str, tuple[str, Callable[[], Situation], Callable[[], Situation]]] = {
    "stalled": (
        "stalled",
        lambda: situation(quiet(), now_unix_seconds=LAST + 301),
        lambda: situation(quiet(), now_unix_seconds=LAST + 299),
    ),
    "stalled by seconds": (
        "stalled",
        lambda: situation(often(1.0, *map(save, range(12))), now_unix_seconds=START + 11 + 5.01),
        lambda: situation(often(1.0, *map(save, range(12))), now_unix_seconds=START + 11 + 4.99),
    ),
    "stalled without a writer": (
        "stalled",
        lambda: situation(quiet(), now_unix_seconds=LAST + 301),
        lambda: situation(quiet(), now_unix_seconds=LAST + 301, writer=None),
    ),
    "stalled after a pause": (
        "stalled",
        lambda: situation(quiet(), now_unix_seconds=LAST + 9000, writer=since(LAST + 9000 - 301)),
        lambda: situation(quiet(), now_unix_seconds=LAST + 9000, writer=since(LAST + 9000 - 299)),
    ),
    "stalled after going back": (
        "stalled",
        lambda: situation(WENT_BACK, now_unix_seconds=LAST + 301),
        lambda: situation(WENT_BACK, now_unix_seconds=LAST + 299),
    ),
    "slow_rank by ratio": ("slow_rank", lambda: situation(slow(3, 2.01)), lambda: situation(slow(3, 1.99))),
    "slow_rank by saves": ("slow_rank", lambda: situation(slow(3, 5.0)), lambda: situation(slow(2, 5.0))),
    "slow_rank by seconds": (
        "slow_rank",
        lambda: situation(steps(*(save(n, (0.1, 0.1, 1.01)) for n in range(5)))),
        lambda: situation(steps(*(save(n, (0.1, 0.1, 0.99)) for n in range(5)))),
    ),
    "slow_rank of two": (
        "slow_rank",
        lambda: situation(steps(*(save(n, (1.0, 2.01)) for n in range(5)))),
        lambda: situation(steps(*(save(n, (1.0, 1.99)) for n in range(5)))),
    ),
    "slow_save by ratio": ("slow_save", lambda: situation(long_saves(5, 1.81)), lambda: situation(long_saves(5, 1.79))),
    "slow_save in a row": ("slow_save", lambda: situation(long_saves(5, 9.0)), lambda: situation(long_saves(4, 9.0))),
    "slow_save by seconds": (
        "slow_save",
        lambda: situation(long_saves(5, 1.01, usual=0.1)),
        lambda: situation(long_saves(5, 0.99, usual=0.1)),
    ),
    "training_waits by seconds": (
        "training_waits",
        lambda: situation(often(1.0, *(save(n, held=0.101) for n in range(12)))),
        lambda: situation(often(1.0, *(save(n, held=0.099) for n in range(12)))),
    ),
    "training_waits in the second of two saves": (
        "training_waits",
        lambda: situation(steps(save(0, held=9.0), save(1, held=5.01))),
        lambda: situation(steps(save(0, held=9.0), save(1, held=4.99))),
    ),
    "training_waits": (
        "training_waits",
        lambda: situation(quiet(held=0.0501 * INTERVAL)),
        lambda: situation(quiet(held=0.0499 * INTERVAL)),
    ),
    "failing by event": (
        "failing",
        lambda: situation(quiet(), failed=[failed(LAST + 2)]),
        lambda: situation(quiet(), failed=[failed(LAST - 2), failed(LAST + 2, "load")]),
    ),
    "failing by folder": (
        "failing",
        lambda: situation([*quiet(), StepFact(12, "12", "unfinished")]),
        lambda: situation([*quiet(), StepFact(12, "12", "unfinished")], under_way=frozenset({12})),
    ),
    "failing after going back": (
        "failing",
        lambda: situation(WENT_BACK, failed=[failed(LAST + 2)]),
        lambda: situation([*WENT_BACK, StepFact(12, "12", "unfinished")], failed=[failed(LAST - 2)]),
    ),
    "failing by folder after going back": (
        "failing",
        lambda: situation([*WENT_BACK, StepFact(13, "13", "unfinished")]),
        lambda: situation([*WENT_BACK, StepFact(12, "12", "unfinished")]),
    ),
    "failing with a hidden near tier": (
        "failing",
        lambda: situation(quiet(), failed=[failed(LAST + 2)], is_near_hidden=True),
        lambda: situation([*quiet(), StepFact(12, "12", "unfinished")], is_near_hidden=True),
    ),
    "damaged": (
        "damaged",
        lambda: situation(changed(quiet(), damage="digest differs")),
        lambda: situation(changed(quiet(), damage="")),
    ),
    "damaged run": ("damaged", lambda: situation(quiet(), damage=["holdfast.json"]), lambda: situation(quiet())),
    "unhealthy": (
        "unhealthy",
        lambda: situation(changed(quiet(), findings=("w: 3 NaN",))),
        lambda: situation([*changed(quiet(11), findings=("w: 3 NaN",)), *quiet()[-1:]]),
    ),
    "throttled": (
        "throttled",
        lambda: situation([*quiet(11), *steps(save(11, (1.0,), throttled=11))]),
        lambda: situation([*quiet(11), *steps(save(11, (1.0,), throttled=10))]),
    ),
    "no_room": (
        "no_room",
        lambda: situation(quiet(), free_bytes=1999),
        lambda: situation(quiet(), free_bytes=2000),
    ),
}


@pytest.mark.parametrize("name", OVER)
def test_a_rule_fires_over_its_threshold_alone(name: str) -> None:
    rule, over, under = OVER[name]
    assert [alert.rule for alert in alerts_of(over(), AlertRules())] == [rule]
    assert [alert.rule for alert in alerts_of(under(), AlertRules())] == []


def test_every_rule_has_an_act_and_is_tried() -> None:
    tried = {rule for rule, _, _ in OVER.values()}
    assert tried == {
        "stalled", "slow_rank", "slow_save", "training_waits", "failing", "damaged", "unhealthy", "throttled", "no_room"
    }  # fmt: skip
    assert all(alert.act and alert.text for _, over, _ in OVER.values() for alert in alerts_of(over(), AlertRules()))


def test_an_alert_names_rank_host_step_and_numbers() -> None:
    (alert,) = alerts_of(situation(slow(3, 4.0)), AlertRules())
    assert (alert.step, alert.rank, alert.host) == (11, 3, "host-3")
    assert alert.numbers == {"seconds": 4.0, "median_seconds": 1.0, "saves": 3}
    assert "longest in write" in alert.text
    (alert,) = alerts_of(situation(quiet(), failed=[failed(LAST + 2)]), AlertRules())
    assert (alert.step, alert.rank, alert.host) == (12, 2, "host-2")
    assert "the disk is full" in alert.text


def test_a_failed_save_names_the_rank_with_the_cause() -> None:
    told = failed(LAST + 3, rank=3, message="rank 2 aborted: the disk is full")
    for lines in ([failed(LAST + 2), told], [told, failed(LAST + 2)]):
        (alert,) = alerts_of(situation(quiet(), failed=lines), AlertRules())
        assert (alert.rank, alert.host) == (2, "host-2")
    (alert,) = alerts_of(situation(quiet(), failed=[told]), AlertRules())
    assert (alert.rank, alert.host) == (3, "host-3"), "the events of the other rank are elsewhere"


def test_nothing_is_found_in_a_young_run() -> None:
    assert alerts_of(situation(quiet(1), now_unix_seconds=LAST + 9999), AlertRules()) == []
    assert alerts_of(situation(quiet(2), now_unix_seconds=START + 3 * INTERVAL), AlertRules()) == []
    assert alerts_of(Situation(LAST, []), AlertRules()) == []
    together = [replace(fact, created_unix_seconds=START, work=None) for fact in quiet()]
    assert alerts_of(situation(together), AlertRules()) == []


def test_thresholds_can_be_set() -> None:
    assert alerts_of(situation(slow(3, 4.0)), AlertRules(slow_rank_ratio=4.1)) == []
    assert [each.rule for each in alerts_of(situation(slow(1, 4.0)), AlertRules(slow_rank_saves=1))] == ["slow_rank"]


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"window": 21}, {"slow_save_ratio": -1}, {"room_saves": float("nan")}]
)
def test_an_impossible_threshold_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match=next(iter(wrong))):
        AlertRules(**wrong)


def test_the_newest_saves_are_of_the_newest_timeline_whatever_the_clocks_say() -> None:
    set_back = [replace(save(n), began_unix_seconds=START - INTERVAL * n) for n in range(4)]
    assert [each.step for each in situation(steps(*set_back)).saves] == [3, 2, 1, 0]
    newer = [replace(fact, timeline=Timeline(2, "0" * 16)) for fact in quiet()[5:7]]
    assert [each.step for each in situation([*quiet(), *newer]).saves][:3] == [6, 5, 11]


@pytest.mark.parametrize("kept", [(10, 11), (0, 9, 10, 11), (0, 3, 6, 9, 10, 11), range(12)], ids=str)
def test_retention_does_not_change_the_usual_interval(kept: Sequence[int]) -> None:
    facts = [fact for fact in quiet(held=0.06 * INTERVAL) if fact.step in kept]
    for silent, rules in ((3.1, ["stalled", "training_waits"]), (2.9, ["training_waits"])):
        now = situation(facts, now_unix_seconds=LAST + silent * INTERVAL)
        assert [alert.rule for alert in alerts_of(now, AlertRules())] == rules


def test_saves_in_pairs_are_no_stall() -> None:
    times = [START + INTERVAL * (number // 2) + number % 2 for number in range(24)]
    facts = [replace(fact, created_unix_seconds=time, work=None) for fact, time in zip(quiet(24), times, strict=True)]
    assert alerts_of(situation(facts, now_unix_seconds=times[-1] + INTERVAL), AlertRules()) == []
