"""Health from the call to the manifest, in one process: what is counted, what is marked, what is kept and copied."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

import holdfast
from holdfast.base.types.health import Health
from holdfast.policies import LatestN

NAN = float("nan")
COUNTING = holdfast.Settings(count_nonfinite=True)


def model_of(mask: float = -math.inf) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(700, 600), torch.nn.Linear(600, 3))
    model.register_buffer("mask", torch.full((4,), mask))
    return model


def put(model: torch.nn.Module, value: float, *, at: int = 17) -> None:
    with torch.no_grad():
        model[0].weight.reshape(-1)[at] = value  # type: ignore[index, union-attr]


def health_of(root: Path, step: int) -> Health | None:
    return holdfast.open_checkpoint(root / f"step-{step:012d}").manifest.health


def manager_of(root: Path, settings: holdfast.Settings = COUNTING) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, process_group=False, settings=settings)


@pytest.mark.parametrize("staging", ["copy", "lazy"])
@pytest.mark.parametrize("arena_bytes_max", [None, 0])
def test_however_the_state_is_taken_it_is_counted(
    tmp_path: Path, staging: Literal["copy", "lazy"], arena_bytes_max: int | None
) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    model[1](model[0](torch.ones(2, 700))).sum().backward()  # type: ignore[index]
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "half": torch.zeros(9, dtype=torch.bfloat16)}
    settings = holdfast.Settings(count_nonfinite=True, staging=staging, arena_bytes_max=arena_bytes_max)
    with manager_of(tmp_path, settings) as manager:
        first = manager.save(1, state).wait()
        put(model, NAN)
        optimizer.state[model[0].weight]["exp_avg_sq"][3, 5] = math.inf  # type: ignore[index]
        state["half"][2:4] = -math.inf  # type: ignore[index]
        second = manager.save(2, state).wait()
    assert first is not None and second is not None
    assert first.unhealthy == ()
    assert health_of(tmp_path, 1) == Health({"model.mask": 4}, {})
    news = {"half": 2, "model.0.weight": 1, "optimizer.state.0.weight.exp_avg_sq": 1}
    assert health_of(tmp_path, 2) == Health({**news, "model.mask": 4}, dict.fromkeys(news, 0))
    assert second.unhealthy == tuple(f"{fqn}: {count} non-finite elements, 0 before" for fqn, count in news.items())


def test_a_checkpoint_by_path_is_counted_too(tmp_path: Path) -> None:
    model = model_of()
    put(model, math.inf)
    report = holdfast.save(tmp_path / "here", {"model": model}, settings=COUNTING, process_group=False)
    assert report.unhealthy == ("model.0.weight: 1 non-finite elements, 0 before",)
    manifest = holdfast.open_checkpoint(tmp_path / "here").manifest
    assert manifest.healthy is False
    assert holdfast.save(tmp_path / "there", {"model": model}, process_group=False).unhealthy == ()
    assert holdfast.open_checkpoint(tmp_path / "there").manifest.healthy is None


def test_what_is_expected_is_counted_and_never_marked(tmp_path: Path) -> None:
    settings = holdfast.Settings(count_nonfinite=True, nonfinite_expected=("best", "*.mask"))
    state = {"best": torch.tensor(math.inf), "model": model_of(0.0), "other": torch.tensor(1.0)}
    with manager_of(tmp_path, settings) as manager:
        manager.save(1, state).wait()
        state["model"].mask.fill_(-math.inf)  # type: ignore[union-attr]
        manager.save(2, state).wait()
        state["other"].fill_(NAN)
        manager.save(3, state).wait()
    assert health_of(tmp_path, 1) == Health({"best": 1}, {})
    assert health_of(tmp_path, 2) == Health({"best": 1, "model.mask": 4}, {})
    assert health_of(tmp_path, 3) == Health({"best": 1, "model.mask": 4, "other": 1}, {"other": 0})


def test_a_buffer_that_gets_worse_is_news(tmp_path: Path) -> None:
    model = model_of()
    with manager_of(tmp_path) as manager:
        manager.save(1, {"model": model}).wait()
        model.register_buffer("mask", torch.full((6,), NAN))
        report = manager.save(2, {"model": model}).wait()
    assert report is not None and report.unhealthy == ("model.mask: 6 non-finite elements, 4 before",)


def test_a_buffer_that_the_step_before_did_not_hold_is_meant(tmp_path: Path) -> None:
    model = model_of()
    plain = torch.nn.Sequential(model[0], model[1])  # type: ignore[index]
    with manager_of(tmp_path) as manager:
        saved = [manager.save(1, {"model": plain}).wait(), manager.save(2, {"model": model}).wait()]
        saved.append(manager.save(3, {"model": model}, skip=["*mask"]).wait())
        saved.append(manager.save(4, {"model": model}).wait())
        model.mask.zero_()
        saved.append(manager.save(5, {"model": model}).wait())
        model.mask[1] = NAN
        saved.append(manager.save(6, {"model": model}).wait())
    told = [None if each is None else each.unhealthy for each in saved]
    assert told == [(), (), (), (), (), ("model.mask: 1 non-finite elements, 0 before",)]


@pytest.mark.parametrize("uncounted", [1, 2])
def test_a_mark_outlives_steps_that_were_not_counted(tmp_path: Path, uncounted: int) -> None:
    model = model_of(0.0)
    with manager_of(tmp_path) as manager:
        manager.save(1, {"model": model}).wait()
        model.mask[1] = NAN
        manager.save(2, {"model": model}).wait()
    last = 3 + uncounted
    for step in range(3, last + 1):
        settings = COUNTING if step == last else holdfast.Settings()
        with manager_of(tmp_path, settings) as manager:
            assert manager.load({"model": model}) == step - 1
            report = manager.save(step, {"model": model}).wait()
        assert report is not None
        assert report.unhealthy == (("model.mask: 1 non-finite elements, 0 before",) if step == last else ())
    with manager_of(tmp_path) as manager:
        assert [step for step, why in manager.kept().items() if "last healthy" in why] == [1]


def test_the_last_healthy_step_is_kept_and_a_copy_of_a_marked_one_stays_marked(tmp_path: Path) -> None:
    model = model_of()
    root, copy = tmp_path / "run", tmp_path / "copy"
    soon = replace(COUNTING, collect_grace_seconds=0.1)
    with holdfast.CheckpointManager(root, keep=LatestN(1), process_group=False, settings=soon) as manager:
        for step in range(1, 6):
            if step == 3:
                put(model, NAN)
            manager.save(step, {"model": model}).wait()
        assert manager.kept() == {2: ("last healthy",), 5: ("latest 1", "newest")}
    holdfast.import_checkpoint(root / "step-000000000005", copy, copy=True)
    found = health_of(copy, 5)
    assert found == health_of(root, 5) and found is not None and found.new == {"model.0.weight": 0}


def test_where_the_step_before_cannot_be_read_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    with manager_of(tmp_path) as manager:
        manager.save(1, {"model": model}).wait()
        manifest = tmp_path / "step-000000000001" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-40])
        report = manager.save(2, {"model": model}).wait()
    assert report is not None and report.unhealthy == ()
    assert "step-000000000002: the non-finite counts of earlier steps are not known" in caplog.text


@pytest.mark.parametrize("wrong", [["a"], "a", (1,), None])
def test_patterns_that_are_none_are_refused(wrong: object) -> None:
    with pytest.raises(holdfast.InvalidError, match="nonfinite_expected"):
        holdfast.Settings(nonfinite_expected=wrong)  # type: ignore[arg-type]
