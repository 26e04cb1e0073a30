"""One file that can be mailed: the page of a run, with style, script and data inside."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import InvalidError, UnavailableError
from holdfast.page.app import Pages
from holdfast.page.subjects import Subject

REPORT_BYTES_MAX = 8 << 20
_WHOLE = 20


def report_of(subjects: Sequence[Subject]) -> str:
    """Return the report of a run: the last 300 steps, the newest saves whole, and older ones by their extremes.

    Of saves on many ranks, fewer are whole: the file must stay small enough to be mailed.

    Raises:
        InvalidError: The subjects are not one run.
        UnavailableError: The store fails before all saves are read.
    """
    if len(subjects) != 1 or subjects[0].watch is None:
        raise InvalidError(f"--out with {len(subjects)} subjects; expected the root of one run")
    while (facts := subjects[0].refresh())["left"]:
        if facts["silent"]:
            raise UnavailableError(f"{facts['silent']}; {facts['left']} saves are not read. Try again later")
    for count in range(_WHOLE, -1, -1):
        text = Pages(subjects).render("report.html", {**facts, "whole_max": count})
        if len(text.encode()) <= REPORT_BYTES_MAX:
            break
    return text
