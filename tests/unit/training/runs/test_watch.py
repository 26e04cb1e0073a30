"""A watch sees reports, drains and repairs that come after its first look, and forgets the rest."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import api
from holdfast.errors import UnavailableError
from holdfast.stored.leases.seen import LeaseWriter
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


@contextmanager
def without_answers(watch: api.RunWatch, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no listing of the store of a watch be answered."""

    def fails(self: object, prefix: str = "", **more: object) -> Any:
        raise UnavailableError("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(type(watch._places[0]._store), "list", fails)
        yield


def test_a_store_that_failed_once_is_asked_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = api.watch_run(root)
    watch.refresh()
    with without_answers(watch, monkeypatch):
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


def test_a_tag_that_moves_is_news(root: Path) -> None:
    api.tag(root, 2, "best")
    watch = api.watch_run(root)
    assert {each.step for each in watch.refresh().steps if each.tags} == {2}
    api.tag(root, 3, "best", move=True)
    assert {each.step for each in watch.refresh().steps if each.tags} == {3}


def test_a_manifest_that_goes_alone_is_missed_within_some_looks(root: Path) -> None:
    watch = api.watch_run(root)
    assert statuses(watch)[2] == "committed"
    (folder(root, 2) / "manifest.json").unlink()
    assert statuses(watch)[2] == "unfinished"


def test_a_near_tier_that_comes_later_is_told(root: Path, tmp_path: Path) -> None:
    watch = api.watch_run(root)
    watch.refresh()
    near = holdfast.Tier(tmp_path / "near", every=1)
    with holdfast.CheckpointManager(root, every=100, process_group=False, near=near) as manager:
        state = {"w": np.zeros(4)}
        manager.load(state)
        manager.save(STEPS + 1, state, near_only=True).wait("near")
        watch.refresh()
        assert watch.has_other_places
        assert STEPS + 1 in {each.step for each in api.watch_run(root).refresh().steps}


def test_reports_that_cannot_be_listed_hold_up_nothing(root: Path, tmp_path: Path) -> None:
    reports = folder(root, 3) / "reports"
    reports.rename(tmp_path / "elsewhere")
    reports.symlink_to(tmp_path / "elsewhere")
    watch = api.watch_run(root)
    works = read(watch)
    assert works[3] is None and works[2] is not None and len(watch.unreadable) == 1


def test_more_unreadable_saves_than_are_read_at_once_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = api.watch_run(root)
    watch.refresh()
    with without_answers(watch, monkeypatch):
        assert [watch.read_saves(2) for _ in range(4)] == [3, 1, 0, 0]
        version = watch.version
        assert watch.read_saves(2) == 0 and watch.version == version


def unfinished(root: Path, step: int, voted: int = 1) -> None:
    """Leave an attempt of two ranks, of which some have voted."""
    parts = folder(root, step) / ("0" * 16) / "parts"
    parts.mkdir(parents=True)
    for rank in range(voted):
        (parts / f"r{rank:05d}.msgpack").touch()


def lines(root: Path, *begun: int, ranks: int = 2) -> str:
    """Write events of some ranks that began to save the next step."""
    path = root.parent / f"events-{len(begun)}.jsonl"
    common = {"time": "2026-11-30T12:00:00+00:00", "event": "began", "verb": "save", "world_size": ranks}
    path.write_text("".join(f"{json.dumps({**common, 'rank': rank, 'step': STEPS + 1})}\n" for rank in begun))
    return str(path)


def test_a_rank_without_events_is_waited_for(root: Path) -> None:
    unfinished(root, STEPS + 1)
    for begun in ((0,), (0, 1)):
        watch = api.watch_run(root, events=[lines(root, *begun)])
        watch.refresh()
        watch.writer = LeaseWriter(None, "holds")
        (found,) = watch.under_way()
        assert (found.ranks, found.phase) == ((1,), "write"), begun


def test_an_attempt_of_a_killed_job_is_under_way_no_more(root: Path) -> None:
    unfinished(root, 16)
    watch, state = api.watch_run(root), {"w": np.zeros(4)}
    with holdfast.CheckpointManager(root, every=1, process_group=False) as manager:
        manager.load(state)
        found = []
        for step in range(STEPS + 1, STEPS + 4):
            manager.save(step, state).wait()
            watch.refresh()
            found.append([each.step for each in watch.under_way()])
    assert found[0] == [16] and found[-1] == []
