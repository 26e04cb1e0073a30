"""Budgets of each room: code lines (code_lines.toml), and words that make prose hard to read (prose.toml)."""

from __future__ import annotations

import tomllib

from tests.house import code_lines, prose

GROWTH_PERCENT, GROWTH_LINES = 3, 10
"""A room may grow by the larger of the two."""


def test_no_room_of_code_grows_without_a_reason() -> None:
    table = tomllib.loads(code_lines.TABLE.read_text(encoding="utf-8"))
    grown = {
        room: (table.get(room), lines)
        for room, lines in code_lines.measured().items()
        if lines > _lines_max(table.get(room))
    }
    assert not grown, (
        f"rooms that grew, or are new, with (lines in the table, lines now): {grown}. Remove code, or run `python -m "
        "tests.house.code_lines --write` and give the reason in the commit"
    )


def _lines_max(lines: int | None) -> float:
    return 0 if lines is None else max(lines * (100 + GROWTH_PERCENT) / 100, lines + GROWTH_LINES)


def test_no_prose_becomes_harder_to_read() -> None:
    limits = prose.limits()
    over = {
        room: excess
        for room, counts in prose.measured().items()
        if (excess := counts.over(limits.get(room, prose.NEW_ROOM)))
    }
    assert not over, (
        f"too many words of {prose.WORDS}, by so many: {over}. Name the thing instead of a pronoun or `what`. "
        "`python -m tests.house.prose` prints the rates"
    )


def test_a_small_room_may_have_one_word_more_than_its_limit() -> None:
    limits = {"what": 2.0}
    assert prose.Counts(100, {"what": 1}).over(limits) == {}
    assert prose.Counts(100, {"what": 2}).over(limits) == {"what": 1}
    assert prose.Counts(10_000, {"what": 24}).over(limits) == {"what": 1}


def test_pronouns_are_counted_in_any_case_and_as_whole_words() -> None:
    counts = prose.counts_of("It has its item. Whatever they say, what is left is none of their bits.")
    assert counts.hits == {"what": 1, "pronouns": 4, "banned": 1}


def test_limits_fall_and_rise_only_when_allowed() -> None:
    rooms = {"core/plan": prose.Counts(1000, {"what": 5, "pronouns": 1, "banned": 0})}
    old = {"core/plan": {"what": 2.0, "pronouns": 30.0, "banned": 0.0}}
    assert '"core/plan" = {what = 2.0, pronouns = 1.0, banned = 0.0}' in prose.table_of(rooms, old, allow_up=False)
    assert '"core/plan" = {what = 5.0, pronouns = 1.0, banned = 0.0}' in prose.table_of(rooms, old, allow_up=True)
