"""Matches the regular expressions of a checkpoint in bounded time.

Universal checkpoints select the layout of a parameter by regular expressions over its name. Python's matcher tries one
way after another, so a hostile pattern can take exponential time. This matcher follows all ways at once: the set of
positions in the name that the pattern may have reached is one integer, a bit for each position.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from holdfast.backends.foreign.messages import CONVERT, shown
from holdfast.errors import InvalidError

CHARACTERS_MAX = 2000
"""Longest pattern, and longest name."""

_STEPS_MAX = 30_000_000
_COUNT_MAX = 1000
_DEPTH_MAX = 50
_Fits = Callable[[str], object]
"""Returns a true value if a character fits a part of a pattern."""

_CLASSES: dict[str, _Fits] = {name: re.compile(rf"\{name}").match for name in "dwsDWS"}
_SPECIAL = frozenset(".^$*+?{}[]\\|()")
_ESCAPED = re.compile(r"\\([^\w\n]|_)")
"""A backslash, and a character that the pattern matches literally."""


class _Name:
    """A name as bit sets: the positions of each character."""

    def __init__(self, name: str) -> None:
        self.end = 1 << len(name)
        self.places: dict[str, int] = {}
        for at, character in enumerate(name):
            self.places[character] = self.places.get(character, 0) | 1 << at


_named = lru_cache(maxsize=1 << 14)(_Name)
_Node = Callable[[_Name, int], int]
"""A part of a pattern: takes a name and the places where the part may begin, returns those where it may end."""


class Patterns:
    """The patterns of one checkpoint. All of them share one limit of steps."""

    def __init__(self, where: str) -> None:
        """Start with a full limit.

        Args:
            where: The file of the patterns, for messages.
        """
        self._where, self._steps = where, 0
        self._known: dict[str, _Node] = {}

    def matches(self, pattern: object, name: str) -> bool:
        """Return whether a pattern matches at the start of a name, as `re.match` does.

        Args:
            pattern: A regular expression: characters, escapes, classes, groups, `|`, `^`, `$` and repeats.
            name: A name.
        Raises:
            InvalidError: The expression is malformed, uses look-around, back references or flags, or all patterns of
                the checkpoint together take too many steps.
        """
        if not isinstance(pattern, str) or len(pattern) > CHARACTERS_MAX or len(name) > CHARACTERS_MAX:
            raise InvalidError(
                f"{self._where}: pattern {shown(pattern)} for the name {name[:100]!r}; expected text of at most "
                f"{CHARACTERS_MAX} characters. {CONVERT}"
            )
        if pattern not in self._known:
            self._known[pattern] = _Parser(pattern, self._where, self._spend).whole()
        return bool(self._known[pattern](_named(name), 1))

    def _spend(self) -> None:
        self._steps += 1
        if self._steps > _STEPS_MAX:
            raise InvalidError(
                f"{self._where}: patterns take over {_STEPS_MAX} steps; expected a few a name. {CONVERT}"
            )


def exact_name(pattern: str) -> str | None:
    r"""Return the only name that a pattern such as `^l1\.weight$` matches; None if it may match several."""
    # A single expression for the whole pattern would backtrack, and keep 128 bytes for each character of a hostile one.
    unescaped = _ESCAPED.sub("", pattern[1:-1])
    if pattern[:1] != "^" or pattern[-1:] != "$" or not _SPECIAL.isdisjoint(unescaped):
        return None
    return _ESCAPED.sub(r"\1", pattern[1:-1])


class _Parser:
    """Parses one pattern from left to right."""

    def __init__(self, pattern: str, where: str, spend: Callable[[], None]) -> None:
        self._pattern, self._where, self._spend = pattern, where, spend
        self._at, self._depth = 0, 0

    def whole(self) -> _Node:
        node = self._either()
        if self._at < len(self._pattern):
            raise self._refused("an unopened parenthesis")
        return node

    def _refused(self, what: str) -> InvalidError:
        return InvalidError(
            f"{self._where}: the pattern {self._pattern[:200]!r} has {what} at character {self._at}; expected "
            f"characters, classes, groups and repeats. {CONVERT}"
        )

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _either(self) -> _Node:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise self._refused("groups nested too deeply")
        ways = [self._row()]
        while self._next() == "|":
            self._at += 1
            ways.append(self._row())
        self._depth -= 1

        def either(name: _Name, places: int) -> int:
            ends = 0
            for way in ways:
                ends |= way(name, places)
            return ends

        return either if len(ways) > 1 else ways[0]

    def _row(self) -> _Node:
        nodes: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            nodes.append(self._repeated(self._one()))

        def row(name: _Name, places: int) -> int:
            for node in nodes:
                if not places:
                    break
                places = node(name, places)
            return places

        return row

    def _one(self) -> _Node:
        character = self._next()
        self._at += 1
        if character == "^":
            return lambda name, places: places & 1
        if character == "$":
            return lambda name, places: places & name.end
        if character == ".":
            return self._character(lambda candidate: candidate != "\n")
        if character == "(":
            return self._group()
        if character == "[":
            return self._character(self._set())
        if character == "\\":
            if self._next() == "Z":
                self._at += 1
                return lambda name, places: places & name.end
            return self._character(self._escaped())
        if character in "*+?{":
            raise self._refused("a repeat of nothing")
        return self._literal(character)

    def _group(self) -> _Node:
        if self._next() == "?":
            if not self._pattern.startswith("?:", self._at):
                raise self._refused("a group that looks around or sets flags")
            self._at += 2
        node = self._either()
        if self._next() != ")":
            raise self._refused("an open parenthesis")
        self._at += 1
        return node

    def _escaped(self) -> _Fits:
        character = self._next()
        self._at += 1
        if character in _CLASSES:
            return _CLASSES[character]
        if not character or character.isalnum():
            raise self._refused(f"the escape \\{character}")
        return lambda candidate: candidate == character

    def _set(self) -> _Fits:
        inverted = self._next() == "^"
        self._at += inverted
        members: list[_Fits] = []
        while not members or self._next() != "]":
            character = self._next()
            if not character:
                raise self._refused("an open bracket")
            self._at += 1
            if character == "\\":
                members.append(self._escaped())
                continue
            low = high = character
            if self._next() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("", "]", "\\"):
                high = self._pattern[self._at + 1]
                self._at += 2
            members.append(_between(low, high))
        self._at += 1
        return lambda candidate: inverted != any(member(candidate) for member in members)

    def _literal(self, expected: str) -> _Node:
        def literal(name: _Name, places: int) -> int:
            self._spend()
            return (places & name.places.get(expected, 0)) << 1

        return literal

    def _character(self, fits: _Fits) -> _Node:
        def step(name: _Name, places: int) -> int:
            self._spend()
            return sum(places & mask for candidate, mask in name.places.items() if fits(candidate)) << 1

        return step

    def _repeated(self, node: _Node) -> _Node:
        low, high = self._counts()
        if (low, high) == (1, 1):
            return node
        self._at += self._next() == "?"  # A lazy repeat matches the same names as a greedy one.
        if self._next() in ("*", "+", "?", "{"):
            raise self._refused("a repeat of a repeat")

        def repeat(name: _Name, places: int) -> int:
            for _ in range(low):
                self._spend()
                places = node(name, places)
            # Each round adds the places that one more repeat reaches. It stops when a round adds none, so an unbounded
            # repeat (`more` below 0) takes at most as many rounds as the name has characters.
            reached, ends, more = places, places, high - low
            while ends and more:
                self._spend()
                ends = node(name, ends) & ~reached
                reached |= ends
                more -= 1
            return reached

        return repeat

    def _counts(self) -> tuple[int, int]:
        """Parse a repeat; return its smallest and largest count, -1 for no largest. (1, 1) if there is no repeat."""
        symbol = self._next()
        if symbol in ("*", "+", "?"):
            self._at += 1
            return {"*": (0, -1), "+": (1, 0), "?": (0, 1)}[symbol]
        if symbol != "{":
            return 1, 1
        content, closed, _ = self._pattern[self._at + 1 :].partition("}")
        low, comma, high = content.partition(",")
        numbers = [low or "0", high or "0"] if comma else [low, low]
        if not closed or not all(text.isascii() and text.isdecimal() and int(text) <= _COUNT_MAX for text in numbers):
            raise self._refused("a repeat without readable counts")
        self._at += len(content) + 2
        first, last = map(int, numbers)
        return (first, first - 1 if comma and not high else last)


def _between(low: str, high: str) -> _Fits:
    return lambda candidate: low <= candidate <= high
