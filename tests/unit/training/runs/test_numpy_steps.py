"""Integers of numpy are taken wherever a step is; other numbers are refused, with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import api
from holdfast.errors import InvalidError
from holdfast.policies import AtSteps, EveryNSteps, LatestN

KINDS = [np.int64, np.int32, np.uint8]


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_that_takes_a_step(tmp_path: Path, kind: Any) -> None:
    root = tmp_path / "run"
    with holdfast.CheckpointManager(root, every=kind(2), keep_last=kind(3)) as manager:
        for step in range(1, 5):
            manager.maybe_save(kind(step), {"w": torch.full((2,), float(step))})
        manager.save(kind(7), {"w": torch.full((2,), 7.0)}).wait()
        manager.wait()
        manager.tag(kind(4), "good")
        assert manager.steps() == [2, 4, 7] and all(type(step) is int for step in manager.steps())
        state = {"w": torch.zeros(2)}
        loaded = manager.load(state, kind(4))
        assert loaded == 4 and type(loaded) is int and state["w"].tolist() == [4, 4]
    api.tag(root, kind(2), "first")
    assert api.repair(root, step=kind(2)) is not None
    imported = api.import_checkpoint(root / "step-000000000002", tmp_path / "other", step=kind(9), copy=True)
    assert imported.step == 9 and type(imported.step) is int


def test_policies_take_them() -> None:
    assert EveryNSteps(np.int64(3)) == EveryNSteps(3) and LatestN(np.int32(2)) == LatestN(2)
    assert AtSteps(*np.arange(3)) == AtSteps(0, 1, 2)
    assert all(type(step) is int for step in AtSteps(*np.arange(3)).steps)
    for wrong in (np.bool_(True), True, np.float64(2), np.int64(-1)):
        with pytest.raises(InvalidError):
            EveryNSteps(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidError):
            AtSteps(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (1.0, r"step='1\.0' \(float\); expected a whole number from 0 to 999999999999\. Pass int\(step\)$"),
        (torch.tensor(1), r"\(Tensor\).*Pass int\(step\)$"),
        (np.float32(1), r"\(float32\).*Pass int\(step\)$"),
        (np.int64(-1), r"step='-1' \(int\)"),
        (True, r"\(bool\); expected a whole number from 0 to 999999999999$"),
        (None, r"\(NoneType\); expected a whole number from 0 to 999999999999$"),
    ],
)
def test_other_numbers_are_refused(tmp_path: Path, step: Any, said: str) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", every=1) as manager:
        for save in (manager.save, manager.maybe_save):
            with pytest.raises(InvalidError, match=said):
                save(step, {"w": torch.ones(1)})
