"""The folders of the tests: small enough that a reader finds a test by its theme."""

from __future__ import annotations

from collections import Counter

from tests.house.source import ROOT

FOLDER_FILES_MAX = 25
"""Only Python files count: a checkpoint that is test data has as many files as its writer made."""


def test_no_folder_has_too_many_files() -> None:
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))
    assert files["tests/house"], "no test file was found"
    large = {folder: count for folder, count in files.items() if count > FOLDER_FILES_MAX}
    assert not large, f"more than {FOLDER_FILES_MAX} files; sort them into folders by theme: {large}"
