"""Discarding and removing steps beside what else removes and names steps: marks in their grace, close, tags, latest."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.api import list_steps, open_checkpoint, remove_steps, tag
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.core.format.names import SUPERSEDED_FOLDER
from holdfast.errors import ConflictError, InvalidError, MissingError, UnavailableError
from holdfast.settings import Settings
from holdfast.stored.repository.catalog import manifest_digest, read_run_id
from holdfast.stored.repository.removal import mark_keys
from holdfast.stored.repository.tags import read_tags
from holdfast.stored.repository.timeline_records import record_keys
from holdfast.training.runs.removal.background_collection import Background
from holdfast.training.runs.removal.chosen_steps import ChosenNames
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from holdfast.training.runs.removal.named_steps import RemovedSteps, StepRemoval
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.support.tuning import tuned

GRACE_SECONDS = 0.3
SETTINGS = tuned(Settings(chunk_bytes=4096, collect_grace_seconds=GRACE_SECONDS), window_bytes=8192)


def manager_at(root: Path) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, process_group=False, preemption=False, settings=SETTINGS)


def state_of(step: int) -> dict[str, object]:
    return {"weights": torch.full((3000,), float(step)), "step": step}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with manager_at(tmp_path) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step), tags=["best"] if step == 2 else []).wait()
        assert background_of(manager)._thread is None, "without a policy and without a discarded step nothing collects"
    return tmp_path


def background_of(manager: holdfast.CheckpointManager) -> Background:
    collecting = manager._parts.collecting
    assert collecting is not None
    return collecting


def names(root: Path) -> list[str]:
    return [record.name.partition("@")[0] for record in list_steps(root).steps if record.manifest is not None]


def latest(root: Path) -> str:
    return (root / "latest").read_text()


# ------------------------------------------------------------------------------------------------ marks in their grace


def test_a_discarded_step_that_is_saved_again_within_its_grace_goes_whole(root: Path) -> None:
    with manager_at(root) as manager:
        parts = manager._parts
        parts.collecting = None
        manager.load(state_of(0), 2, discard_newer=True)
        choice = ChosenNames(is_all=True)
        collector = CheckpointGC(parts.store, SystemClock(), None, parts.writer_lease, parts.pins, choice)
        first = collector.mark()
        assert first.steps == (3, 4)
        manager.save(3, state_of(-3)).wait()  # Its former manifest moves to `superseded/`.
        second = collector.mark([first])
        assert not second.to_delete, "the first mark names it, wherever it is"
        report = collector.execute([first])
        assert report.steps == (4,) and [name.partition("@")[0] for name in report.superseded] == ["3"]
    store = LocalStore(root, settings=SETTINGS)
    assert not list(store.list(SUPERSEDED_FOLDER)) and not mark_keys(store)
    assert names(root) == ["1", "2", "3"]
    assert all(not list(open_checkpoint(root, step=step).verify()) for step in (1, 2, 3))


def test_close_waits_for_a_discarded_step_whose_manifest_has_moved(root: Path) -> None:
    with manager_at(root) as manager:
        manager.load(state_of(0), 2, discard_newer=True)
        manager.save(3, state_of(-3)).wait()
    assert names(root) == ["1", "2", "3"] and not list(LocalStore(root, settings=SETTINGS).list(SUPERSEDED_FOLDER))
    assert not list(open_checkpoint(root, step=3).verify())


# ------------------------------------------------------------------------------------------------------------ at close


def test_close_without_a_policy_removes_what_a_load_discarded(root: Path) -> None:
    with manager_at(root) as manager:
        manager.load(state_of(0), 2, discard_newer=True)
        start = time.monotonic()
    assert time.monotonic() - start >= GRACE_SECONDS / 2
    assert names(root) == ["1", "2"]


def test_what_a_close_leaves_goes_after_the_first_save_of_the_next_process(root: Path) -> None:
    manager = manager_at(root)
    manager.load(state_of(0), 2, discard_newer=True)
    manager.close(wait=False)
    assert names(root) == ["1", "2", "3", "4"] and record_keys(LocalStore(root, settings=SETTINGS))
    with manager_at(root) as manager:
        assert manager.load(state_of(0)) == 2
        assert background_of(manager)._thread is None
        manager.save(5, state_of(5)).wait()
    assert names(root) == ["1", "2", "5"] and not record_keys(LocalStore(root, settings=SETTINGS))


def test_a_full_disk_asks_for_a_collection_only_if_something_may_go(root: Path) -> None:
    with manager_at(root) as manager:
        manager.load(state_of(0))
        manager.save(5, state_of(5)).wait()
        background_of(manager).want_room()
        assert background_of(manager)._thread is None
        manager.load(state_of(0), 2, discard_newer=True)
        background_of(manager).want_room()
        assert background_of(manager)._thread is not None
    assert names(root) == ["1", "2"]


# --------------------------------------------------------------------------------------------------------------- names


def test_a_load_by_tag_discards_what_is_newer_and_latest_names_it(root: Path) -> None:
    assert latest(root) == "step-000000000004"
    manager = manager_at(root)
    assert manager.load(state_of(0), "best", discard_newer=True) == 2
    assert latest(root) == "step-000000000002", "other tools go on from there as a restart does"
    with pytest.raises(InvalidError, match="without a step"):
        manager.load(state_of(0), "latest", discard_newer=True)
    manager.close(wait=False)


def test_a_save_that_writes_nothing_moves_tags_as_any_other(root: Path) -> None:
    with manager_at(root) as manager:
        state = state_of(0)
        manager.load(state)
        report = manager.save(4, state, tags=["best", "new"]).wait()
        assert report is not None and report.bytes == 0
        assert [text.partition(":")[0] for text in report.untagged] == ["best"], "another step has it"
        report = manager.save(4, state, move_tags=["best"]).wait()
        assert report is not None and report.bytes == 0 and report.untagged == ()
    tags = read_tags(LocalStore(root, settings=SETTINGS)).whole
    assert {name: each.step for name, each in tags.items()} == {"best": 4, "new": 4}


def test_steps_are_removed_by_any_name(root: Path) -> None:
    assert remove_steps(root, "latest", grace_seconds=0.0).steps == ("4",)
    assert latest(root) == "step-000000000003"
    assert remove_steps(root, ["best"], tagged=True, grace_seconds=0.0).steps == ("2",)
    assert names(root) == ["1", "3"] and not read_tags(LocalStore(root, settings=SETTINGS)).whole
    with pytest.raises(InvalidError, match="step=''"):
        remove_steps(root, [None])  # type: ignore[list-item]
    assert names(root) == ["1", "3"]


def test_a_tag_that_moves_within_the_grace_keeps_its_new_step(root: Path) -> None:
    store = LocalStore(root, settings=SETTINGS)
    named = {step: (step, str(manifest_digest(store, step))) for step in (2, 4)}
    choice = ChosenNames(frozenset({named[2], named[4]}), frozenset({("best", named[2])}), is_all=True)
    with manager_at(root) as manager:
        parts = manager._parts
        parts.collecting = None
        parts.writer_lease.hold(str(read_run_id(store)))
        collector = CheckpointGC(store, SystemClock(), None, parts.writer_lease, parts.pins, choice)
        marked = collector.mark()
        tag(root, 4, "best", move=True)
        assert collector.execute([marked]).steps == (2,)
    assert names(root) == ["1", "3", "4"]


def test_steps_that_training_went_on_from_are_discarded_no_more(root: Path) -> None:
    manager = manager_at(root)
    manager.load(state_of(0), 2, discard_newer=True)
    manager.close(wait=False)
    (name,) = (record.name for record in list_steps(root).steps if record.step == 4)
    with manager_at(root) as manager:
        manager.load(state_of(0), name)
        manager.save(5, state_of(5)).wait()
        assert manager.steps() == [1, 2, 3, 4, 5]
    with manager_at(root) as manager:
        manager.load(state_of(0), 1)
        manager.save(6, state_of(6)).wait()
    assert names(root) == ["1", "2", "3", "4", "5", "6"], "a load without discard_newer removes nothing"


def test_a_run_whose_steps_were_all_removed_goes_on(root: Path) -> None:
    with manager_at(root) as manager:
        manager.load(state_of(0), 1)
        manager.save(2, state_of(-2)).wait()  # Begins a timeline.
    every = [record.name for record in list_steps(root).steps]
    assert len(every) == 5 and not remove_steps(root, every, tagged=True, all_steps=True, grace_seconds=0.0).left
    with manager_at(root) as manager:
        assert manager.load(state_of(0)) is None
        manager.save(3, state_of(7)).wait()
    with manager_at(root) as manager:
        assert manager.load(state_of(0)) == 3
        manager.save(4, state_of(8)).wait()
        assert manager.steps() == [3, 4]
    assert latest(root) == "step-000000000004"


def test_one_step_may_be_a_number_of_numpy(root: Path) -> None:
    assert remove_steps(root, np.int64(4), grace_seconds=0.0).steps == ("4",)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=r"step='2\.0'"):
        remove_steps(root, 2.0)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- a removal by name that does not end


def test_a_removal_that_fails_is_ended_by_the_names_that_it_had(root: Path) -> None:
    with manager_at(root) as manager:
        manager.load(state_of(0), 3)
        manager.save(4, state_of(-4)).wait()
    (superseded,) = (record.name for record in list_steps(root).steps if record.superseded)
    store, named = LocalStore(root, settings=SETTINGS), ["best", 3, superseded]

    def remove(store: Store, *names: int | str, tagged: bool = True) -> RemovedSteps:
        return StepRemoval(names, tagged, all_steps=False).execute(store, SystemClock(), 0.0, 60.0)

    def fail(operation: FaultPoint) -> None:
        if ".safetensors" in operation.subject:
            raise UnavailableError("the files of the removed steps")

    faults = Faults(fail, names=("delete",), lasting=True)
    with pytest.raises(UnavailableError, match="the files of the removed steps"):
        remove(FaultyStore(store, faults), *named)
    assert names(root) == ["1", "4"], "the manifests are gone"
    assert (root / "step-000000000003").exists()
    for wrong, error in (([*named, 9], MissingError), (["3@ffff"], MissingError), (["bst"], MissingError)):
        with pytest.raises(error):
            remove(store, *wrong)
    with pytest.raises(ConflictError, match=r"steps have tags: best \(best\)"):
        remove(store, *named, tagged=False)
    ended = remove(store, *named)
    assert (ended.steps, ended.left, ended.gone) == ((), {}, ("best", "3", superseded)) and ended.files > 0
    assert not read_tags(store).whole and not mark_keys(store)
    assert {path.name for path in root.glob("step-*")} == {"step-000000000001", "step-000000000004"}
    assert all(not list(open_checkpoint(root, step=step).verify()) for step in (1, 4))
