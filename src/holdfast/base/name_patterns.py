"""Patterns of names in a state: a pattern that matches a name applies to all names below that name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate

from holdfast.base.ports.framework import UnmatchedPattern
from holdfast.errors import InvalidError, first_three


def with_names_above(name: str) -> list[str]:
    """Return a name and all names above it."""
    return [name, *(name[:at] for at, letter in enumerate(name) if letter == ".")]


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match none of some names, nor a name above them."""
    matchers = {pattern: re.compile(translate(pattern)).match for pattern in patterns}
    for name in names:
        if not matchers:
            break
        above = with_names_above(name)
        for pattern in [pattern for pattern, matches in matchers.items() if any(map(matches, above))]:
            del matchers[pattern]
    return list(matchers)


def judge_unmatched(
    name: str, by_rank: Sequence[Sequence[UnmatchedPattern]]
) -> tuple[InvalidError | None, Sequence[str]]:
    """Return the error for patterns that match no name on any rank, and warnings of those that may do so.

    A rank of a pipeline holds few of the names, so a pattern counts only if every rank lists it.

    Args:
        name: Name of the save or load, for the message.
        by_rank: The patterns that match no name of a rank's state, by rank.
    """
    everywhere = set(by_rank[0]).intersection(*by_rank[1:])
    unmatched = [pattern for pattern in by_rank[0] if pattern in everywhere]
    errors = [pattern for pattern in unmatched if pattern.is_error]
    if errors:
        error = InvalidError(
            f"{name}: {first_three(errors)}: matches no name on any rank. Expected names of the state, as in "
            "'model.layers.0.weight' or 'model.*'. Correct the pattern, or leave it out"
        )
        return error, ()
    return None, [
        f"{pattern} matches no name on any rank. Correct the pattern, or leave it out" for pattern in unmatched
    ]
