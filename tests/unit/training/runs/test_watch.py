"""A watch sees reports, drains and repairs that come after its first look, and forgets the rest."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import api
from holdfast.errors import UnavailableError
from holdfast.stored.repository.near_tier import NEAR_FILE

STEPS = 5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    seen = [holdfast.observers.jsonl(str(tmp_path / "events.jsonl"))]
    with holdfast.CheckpointManager(tmp_path / "run", every=1, process_group=False, observers=seen) as manager:
        for step in range(1, STEPS + 1):
            manager.save(step, {"w": np.full(4, float(step))}).wait()
    return tmp_path / "run"


def folder(root: Path, step: int) -> Path:
    return root / f"step-{step:012d}"


def read(watch: api.RunWatch) -> dict[int, Any]:
    watch.refresh()
    assert watch.read_saves(40) == 0
    return {fact.step: fact.work for fact in watch.facts()}


def test_a_report_that_comes_late_is_read(root: Path) -> None:
    (report,) = folder(root, STEPS).glob("reports/save-*")
    report.rename(root.parent / "late")
    watch = api.watch_run(root)
    assert read(watch)[STEPS] is None
    version = watch.version
    assert read(watch)[STEPS] is None and watch.version == version
    (root.parent / "late").rename(report)
    assert read(watch)[STEPS].step == STEPS
    assert watch.version != version


def test_a_store_that_failed_once_is_asked_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = api.watch_run(root)
    watch.refresh()
    with monkeypatch.context() as patch:

        def fails(self: object, prefix: str = "", **more: object) -> Any:
            raise UnavailableError("the store does not answer")

        patch.setattr(type(watch._places[0]._store), "list", fails)
        watch.read_saves(40)
    assert not watch.works and len(watch.unreadable) == STEPS
    assert all(work is not None for work in read(watch).values())
    assert not watch.unreadable


def test_a_removed_step_is_forgotten(root: Path) -> None:
    (report,) = folder(root, 2).glob("reports/save-*")
    report.write_bytes(b"damaged")
    watch = api.watch_run(root)
    read(watch)
    assert len(watch.works) == STEPS and len(watch.unreadable) == 1
    shutil.rmtree(folder(root, 2))
    read(watch)
    assert len(watch.works) == STEPS - 1 and not watch.unreadable


def test_events_count_for_the_run_in_their_lines(root: Path) -> None:
    events = root.parent / "events.jsonl"
    watch = api.watch_run(root, events=[str(events)])
    watch.refresh()
    assert [*watch.events.hosts] == [0]
    root.rename(root.parent / "other")
    other = api.watch_run(root.parent / "other", events=[str(events)])
    other.refresh()
    assert not other.events.hosts


def statuses(watch: api.RunWatch) -> dict[int, str]:
    return {each.step: each.status for each in watch.refresh().steps}


def test_a_manifest_that_was_removed_counts_no_more(root: Path) -> None:
    watch = api.watch_run(root)
    assert set(statuses(watch).values()) == {"committed"}
    (folder(root, 1) / "manifest.json").unlink()
    shutil.rmtree(folder(root, 3))  # This is news: the listing is read again.
    assert statuses(watch) == {1: "unfinished", 2: "committed", 4: "committed", 5: "committed"}


def test_a_damaged_manifest_is_whole_again_once_repaired(root: Path) -> None:
    manifest = folder(root, 1) / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-9])
    watch = api.watch_run(root)
    assert statuses(watch)[1] == "damaged"
    assert watch.refresh() is watch.refresh()
    manifest.write_bytes(whole)
    assert statuses(watch)[1] == "committed"


def test_a_drain_is_followed(tmp_path: Path) -> None:
    near = holdfast.Tier(tmp_path / "near", every=1, keep_last=6)
    with holdfast.CheckpointManager(tmp_path / "run", every=10, process_group=False, near=near) as manager:
        for step in range(1, 7):
            saved = manager.maybe_save(step, {"w": np.full(400, float(step))})
            assert saved is not None
            saved.wait("near")
        watch = api.watch_run(tmp_path / "run")
        record = watch.refresh()
        first = record.steps[0]
        assert first.places == ("near",) and watch.refresh() is record
        source, target = folder(tmp_path / "near", first.step), folder(tmp_path / "run", first.step)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("manifest.json"))
        assert watch.refresh().steps[0].places == ("near",) and watch.refresh().steps[0].drained > 0
        shutil.copy(source / "manifest.json", target)
        assert watch.refresh().steps[0].places == ("near", "root")


def test_the_reach_of_the_redo_log_is_followed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    root = tmp_path / "run"
    with holdfast.CheckpointManager(root, every=1000, process_group=False, differential=True) as manager:
        watch, reached = None, list[int]()
        for step in range(1, 7):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = manager.maybe_save(step, {"model": model, "optimizer": optimizer})
            if handle is not None:
                handle.wait()
            deadline = time.monotonic() + 20
            while manager.recoverable != step:
                assert time.monotonic() < deadline, manager.recoverable
                time.sleep(0.002)
            watch = watch or api.watch_run(root)
            reached += [log.reach for log in watch.refresh().logs[:1]]
    assert reached == [1, 2, 3, 4, 5, 6]


def test_a_drain_of_a_near_tier_elsewhere_is_no_failure(tmp_path: Path) -> None:
    root, near = tmp_path / "run", holdfast.Tier(tmp_path / "near", every=1)
    with holdfast.CheckpointManager(root, every=1, process_group=False, near=near) as manager:
        manager.save(1, {"w": np.full(4, 1.0)}).wait()
    (tmp_path / "near").rename(tmp_path / "away")
    (folder(root, 2) / ("0" * 16) / "parts").mkdir(parents=True)
    assert api.alerts(root) == []
    (root / NEAR_FILE).unlink()
    assert [(each.rule, each.step) for each in api.alerts(root)] == [("failing", 2)]
