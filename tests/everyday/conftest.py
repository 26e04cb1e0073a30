"""A run with frozen weights that was made once; each test gets a copy of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.everyday.frozen_run import made_at, ran


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "run"
    made_at(root)
    return root


@pytest.fixture
def run(made_run: Path, tmp_path: Path) -> Path:
    """A copy, with its hard links, of a run of steps 1, 2 and 3."""
    ran("cp", "-a", made_run, tmp_path / "run")
    return tmp_path / "run"
