"""What people see of a save and a load in the log."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.training.telemetry.log_lines import shown_seconds
from tests.unit.ranks import World, saved, sharded


def lines_of(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.00012, "0.12 ms"), (0.0124, "12 ms"), (0.41, "0.41 s"), (12.34, "12.3 s"), (200, "3 min 20 s")],
)
def test_seconds_for_people(seconds: float, shown: str) -> None:
    assert shown_seconds(seconds) == shown


def test_one_line_a_save_and_one_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = {"weights": torch.zeros(1 << 18), "step": 300}
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(300, state, metrics={"loss": 2.31}).wait()
        assert manager.load(state) == 300
    (saved,) = lines_of(caplog, "saved:")
    assert re.fullmatch(r"step 300 saved: 1\.0 MiB in \S+ m?s \(training waited \S+ m?s\), loss=2\.31", saved)
    (loaded,) = lines_of(caplog, "loaded:")
    where = re.escape(f"{tmp_path}/run/step-000000000300")
    assert re.fullmatch(rf"step 300 loaded: 1\.0 MiB in \S+ m?s, 1 tensor, from {where}", loaded)


def test_the_line_of_a_coded_save_says_how_much_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = {"weights": torch.randn(1 << 17).bfloat16(), "ids": torch.arange(1 << 15)}
    settings = holdfast.Settings(compression="on", lease_seconds=8.75)
    report = holdfast.save(tmp_path / "c", state, process_group=False, settings=settings)
    (saved,) = lines_of(caplog, "saved:")
    assert saved.endswith(f"), coded to {report.stored_bytes / report.bytes:.0%}")


def test_the_line_of_a_load_by_several_ranks_says_whose_bytes_it_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def part(rank: int, run: CheckpointManager) -> None:
        state = {"weights": sharded(2)}
        saved(run, 1, state)
        run.load(state)

    World(2).play(part)
    (loaded,) = lines_of(caplog, "loaded:")
    assert re.match(r"step 1 loaded: \S+ \S+ on rank 0 of 2 in \S+ m?s, 1 tensor, from ", loaded), loaded


@pytest.mark.parametrize("staging", ["lazy", "copy"])
def test_a_line_of_every_kind_of_save(staging: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = holdfast.Settings(staging=staging)
    state = {"weights": torch.zeros(1 << 20)}
    with holdfast.CheckpointManager(tmp_path / "run", settings=settings, process_group=False) as manager:
        report = manager.save(1, state).wait()
    (saved,) = lines_of(caplog, "saved:")
    assert report.committed_seconds > 0 and saved.startswith("step 1 saved: 4.0 MiB in ")


def test_a_save_by_path_is_named_by_its_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = {"weights": torch.zeros(4)}
    holdfast.save(tmp_path / "one", state, process_group=False)
    holdfast.load(tmp_path / "one", state, process_group=False)
    assert lines_of(caplog, "saved:")[0].startswith(f"{tmp_path}/one saved: 16 B in ")
    assert lines_of(caplog, "loaded:")[0].startswith("loaded: 16 B in ")


def test_no_message_shows_a_url(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    state = {"weights": torch.zeros(4)}
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(1, state).wait()
        manager.load(state)
        with pytest.raises(holdfast.MissingError) as missing:
            manager.load(state, 2)
    assert "file://" not in caplog.text and "file://" not in str(missing.value)
    assert f"{tmp_path}/run" in str(missing.value)


def test_holdfast_installs_no_handler(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "one", {"weights": torch.zeros(4)}, process_group=False)
    names = ["holdfast", *(name for name in logging.root.manager.loggerDict if name.startswith("holdfast."))]
    assert [name for name in names if logging.getLogger(name).handlers] == []


def test_a_loss_that_needs_grad_is_a_metric(tmp_path: Path) -> None:
    loss = torch.ones(1, requires_grad=True).sum() * 3
    with (
        holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        manager.save(1, {"weights": torch.zeros(4)}, metrics={"loss": loss}).wait()
    assert holdfast.open_checkpoint(tmp_path / "run/step-000000000001").manifest.metrics == {"loss": 3.0}
