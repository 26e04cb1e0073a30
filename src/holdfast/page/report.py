"""One file that can be mailed: the page of a run, with style, script and data inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.errors import InvalidError
from holdfast.page.app import Pages
from holdfast.page.subjects import Subject

REPORT_BYTES_MAX = 8 << 20
_STEPS, _WHOLE = slice(-300, None), 20


def report_of(subjects: Sequence[Subject]) -> str:
    """Return the report of a run: the last steps, the newest saves whole, and older ones by their extremes.

    Of saves on many ranks, fewer are whole: the file must stay small enough to be mailed.

    Raises:
        InvalidError: The subjects are not one run.
    """
    if len(subjects) != 1 or subjects[0].watch is None:
        raise InvalidError(f"--out with {len(subjects)} subjects; expected the root of one run")
    facts = subjects[0].refresh()
    while facts["left"]:
        facts = subjects[0].refresh()
    rows = facts["table"]
    table = replace(rows, rows=rows.rows[_STEPS], tones=rows.tones[_STEPS], names=rows.names[_STEPS])
    steps = [each for each in facts["steps"] if each.name in {*table.names}]
    saved = [each for each in reversed(steps) if each.work is not None][:_WHOLE]
    for count in range(len(saved), -1, -1):
        text = Pages(subjects).render("report.html", {**facts, "table": table, "steps": steps, "whole": saved[:count]})
        if len(text.encode()) <= REPORT_BYTES_MAX:
            break
    return text
