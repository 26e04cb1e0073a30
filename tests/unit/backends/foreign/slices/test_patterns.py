"""Patterns of a checkpoint match as Python's `re.match` does, but never take longer than they should."""

from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.backends.foreign.slices import patterns
from holdfast.backends.foreign.slices.patterns import Patterns, exact_name
from holdfast.errors import InvalidError

_ATOMS = ["a", "b", ".", r"\.", r"\d", r"\w", r"\S", "[ab]", "[^a]", "[a-c1-3]", "[]x]", "[a-]", r"[\d_]", "(?:ab)"]
_REPEATS = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?", "+?"]
_CHARACTERS = "abcx.1_]-"
_names = st.text(_CHARACTERS, max_size=8)


def _row(chance: random.Random) -> str:
    return "".join(chance.choice(_ATOMS) + chance.choice(_REPEATS) for _ in range(chance.randrange(5)))


def _group(chance: random.Random, leaves: int) -> str:
    if leaves < 2 or chance.random() < 0.3:
        return _row(chance)
    left = chance.randrange(1, leaves)
    return f"({_group(chance, left)}|{_group(chance, leaves - left)}){chance.choice(_REPEATS)}"


@pytest.mark.parametrize("seed", range(4))
def test_it_matches_what_python_matches(seed: int) -> None:
    """Of ten times as many cases as a property test draws in the time."""
    chance = random.Random(seed)
    for _ in range(2500):
        pattern = chance.choice(["", "^"]) + _group(chance, 4) + chance.choice(["", "$"])
        name = "".join(chance.choice(_CHARACTERS) for _ in range(chance.randrange(9)))
        assert Patterns("here").matches(pattern, name) == bool(re.match(pattern, name)), (pattern, name)


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
    start = time.process_time()
    assert not Patterns("here").matches(pattern, "a" * 1500 + "!")
    assert time.process_time() - start < 5


def test_repeats_of_repeats_of_nothing_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_STEPS_MAX", 1_000_000)
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
