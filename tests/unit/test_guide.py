"""The guides tell the truth: every block of Python in them runs, each section by itself in an empty folder."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDES = tuple(DOCS / name for name in ("guide.md", "state.md", "migrating.md", "troubleshooting.md"))


def sections(guide: Path) -> dict[str, list[tuple[int, str]]]:
    """Return the Python blocks of every section, each with the number of its first line."""
    found: dict[str, list[tuple[int, str]]] = {}
    title, block, start = "", None, 0
    for number, line in enumerate(guide.read_text().splitlines(keepends=True), start=1):
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


def needed(guide: Path) -> dict[str, str]:
    """Return the package that a section needs, by its title; the section says so in a comment below its heading."""
    return dict(re.findall(r"^## (.+)\n\n<!-- needs: (\w+) -->$", guide.read_text(), re.MULTILINE))


WITH_CODE = (*GUIDES, DOCS / "data.md", DOCS / "layout-language.md", DOCS / "tiers.md", DOCS / "memory.md")
"""Pages whose code runs; a guide shows code in every section."""

SECTIONS = {(guide, title): blocks for guide in WITH_CODE for title, blocks in sections(guide).items()}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_section_shows_code(guide: Path) -> None:
    found = sections(guide)
    assert found
    assert [title for title, blocks in found.items() if not blocks] == []


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder in memory, where this machine has one."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield folder


# DCP says so for each checkpoint of one process.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("guide", "title"), list(SECTIONS), ids=[title for _, title in SECTIONS])
def test_section_runs(
    guide: Path,
    title: str,
    tmp_path: Path,
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    if any("s3://my-bucket" in code for _, code in SECTIONS[guide, title]):
        server = request.getfixturevalue("objects")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        server.client().create_bucket(Bucket="my-bucket")
    names: dict[str, object] = {"__name__": "guide"}
    with warnings.catch_warnings():
        if package := needed(guide).get(title):
            # Other packages warn of much that is no business of Holdfast.
            warnings.simplefilter("ignore")
            pytest.importorskip(package)
        for start, code in SECTIONS[guide, title]:
            # So many empty lines that a traceback tells the line of the guide.
            exec(compile("\n" * (start - 1) + code.replace("/dev/shm", memory), str(guide), "exec"), names)
