"""A watch sees reports, drains and repairs that come after its first look, and forgets the rest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import api
from holdfast.errors import UnavailableError

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
