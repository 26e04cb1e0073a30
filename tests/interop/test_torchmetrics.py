"""Metrics of torchmetrics: their state is kept, or the save says that it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError

torchmetrics = pytest.importorskip("torchmetrics")


def mean() -> nn.Module:
    return torchmetrics.MeanMetric()


def collection() -> nn.Module:
    return torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()})


class WithMetric(nn.Module):
    """A model that logs a metric, as those of Lightning do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.loss = torchmetrics.MeanMetric()


def kept(make: Callable[[], nn.Module]) -> nn.Module:
    made = make()
    made.persistent(True)
    return made


@pytest.mark.parametrize("make", [mean, collection])
def test_a_metric_that_keeps_its_count_to_itself_is_refused(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    metric = make()
    metric.update(torch.tensor(3.0))
    with pytest.raises(InvalidError, match=r"metric: .*persistent\(True\)"):
        holdfast.save(tmp_path / "lost", {"metric": metric}, process_group=False)
    assert not (tmp_path / "lost").exists()
    holdfast.save(tmp_path / "without", {"metric": metric, "step": 1}, skip="metric", process_group=False)
    with pytest.raises(InvalidError, match=r"metric: .*persistent\(True\)"):
        holdfast.load(tmp_path / "without", {"metric": make(), "step": 0}, process_group=False)


@pytest.mark.parametrize("make", [mean, collection])
def test_a_persistent_metric_counts_on(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    metric, fresh = kept(make), kept(make)
    for value in (3.0, 5.0):
        metric.update(torch.tensor(value))
    holdfast.save(tmp_path / "kept", {"metric": metric}, process_group=False)
    holdfast.load(tmp_path / "kept", {"metric": fresh}, process_group=False)
    for each in (metric, fresh):
        each.update(torch.tensor(0.5))
    assert metric.compute() == fresh.compute()


def test_a_metric_inside_a_model_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = WithMetric()
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        holdfast.save(tmp_path / "reset", {"logging_model": model}, process_group=False)
        assert "begin anew" not in caplog.text  # Nothing was counted.
        model.loss.update(torch.tensor(3.0))
        for name in ("first", "second"):
            holdfast.save(tmp_path / name, {"logging_model": model}, process_group=False)
    assert caplog.text.count("logging_model.loss: metrics that keep what they count out of state_dict()") == 1
    holdfast.load(tmp_path / "first", {"logging_model": WithMetric()}, process_group=False)
