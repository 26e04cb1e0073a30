"""The guide tells the truth: every block of Python in it runs, each section by itself in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"


def sections() -> dict[str, list[tuple[int, str]]]:
    """Return the Python blocks of every section, each with the number of its first line."""
    found: dict[str, list[tuple[int, str]]] = {}
    title, block, start = "", None, 0
    for number, line in enumerate(GUIDE.read_text().splitlines(keepends=True), start=1):
        if block is not None and line.rstrip() == "```":
            found[title].append((start, "".join(block)))
            block = None
        elif block is not None:
            block.append(line)
        elif heading := re.fullmatch(r"## (.+)\n?", line):
            title = heading[1]
            found[title] = []
        elif line.rstrip() == "```python":
            block, start = [], number + 1
    assert block is None, "a block is not closed"
    return found


SECTIONS = sections()


def test_every_section_shows_code() -> None:
    assert SECTIONS
    assert [title for title, blocks in SECTIONS.items() if not blocks] == []


@pytest.mark.parametrize("title", list(SECTIONS))
def test_section_runs(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "guide"}
    for start, code in SECTIONS[title]:
        # So many empty lines that a traceback tells the line of the guide.
        exec(compile("\n" * (start - 1) + code, str(GUIDE), "exec"), names)
