"""Loads that discard newer steps, and saves at the step just loaded: on several ranks, with faults, beside readers."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.api import list_steps, remove_steps
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.types.timeline import Fork, Timeline
from holdfast.errors import ConflictError, CorruptError, InvalidError, UnavailableError
from holdfast.settings import Settings
from holdfast.stored.leases.process import this_process
from holdfast.stored.leases.reader import put_lease
from holdfast.stored.repository.epochs import current_fence, newest_epoch
from holdfast.stored.repository.quarantine import quarantine
from holdfast.stored.repository.timeline_records import TimelineRecord, put_record, record_keys, timeline_records
from holdfast.stored.repository.timelines import committed_steps, run_timelines
from holdfast.training.runs.removal.chosen_steps import ChosenNames
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import GlobalTensor
from tests.support.tuning import tuned
from tests.unit.ranks import World, plain, saved, sharded

SETTINGS = tuned(Settings(chunk_bytes=4096, collect_grace_seconds=0.0), window_bytes=8192)


def manager_at(root: Path) -> holdfast.CheckpointManager:
    manager = holdfast.CheckpointManager(root, process_group=False, preemption=False, settings=SETTINGS)
    manager._parts.collecting = None  # Tests collect when they want to.
    return manager


def state_of(step: int) -> dict[str, object]:
    return {"weights": torch.full((3000,), float(step)), "step": step}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with manager_at(tmp_path) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step)).wait()
    return tmp_path


def store_of(root: Path) -> LocalStore:
    return LocalStore(root, settings=SETTINGS)


def collect(manager: CheckpointManager) -> list[str]:
    """Do what the background does; return the steps that were removed."""
    parts = manager._parts
    choice = ChosenNames(is_all=True)
    collector = CheckpointGC(parts.store, SystemClock(), None, parts.writer_lease, parts.pins, choice)
    report = collector.collect(0.0, lambda _: False)
    assert report is not None
    return [*map(str, report.steps), *(name.partition("@")[0] for name in report.superseded)]


def names(root: Path) -> list[str]:
    return [record.name.partition("@")[0] for record in list_steps(root).steps if record.manifest is not None]


# ------------------------------------------------------------------------------------------------- several ranks


def test_every_rank_has_the_same_report_and_goes_on() -> None:
    world = World(2, settings=SETTINGS)

    def part(rank: int, run: CheckpointManager) -> object:
        state = {"w": sharded(2), "p": plain(1.0)}
        for step in (1, 2, 3):
            saved(run, step, state)
        assert run.load(state, 1, discard_newer=True) == 1
        report = run.load_report
        saved(run, 2, state)
        return None if report is None else (report.discarded, report.left)

    first, second = world.play(part)
    assert first == second
    assert isinstance(first, tuple) and [name[:2] for name in first[0]] == ["2@", "3@"] and first[1] == ()
    assert world.committed() == [1, 2]


def test_ranks_that_differ_are_all_refused_and_nothing_goes() -> None:
    for choosing in ((0,), (1,)):
        world = World(2)

        def part(rank: int, run: CheckpointManager, choosing: tuple[int, ...] = choosing) -> object:
            state = {"w": sharded(2), "p": plain(1.0)}
            for step in (1, 2):
                saved(run, step, state)
            try:
                return run.load({**state, "p": plain(7.0)}, 1, discard_newer=rank in choosing)
            except InvalidError as error:
                return str(error)

        for text in world.play(part):
            assert isinstance(text, str) and "expected the same on every rank" in text
        assert world.committed() == [1, 2]


class _Kept(GlobalTensor):
    """A tensor that can be told from a later one at its address."""


def kept(value: float) -> _Kept:
    return _Kept("float32", np.full(100, value, dtype=np.float32), None)


@pytest.mark.parametrize("changed", [(), (0,), (1,), (0, 1)])
def test_a_save_at_the_loaded_step_is_finished_only_if_no_rank_has_changed(changed: tuple[int, ...]) -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, {"p": kept(1.0)})
        state: dict[str, object] = {"p": kept(0.0)}
        assert run.load(state) == 1
        if rank in changed:
            state["p"] = kept(1.0)
        try:
            report = run.save(1, state, tags=["again"]).wait(timeout=20.0)
        except ConflictError as error:
            assert "already there" in str(error) and "the state is not as loaded" in str(error)
            return "refused"
        assert report is not None and report.bytes == 0
        saved(run, 2, state)
        return "finished"

    assert world.play(part) == ["refused" if changed else "finished"] * 2
    tags = [entry.key for entry in world.store.list("tags/")]
    assert tags == ([] if changed else ["tags/again.json"])


# ---------------------------------------------------------------------------------------------- the state as loaded


@pytest.mark.parametrize("how", ["only", "cast", "key", "pattern"])
def test_a_load_of_a_part_is_no_whole_one(tmp_path: Path, how: str) -> None:
    state = {"a": torch.ones(10), "b": torch.ones(10)}
    with manager_at(tmp_path) as manager:
        manager.save(1, state).wait()
        if how == "only":
            manager.load(state, only="a")
        elif how == "cast":
            manager.load(state, cast=True)
        else:
            manager.load({"a": state["a"]} if how == "key" else state)
        with pytest.raises(ConflictError, match=r"already there.*only part of the step"):
            manager.save(1, state, only="a" if how == "pattern" else None).wait()


def test_metrics_of_a_finished_save_are_named_in_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(0)
    with manager_at(root) as manager:
        manager.load(state)
        manager.save(4, state, metrics={"loss": 0.5}).wait()
        manager.save(4, state).wait()
        manager.save(5, state).wait()
        with pytest.raises(ConflictError):
            manager.save(4, state).wait()
    assert "not added: loss" in caplog.text


def test_a_loaded_step_that_is_gone_is_saved_again(root: Path) -> None:
    state = state_of(0)
    with manager_at(root) as manager:
        manager.load(state)
        remove_steps(root, [4], grace_seconds=0.0)
        report = manager.save(4, state).wait()
        assert report is not None and report.bytes > 0
    assert committed_steps(store_of(root)) == [1, 2, 3, 4]


class _Loader:
    """An object whose `state_dict` has an effect, as that of a data loader that starts its workers."""

    calls = 0

    def state_dict(self) -> dict[str, int]:
        self.calls += 1
        return {"at": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"at": 3}


def test_a_load_calls_no_state_dict_afterwards(tmp_path: Path) -> None:
    weights = torch.ones(10)
    with manager_at(tmp_path) as manager:
        manager.save(1, {"weights": weights, "loader": _Loader()}).wait()
        loader = _Loader()
        counts = []
        manager.load({"weights": weights, "loader": loader})
        counts.append(loader.calls)
        manager.load({"weights": weights, "loader": loader}, only=["weights", "loader*"])
        assert loader.calls == 2 * counts[0], "a whole load looks no further than one of a part"
        assert manager.load({"weights": weights, "loader": loader}) == 1
        assert manager.save(1, {"weights": weights, "loader": loader}).wait().bytes == 0  # type: ignore[union-attr]


def test_a_state_that_shows_no_training_is_never_finished(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        manager.save(1, {"step": 1}).wait()
        manager.load({"step": 0})
        with pytest.raises(ConflictError, match="already there"):
            manager.save(1, {"step": 1}).wait()


# ------------------------------------------------------------------------------------------------- what stays


def test_a_discarded_step_that_somebody_reads_stays_until_its_reader_is_done(root: Path) -> None:
    key = put_lease(store_of(root), this_process(SystemClock(), 60.0), 4, 1)
    with manager_at(root) as manager:
        manager.load(state_of(0), 2, discard_newer=True)
        assert collect(manager) == ["3"] and names(root) == ["1", "2", "4"]
        store_of(root).delete([key])
        assert collect(manager) == ["4"] and names(root) == ["1", "2"]
        assert record_keys(store_of(root)), "no manifest states the timeline yet"
        manager.save(3, state_of(3)).wait()
        collect(manager)
    assert not record_keys(store_of(root))


def test_a_tag_within_the_grace_keeps_a_discarded_step(root: Path) -> None:
    with manager_at(root) as manager:
        manager.load(state_of(0), 2, discard_newer=True)
        name = next(record.name for record in list_steps(root).steps if record.step == 4)
        manager.tag(name, "late")
        assert collect(manager) == ["3"] and names(root) == ["1", "2", "4"]
        assert manager.load(state_of(0)) == 2


def test_a_mark_tells_discarded_steps_from_those_that_are_saved_again(root: Path) -> None:
    with manager_at(root) as manager:
        assert manager.load(state_of(0), 2, discard_newer=True) == 2
        manager.save(3, state_of(3)).wait()
        parts = manager._parts
        choice = ChosenNames(is_all=True)
        collector = CheckpointGC(parts.store, SystemClock(), None, parts.writer_lease, parts.pins, choice)
        marked = collector.mark()
        manager.save(4, state_of(4)).wait()
    # Step 3 had moved already, step 4 stood.
    assert marked.steps == (3, 4)
    third, fourth = marked.names
    assert (third[:2], fourth[:2]) == ("3@", "4@")
    assert {third, fourth}.isdisjoint(record.name for record in list_steps(root).steps if not record.superseded)


def test_the_steps_of_an_older_timeline_stay_superseded(root: Path) -> None:
    with manager_at(root) as manager:
        manager.load(state_of(0), 2)
        for step in (3, 5):
            manager.save(step, state_of(-step)).wait()
        manager.load(state_of(0), 2, discard_newer=True)
        assert sorted(collect(manager)) == ["3", "5"]
        assert manager.steps() == [1, 2], "3 and 4 of the first timeline do not come back"
    assert names(root) == ["1", "2", "3", "4"]
    with manager_at(root) as manager:
        assert manager.load(state_of(0)) == 2


def test_nothing_newer_and_nothing_is_stored(root: Path) -> None:
    with manager_at(root) as manager:
        assert manager.load(state_of(0), 4, discard_newer=True) == 4
        assert manager.load_report is not None and manager.load_report.discarded == ()
    assert not record_keys(store_of(root)) and names(root) == ["1", "2", "3", "4"]


def test_a_storage_error_leaves_the_load_whole_and_is_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(operation: FaultPoint) -> None:
        if operation.subject.startswith("timelines/"):
            raise UnavailableError("the disk is full")

    faults = Faults(fail, names=("put_if_absent",), lasting=True)
    with manager_at(root) as manager:
        faulty = FaultyStore(store_of(root), faults)
        manager._parts.run_store = faulty  # type: ignore[assignment]
        state = state_of(0)
        assert manager.load(state, 2, discard_newer=True) == 2 and state["step"] == 2
        report = manager.load_report
        assert report is not None and report.discarded == () and [left.step for left in report.left] == [3, 4]
        assert "the newer steps stay, and a restart would resume from them" in caplog.text
        manager.save(3, state_of(-3)).wait()
    assert committed_steps(store_of(root)) == [1, 2, 3]


def test_a_quarantined_step_is_removed_by_name_with_its_record(root: Path) -> None:
    store, digest = store_of(root), ""
    for manifest in run_timelines(store).chain:
        digest = str(manifest.digest)
    quarantine(store, 4, "step-000000000004/manifest.json", digest[:16], "a test", "now")
    assert remove_steps(root, 4, grace_seconds=0.0).steps == ("4",)
    assert names(root) == ["1", "2", "3"] and not list(store.list("quarantine/"))


# --------------------------------------------------------------------------------------------------------- records


def test_a_record_of_a_former_writer_does_not_count(root: Path) -> None:
    with manager_at(root) as manager:
        manager.load(state_of(0), 2)
        manager.save(3, state_of(-3)).wait()
    store = store_of(root)
    late = Timeline(9, "9" * 16, (Fork("", 1, "0" * 32),))
    put_record(store, TimelineRecord(late, newest_epoch(store) - 1, frozenset()))
    assert timeline_records(store, current_fence(store)) == [] and committed_steps(store) == [1, 2, 3]


@pytest.mark.parametrize("damage", ["digest", "all"])
def test_a_damaged_record(root: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    with manager_at(root) as manager:
        manager.load(state_of(0), 2, discard_newer=True)
    store = store_of(root)
    (key,) = record_keys(store)
    data = store.get(key, 1 << 20)
    store.put(key, data[:-4] + b"x" + data[-3:] if damage == "digest" else b"x" * 100)
    caplog.set_level(logging.WARNING)
    # A new writer reads it too, and accepts what it can.
    with manager_at(root) as manager:
        assert manager.load(state_of(0)) == (2 if damage == "digest" else 4)
        manager.save(7, state_of(7)).wait()
    assert committed_steps(store) == ([1, 2, 7] if damage == "digest" else [1, 2, 3, 4, 7])
    assert ("its timeline counts" if damage == "digest" else "count again") in caplog.text


def test_a_manifest_that_cannot_be_read_is_not_removed_by_name(root: Path) -> None:
    (root / "step-000000000002" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CorruptError, match=r"the manifest of step 2 cannot be read.*holdfast repair"):
        remove_steps(root, [2], grace_seconds=0.0)
    for wrong, message in (([], "one step at least"), ([-1], "whole number")):
        with pytest.raises(InvalidError, match=message):
            remove_steps(root, wrong, grace_seconds=0.0)
    with pytest.raises(InvalidError, match="grace_seconds=-1"):
        remove_steps(root, [1], grace_seconds=-1)


def test_a_save_goes_on_where_the_step_that_the_newest_timeline_began_at_was_removed(root: Path) -> None:
    for step in ("2", "3"):
        (name,) = [record.name for record in list_steps(root).steps if record.name.partition("@")[0] == step]
        with manager_at(root) as manager:
            manager.load(state_of(0), step=name, discard_newer=True)
    for step in ("4", "3"):
        (name,) = [record.name for record in list_steps(root).steps if record.name.partition("@")[0] == step]
        remove_steps(root, [name], grace_seconds=0.0)
    with manager_at(root) as manager:
        assert manager.load(state_of(0)) == 2
        manager.save(3, state_of(30)).wait()
    with manager_at(root) as manager:
        state = state_of(0)
        assert manager.load(state) == 3 and state["step"] == 30
    (manifest,) = [record.manifest for record in list_steps(root).steps if record.name == "3"]
    assert manifest is not None and manifest.timeline is not None
    assert manifest.timeline.number == 4 and manifest.timeline.ancestors[0].step == 2
