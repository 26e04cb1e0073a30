"""What `make dist` stands on: the version is in one place, and the trial of the wheel is of the wheel."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import holdfast

HOME = Path(__file__).resolve().parents[2]


def test_the_version_is_in_one_place() -> None:
    with (HOME / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "holdfast.__version__"}
    # A literal, so that the build reads it without an import of the package.
    source = (HOME / "src" / "holdfast" / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [holdfast.__version__]


def test_the_changelog_has_the_version() -> None:
    assert f"\n## [{holdfast.__version__}] - " in (HOME / "CHANGELOG.md").read_text()


def test_the_trial_refuses_a_package_that_is_not_from_the_wheel() -> None:
    trial = runpy.run_path(str(HOME / "release" / "try_wheel.py"))
    with pytest.raises(AssertionError, match="not from the wheel"):
        trial["check_content"](holdfast.__version__)
