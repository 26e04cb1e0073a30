"""Patterns of a checkpoint match as Python's `re.match` does, but never take longer than they should."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidError
from holdfast.formats.deepspeed.patterns import Patterns, exact_name

_atoms = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\w", r"\S", "[ab]", "[^a]", "[a-c1-3]", "[]x]", "[a-]", r"[\d_]", "(?:ab)"]
)
_repeats = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?", "+?"])
_rows = st.lists(st.tuples(_atoms, _repeats).map("".join), max_size=4).map("".join)
_groups = st.recursive(
    _rows,
    lambda inner: st.tuples(inner, inner, _repeats).map(lambda parts: f"({parts[0]}|{parts[1]}){parts[2]}"),
    max_leaves=4,
)
_patterns = st.tuples(st.sampled_from(["", "^"]), _groups, st.sampled_from(["", "$"])).map("".join)
_names = st.text("abcx.1_]-", max_size=8)


@settings(max_examples=1500, deadline=None)
@given(pattern=_patterns, name=_names)
def test_it_matches_what_python_matches(pattern: str, name: str) -> None:
    assert Patterns("here").matches(pattern, name) == bool(re.match(pattern, name))


@settings(max_examples=300, deadline=None)
@given(name=_names, other=_names)
def test_a_pattern_that_stands_for_one_name_is_known_to(name: str, other: str) -> None:
    pattern = f"^{re.escape(name)}$"
    assert exact_name(pattern) == name
    assert (exact_name(pattern) == other) == bool(re.match(pattern, other))


@pytest.mark.parametrize("pattern", [r"l1\.weight", r"^l\d\.weight$", "^a.b$", "^a|b$", r"^a\$", r"^a\n$", "^(a)$"])
def test_a_pattern_that_stands_for_more_is_not_taken_for_one_name(pattern: str) -> None:
    assert exact_name(pattern) is None


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$", r"(.*a){30}$", r".*.*.*.*.*.*.*b"])
def test_a_pattern_made_to_take_forever_does_not(pattern: str) -> None:
    start = time.monotonic()
    assert not Patterns("here").matches(pattern, "a" * 1500 + "!")
    assert time.monotonic() - start < 5


def test_repeats_of_repeats_of_nothing_are_stopped() -> None:
    pattern = "x"
    for _ in range(6):
        pattern = f"(?:{pattern}|){{1000}}"
    with pytest.raises(InvalidError, match="steps"):
        Patterns("here").matches(f"{pattern}y", "x" * 1900)


@pytest.mark.parametrize(
    "pattern",
    [r"(?=a)", r"(?i)a", r"(a)\1", "a**", "*a", "(a", "a)", "[a", "a{x}", "a{1", r"a\b", "a{9999}", 3, "a" * 9999],
)
def test_other_patterns_are_refused_by_name(pattern: object) -> None:
    with pytest.raises(InvalidError, match="here"):
        Patterns("here").matches(pattern, "a")


def test_groups_nested_without_end_are_refused() -> None:
    with pytest.raises(InvalidError, match="nested"):
        Patterns("here").matches("(" * 900 + ")" * 900, "a")
