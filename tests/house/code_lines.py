"""Code lines of each room of `src/holdfast`.

    python -m tests.house.code_lines           prints the lines
    python -m tests.house.code_lines --write   writes the lines to code_lines.toml

Blank lines, comments, docstrings and strings below fields are no code.
"""

from __future__ import annotations

import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

from tests.house.source import FILES, docstrings_in, room_of

TABLE = Path(__file__).with_suffix(".toml")

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip


def code_lines_in(path: Path) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for text in docstrings_in(path):
        assert text.end_lineno is not None
        lines.difference_update(range(text.lineno, text.end_lineno + 1))
    return len(lines)


def measured() -> dict[str, int]:
    counts: Counter[str] = Counter()
    for path in FILES:
        counts[room_of(path)] += code_lines_in(path)
    return dict(sorted(counts.items()))


def main() -> None:
    rooms = measured()
    text = "# Code lines by room. `python -m tests.house.code_lines --write` writes this file.\n"
    text += "".join(f'"{room}" = {lines}\n' for room, lines in rooms.items())
    if "--write" in sys.argv[1:]:
        TABLE.write_text(text, encoding="utf-8")
    print(text, f"# in all: {sum(rooms.values())}", sep="")


if __name__ == "__main__":
    main()
