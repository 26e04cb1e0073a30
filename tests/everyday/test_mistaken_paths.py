"""Someone names a path that is wrong, or one that no shell has expanded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import holdfast

STATE = {"weights": torch.zeros(4)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_at(root: str) -> None:
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        manager.save(1, STATE).wait()


def test_a_tilde_is_the_home_folder(home: Path) -> None:
    run_at("~/runs/7")
    holdfast.save("~/one", STATE, process_group=False)
    holdfast.load("~/one", STATE, process_group=False)
    assert holdfast.open_checkpoint("~/runs/7/step-000000000001").step == 1
    holdfast.export("~/one", "~/exported", to="safetensors")
    assert (home / "runs/7/holdfast.json").exists() and (home / "one/manifest.json").exists()
    assert (home / "exported").is_dir() and not (home / "~").exists()


def test_a_path_with_nothing_at_it(home: Path) -> None:
    for read in (
        lambda: holdfast.load("typo", STATE, process_group=False),
        lambda: holdfast.open_checkpoint("typo"),
    ):
        with pytest.raises(holdfast.MissingError, match=f"no checkpoint at {home}/typo: nothing is there"):
            read()


def test_a_new_run_is_said_once(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with holdfast.CheckpointManager("new", process_group=False) as manager:
        assert manager.load(STATE) is None
    said = [record.getMessage() for record in caplog.records if "new run" in record.getMessage()]
    assert said == [f"starting a new run at {home}/new: it has no committed step"]


def test_a_run_one_level_below_is_named(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_at("runs/7")
    below = f"Runs are one level below: {home}/runs/7"
    with holdfast.CheckpointManager("runs", process_group=False) as manager:
        assert manager.load(STATE) is None
    assert below in caplog.text
    with pytest.raises(holdfast.MissingError, match=below):
        holdfast.load("runs", STATE, process_group=False)
    with pytest.raises(holdfast.MissingError, match=below):
        holdfast.api.list_steps("runs")
