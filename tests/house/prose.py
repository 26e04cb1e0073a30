"""Words that make prose hard to read, per 1,000 words of each room of `src/holdfast` and of each page of docs.

    python -m tests.house.prose                      prints the rates
    python -m tests.house.prose --write              lowers the limits in prose.toml to the rates
    python -m tests.house.prose --write --allow-up   also raises limits

The prose of a room is its docstrings, its comments, and the texts of the errors that its code raises.
"""

from __future__ import annotations

import argparse
import ast
import io
import math
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house.source import FILES, ROOT, docstrings_in, name_of, room_of, tree_of

TABLE = Path(__file__).with_suffix(".toml")

WORDS = {
    "what": r"\bwhat\b",
    "pronouns": r"\b(?:it|its|they|them|their)\b",
    "banned": r"\b(?:alike|anew|beside|is none|nobody|of which|perhaps|whoever)\b",
}
PATTERNS = {kind: re.compile(words, re.IGNORECASE) for kind, words in WORDS.items()}

NEW_ROOM = {"what": 2.0, "pronouns": 20.0, "banned": 1.0}
"""Limits of a room that the table lacks."""

TOLERANCE = 0.3

_NO_PROSE = re.compile(r"```.*?```|`[^`]*`|\|[-| ]+\|", re.DOTALL)
"""Parts of a page that are code, and the rules of tables."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Words of a room, and those of each kind."""

    words: int
    hits: dict[str, int]

    def rate(self, kind: str) -> float:
        """Return the hits per 1,000 words, rounded up to one decimal place."""
        return math.ceil(10_000 * self.hits[kind] / max(self.words, 1)) / 10

    def over(self, limits: dict[str, float]) -> dict[str, int]:
        """Return how many words of each kind are too many. A small room may have one more, by rounding."""
        return {
            kind: excess
            for kind, limit in limits.items()
            if (excess := self.hits[kind] - math.ceil((limit + TOLERANCE) * self.words / 1000)) > 0
        }


def _messages_in(tree: ast.AST) -> Iterator[str]:
    """Yield the literal texts of raised errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for each in node.exc.args:
                parts = each.values if isinstance(each, ast.JoinedStr) else [each]
                texts = [part.value for part in parts if isinstance(part, ast.Constant)]
                yield "{}".join(text for text in texts if isinstance(text, str))


def _prose_of_module(path: Path) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join([*(str(text.value) for text in docstrings_in(path)), *comments, *_messages_in(tree_of(path))])


def _pages() -> Iterator[tuple[str, Path]]:
    """Yield each page with its room: itself, or the folder of decisions."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield name_of(path if path.parent.name in ("docs", ROOT.name) else path.parent), path


def measured() -> dict[str, Counts]:
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for path in FILES:
        texts[room_of(path)].append(_prose_of_module(path))
    for room, path in _pages():
        texts[room].append(_NO_PROSE.sub(" ", path.read_text(encoding="utf-8")))
    return {room: counts_of("\n".join(parts)) for room, parts in sorted(texts.items())}


def counts_of(text: str) -> Counts:
    words = len(re.findall(r"[A-Za-z']+", text))
    return Counts(words, {kind: len(pattern.findall(text)) for kind, pattern in PATTERNS.items()})


def limits() -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return table


def table_of(rooms: dict[str, Counts], old: dict[str, dict[str, float]], *, allow_up: bool) -> str:
    """Return the text of the table: the rates, or the old limits where those are lower."""
    lines = ["# Most words of each kind per 1,000. `python -m tests.house.prose --write` lowers them."]
    for room, counts in rooms.items():
        bounds = dict.fromkeys(WORDS, math.inf) if allow_up else old.get(room, NEW_ROOM)
        values = ", ".join(f"{kind} = {min(counts.rate(kind), bounds[kind]):.1f}" for kind in WORDS)
        lines.append(f'"{room}" = {{{values}}}')
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the limits in prose.toml to the rates")
    parser.add_argument("--allow-up", action="store_true", help="also raise limits")
    options = parser.parse_args()
    rooms = measured()
    if options.write:
        TABLE.write_text(table_of(rooms, limits(), allow_up=options.allow_up), encoding="utf-8")
    print(f"{'per 1,000 words':44s}" + "".join(f"{kind:>10s}" for kind in WORDS) + f"{'words':>10s}")
    for room, counts in rooms.items():
        print(f"{room:44s}" + "".join(f"{counts.rate(kind):10.1f}" for kind in WORDS) + f"{counts.words:10d}")


if __name__ == "__main__":
    main()
