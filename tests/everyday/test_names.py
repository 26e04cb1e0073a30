"""`model_best.pth`, `latest`, "that step": names for steps, in a training loop and in a shell."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.settings import Settings

LOSSES = {100: 3.0, 200: 1.5, 300: 2.0}


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.ones(2) * step}


def trained(root: Path) -> None:
    """Train as many do: the newest two steps, and the best one under its name."""
    best = float("inf")
    soon = Settings(collect_grace_seconds=0.1)
    with holdfast.CheckpointManager(root, process_group=False, keep_last=2, settings=soon) as manager:
        for step, loss in LOSSES.items():
            is_best, best = loss < best, min(best, loss)
            report = manager.save(
                step, weights(step), metrics={"loss": loss}, move_tags={"best"} if is_best else ()
            ).wait()
            assert report is not None and report.untagged == ()


def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_tag_that_exists_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        for step in (1, 2):
            report = manager.save(step, weights(step), tags=["best"]).wait()
        assert manager.steps() == [1, 2]
        assert report is not None and "tag 'best' names step 1" in report.untagged[0]
        (said,) = [record for record in caplog.records if "not tagged best" in record.getMessage()]
        assert said.levelno == logging.WARNING
        manager.tag(2, "best", move=True)
        assert manager.load(weights(0), "best") == 2 == manager.load(weights(0), step="latest")


def test_the_best_the_newest_and_that_one(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trained(root)
    for name, step in {"best": 200, "latest": 300, 200: 200, "300": 300}.items():
        state = weights(0)
        assert holdfast.load(root, state, step=name, process_group=False).step == step
        assert state["w"].tolist() == [step, step]
        assert holdfast.open_checkpoint(root, step=name).step == step
        assert holdfast.read(root, step=name)["w"].tolist() == [step, step]  # type: ignore[attr-defined]
    assert holdfast.load(root, weights(0), best="loss", process_group=False).step == 200
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        assert manager.load(weights(0), best=("loss", "min")) == 200
    with pytest.raises(holdfast.MissingError, match="no tag 'bets'; there are: best"):
        holdfast.load(root, weights(0), step="bets", process_group=False)
    with pytest.raises(holdfast.InvalidError, match="is the root of a run"):
        holdfast.load(root, weights(0), process_group=False)


def test_a_tag_is_put_with_maybe_save(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, every=2) as manager:
        for step in range(1, 5):
            manager.maybe_save(step, weights(step), tags=f"seen-{step}", move_tags="last")
        manager.wait()
    tags = {tag.name: tag.step for tag in holdfast.api.list_steps(tmp_path / "run").tags}
    assert tags == {"seen-2": 2, "seen-4": 4, "last": 4}


def test_in_a_shell(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trained(root)
    verified = shell("verify", root)
    assert verified.returncode == 0 and "step 300, the newest valid one; --step chooses another" in verified.stderr
    exported = shell("export", root, tmp_path / "best", "--to", "holdfast", "--step", "best")
    assert exported.returncode == 0, exported.stderr
    assert holdfast.read(tmp_path / "best")["w"].tolist() == [200, 200]  # type: ignore[attr-defined]
    moved = shell("tag", root, "300", "best", "--move")
    assert moved.returncode == 0, moved.stderr
    assert holdfast.open_checkpoint(root, step="best").step == 300


def test_other_tools_find_the_newest_step(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trained(root)
    newest = root / (root / "latest").read_text()
    assert holdfast.open_checkpoint(newest).step == 300
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        manager.load(weights(0), "best")
        manager.save(250, weights(250)).wait()
    assert (root / "latest").read_text() == "step-000000000250"
