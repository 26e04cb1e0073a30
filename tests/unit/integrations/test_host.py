"""What every integration asks of its framework, and of the checkpoint it is given."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import ConflictError, InvalidError
from holdfast.integrations.host import MARK, Host, mark_of


def host_of(integration: str = "some", package: str = "pytest", **changes: object) -> Host:
    """A host over a package that is installed here."""
    versions = {"tested_from": (0, 1, 0), "tested_to": (999, 0, 0)}
    known: dict[str, object] = {"extra": "some", "model_key": "model", **versions}
    return Host(integration=integration, package=package, **(known | changes))  # type: ignore[arg-type]


def installed() -> tuple[int, int, int]:
    major, minor, patch = pytest.__version__.split(".")[:3]
    return int(major), int(minor), int(patch)


def saved(path: Path, state: dict[str, object]) -> holdfast.api.Checkpoint:
    holdfast.save(path, {"step": 3, **state}, process_group=False)
    return holdfast.open_checkpoint(path)


def test_a_tested_version_is_returned() -> None:
    assert host_of(tested_to=installed()).require() == pytest.__version__


def test_a_missing_framework_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(InvalidError, match=r"no-such-framework is not installed.*pip install 'holdfast\[some\]'"):
        host_of(package="no-such-framework").require()


def test_an_older_version_is_refused_with_the_range() -> None:
    major, minor, patch = installed()
    with pytest.raises(InvalidError, match=rf"expected pytest>={major}\.{minor}\.{patch + 1},<{major}\.{minor + 1}"):
        host_of(tested_from=(major, minor, patch + 1), tested_to=(major, minor, patch + 1)).require()


def test_a_newer_minor_version_is_refused() -> None:
    major, _, _ = installed()
    with pytest.raises(InvalidError, match="outside the tested range"):
        host_of(tested_to=(major - 1, 999, 0)).require()


def test_a_newer_patch_release_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.2.4rc1+cpu")
    with caplog.at_level(logging.WARNING):
        assert host_of(tested_to=(1, 2, 3)).require() == "1.2.4rc1+cpu"
    assert "1.2.4rc1+cpu is newer than the tested 1.2.3" in caplog.text


def test_a_checkpoint_carries_the_mark_of_its_integration(tmp_path: Path) -> None:
    host = host_of()
    checkpoint = saved(tmp_path / "own", {MARK: host.mark()})
    host.require_own(checkpoint)
    host.require_own_root(checkpoint)
    assert mark_of(checkpoint) == {"name": "some", "version": f"pytest {pytest.__version__}", "model": "model"}


def test_a_checkpoint_of_another_integration_is_named_with_the_key_of_its_model(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "other", {MARK: host_of("other", model_key="weights").mark()})
    with pytest.raises(InvalidError, match=r'integrations\.other wrote.*load\(path, \{"weights": model\}'):
        host_of().require_own(checkpoint)
    with pytest.raises(ConflictError, match=r"integrations\.other saved here.*Choose another folder"):
        host_of().require_own_root(checkpoint)


def test_a_checkpoint_without_a_mark_is_no_checkpoint_of_an_integration(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "plain", {})
    assert mark_of(checkpoint) is None
    with pytest.raises(InvalidError, match="no integration wrote this checkpoint"):
        host_of().require_own(checkpoint)
    with pytest.raises(ConflictError, match="a job without an integration saved here"):
        host_of().require_own_root(checkpoint)
    host_of().require_own_root(None)


@pytest.mark.parametrize("module", ["accelerate.tested", "transformers.framework"])
def test_the_extra_installs_the_versions_that_are_taken(module: str) -> None:
    host = importlib.import_module(f"holdfast.integrations.{module}").HOST
    (major, minor, patch), (newest_major, newest_minor, _) = host.tested_from, host.tested_to
    assert patch == 0
    project = Path(__file__).parents[3] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    wanted = f"{host.package}>={major}.{minor},<{newest_major}.{newest_minor + 1}"
    assert wanted in extras[host.extra]
