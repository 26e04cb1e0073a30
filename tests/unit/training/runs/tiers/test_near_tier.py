"""A near tier before the root: what lies where, what a restart takes, and what happens on the day it goes wrong."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.backends.stores.local import LocalStore
from holdfast.core.format.names import aside_key
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    UnavailableError,
)
from holdfast.policies import AnyOf, EveryNth, LatestN, Tagged
from holdfast.settings import Settings
from tests.support.server_folders import ServerFolder, steps_in
from tests.support.tuning import tuned

SETTINGS = tuned(Settings(chunk_bytes=4096, collect_grace_seconds=0.0, lease_seconds=5.0), window_bytes=8192)
COUNT = 3000
IN_FOLDERS = pytest.mark.skipif(bool(os.environ.get("TIER_ROOT_ON")), reason="a folder that moves, or lies in another")


@dataclass
class Place:
    """The two places of a run."""

    root: Path | ServerFolder
    near: Path

    def manager(self, *, every: int = 20, near: int | None = 10, **options: object) -> holdfast.CheckpointManager:
        tier = None if near is None else holdfast.Tier(self.near, every=near, keep_last=2)
        options = {"every": every, "preemption": False, "settings": SETTINGS, **options}
        return holdfast.CheckpointManager(self.root, process_group=False, near=tier, **options)  # type: ignore[arg-type]


@pytest.fixture
def place(tier_root: Path | ServerFolder, tmp_path: Path) -> Place:
    return Place(tier_root, tmp_path / "near")


def state_of(step: int) -> dict[str, object]:
    return {"weights": torch.full((COUNT,), float(step)), "step": step}


def train(manager: holdfast.CheckpointManager, *steps: int) -> None:
    """Run the loop over some steps; each is saved where it is due, and drained before the next."""
    for step in steps:
        handle = manager.maybe_save(step, state_of(step))
        if handle is not None:
            handle.wait()


def loaded(manager: holdfast.CheckpointManager, **options: object) -> int | None:
    """Load, and require the values of the step that was loaded."""
    state = state_of(0)
    step = manager.load(state, **options)  # type: ignore[arg-type]
    if step is not None:
        assert torch.equal(state["weights"], torch.full((COUNT,), float(step)))  # type: ignore[arg-type]
        assert state["step"] == step
    return step


# ------------------------------------------------------------------------------------------- what lies where


def test_steps_are_saved_near_and_those_that_are_due_are_drained(place: Place) -> None:
    with place.manager() as manager:
        assert loaded(manager) is None
        near_only = manager.maybe_save(10, state_of(10))
        assert near_only is not None
        report = near_only.wait()
        assert report is not None and report.tier == "near" and report.url.startswith(str(place.near))
        assert steps_in(place.near) == [10] and steps_in(place.root) == []
        due = manager.maybe_save(20, state_of(20))
        assert due is not None
        due.wait("near")
        due.wait("committed", timeout=20)
        assert steps_in(place.near) == [10, 20] and steps_in(place.root) == [20]
        assert manager.maybe_save(21, state_of(21)) is None
        train(manager, 30)
        # A collection may have removed step 10 by now.
        assert manager.steps()[-2:] == [20, 30] and manager.latest == 30
    assert steps_in(place.root) == [20, 30], "close drains the newest near step"
    assert steps_in(place.near) == [20, 30], "the two newest stay near"
    assert not list(place.root.glob("step-*/*/*.part"))


def test_a_step_for_the_near_tier_alone_says_that_the_root_never_has_it(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        handle = manager.save(7, state_of(7), near_only=True)
        with pytest.raises(InvalidError, match=r"step 7.*stays in the near tier.*wait\('near'\)"):
            handle.wait("committed")
        handle.wait("near")
        with pytest.raises(InvalidError, match="stays in the near tier"):
            handle.committed.result(5)
        assert manager.save(8, state_of(8)).wait() is not None
        assert steps_in(place.root) == [8]
        tagged = manager.save(9, state_of(9), near_only=True, tags={"best"})
        tagged.wait("committed", timeout=20)
        assert steps_in(place.root) == [8, 9]


def test_a_near_step_that_was_loaded_and_is_saved_as_due_is_committed_once_the_root_has_it(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 10)
        state = state_of(0)
        assert manager.load(state) == 10 and steps_in(place.root) == []
        handle = manager.save(10, state)
        handle.wait("committed", timeout=20)
        assert steps_in(place.root) == [10]


def test_a_restart_takes_the_newest_step_from_the_nearest_place(place: Place) -> None:
    with place.manager(every=20) as manager:
        loaded(manager)
        train(manager, *range(1, 51))
    with place.manager() as manager:
        assert loaded(manager) == 50
        report = manager.load_report
        assert report is not None and list(report.sources) == [str(place.near)]
        assert loaded(manager, step=20) == 20, "the root alone has it"
        assert manager.load_report is not None and list(manager.load_report.sources) == [str(place.root)]
        assert loaded(manager, step="latest") == 50
    assert holdfast.load(place.root, state_of(0), step="latest").step == 50


def test_the_loaded_step_leaves_the_root_once_newer_ones_are_there(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 20)
    with place.manager(keep_last=2) as manager:
        assert loaded(manager) == 20
        train(manager, 40, 60, 80)
    assert steps_in(place.root) == [60, 80]


def test_a_lost_near_tier_costs_the_steps_since_the_root_s_newest(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 10, 20, 30)
        manager.close(wait=False)
    shutil.rmtree(place.near)
    with place.manager() as manager:
        assert loaded(manager) == 20
        train(manager, 30, 40)
        assert manager.steps() == [20, 30, 40]


def test_a_near_tier_of_an_earlier_host_that_comes_back_is_fenced(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 10, 20, 30)
        manager.close(wait=False)
    away = place.near.rename(place.near.with_name("away"))
    with place.manager() as manager:
        assert loaded(manager) == 20
        manager.save(25, state_of(25)).wait()
        manager.close(wait=False)
    shutil.rmtree(place.near)
    away.rename(place.near)
    with place.manager() as manager:
        assert manager.steps() == [20, 25], "step 30 is in no list"
        assert loaded(manager) == 25
        train(manager, 30)
        assert loaded(manager) == 30


def test_going_back_near_only_survives_the_loss_of_the_near_tier(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 20, 40)
        assert loaded(manager, step=20) == 20
        train(manager, 30)
        assert manager.steps() == [20, 30]
        manager.close(wait=False)
    shutil.rmtree(place.near)
    with place.manager() as manager:
        assert loaded(manager) == 20, "the record of the timeline is in the root"


def test_a_step_saved_again_near_only_leaves_the_other_superseded_in_the_root(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 20, 40)
        manager.tag(40, "before")
        loaded(manager, step=20)
        manager.save(40, {"weights": torch.full((COUNT,), -1.0), "step": 40}, near_only=True).wait()
        manager.close(wait=False)
    for newest in (40, 41):
        with place.manager() as manager:
            state = state_of(0)
            assert manager.load(state, step=40) == 40
            assert torch.equal(state["weights"], torch.full((COUNT,), -1.0))  # type: ignore[arg-type]
            assert manager.load(state, step="before") == 40
            assert torch.equal(state["weights"], torch.full((COUNT,), 40.0))  # type: ignore[arg-type]
            assert manager.load(state) == newest
            manager.save(newest + 1, state_of(newest + 1), near_only=True).wait()
            manager.close(wait=False)


# -------------------------------------------------------------------------------------------------- the drain


def test_a_slow_root_skips_what_it_would_not_keep_and_never_a_tagged_step(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from holdfast.stored.copying.step_drain import StepDrain

    is_away = True

    def fail_while_away(drain: StepDrain) -> object:
        if is_away:
            raise UnavailableError("the root is away")
        return lacking(drain)

    lacking = StepDrain.lacking
    monkeypatch.setattr(StepDrain, "lacking", fail_while_away)
    monkeypatch.setattr("holdfast.training.runs.tiers.drain._RETRY_SECONDS", 0.1)
    keep = AnyOf(LatestN(2), EveryNth(40), Tagged())
    with place.manager(every=1000, keep=keep) as manager, caplog.at_level(logging.WARNING):
        loaded(manager)
        handles = {}
        for step in range(10, 80, 10):
            handles[step] = manager.save(step, state_of(step), tags={"good"} if step == 20 else ())
            handles[step].wait("near")
        assert {20, 40, 60, 70} <= set(steps_in(place.near)), "what waits stays near"
        is_away = False
        for step in (20, 40, 60, 70):
            handles[step].wait("committed", timeout=20)
        for step in (10, 30, 50):
            with pytest.raises(UnavailableError, match=rf"step {step} is saved near.*would not keep"):
                handles[step].wait("committed", timeout=20)
        assert "step 10 is not drained" in caplog.text
    assert steps_in(place.root) == [20, 40, 60, 70]


def test_steps_that_a_killed_job_left_are_drained_by_the_next(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.training.runs.tiers.drain import Drain

    with monkeypatch.context() as dead:
        dead.setattr(Drain, "_wake_up", lambda self: None)
        with place.manager(every=10, near=5) as manager:
            loaded(manager)
            for step in (5, 10, 15, 20):
                handle = manager.maybe_save(step, state_of(step))
                assert handle is not None
                handle.wait("near")
            manager.close(wait=False)
        assert handle is not None
        with pytest.raises(UnavailableError, match=r"step 20 is saved near, and not in the root.*closed"):
            handle.wait("committed")
    assert steps_in(place.root) == []
    with place.manager(every=10, near=5) as manager:
        assert loaded(manager) == 20
        train(manager, 30)
    assert steps_in(place.root) == [10, 20, 30]


def test_a_collection_during_a_close_leaves_what_the_root_lacks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.training.runs.tiers.drain import Drain

    monkeypatch.setattr(Drain, "_wake_up", lambda self: None)
    manager = place.manager(every=10, near=5)
    loaded(manager)
    for step in (5, 10, 15, 20):
        handle = manager.maybe_save(step, state_of(step))
        assert handle is not None
        handle.wait("near")
    near = manager._near
    assert near is not None and near.parts.collecting is not None
    near.drain.close(lambda: False)
    near.parts.collect_soon()
    near.parts.collecting.close(lambda: None, lambda: True)
    assert steps_in(place.near) == [10, 15, 20], "steps 10 and 20 are due at the root"
    manager.close(wait=False)


# ---------------------------------------------------------------------------------------------------- room


def test_without_room_a_due_step_goes_straight_to_the_root_and_a_near_one_fails(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 10)
        monkeypatch.setattr(LocalStore, "free_bytes", lambda store: 5000 if store.url == str(place.near) else 1 << 40)
        near_only = manager.maybe_save(15, state_of(15)) or manager.save(15, state_of(15), near_only=True)
        with pytest.raises(
            UnavailableError, match=r"step 15 is for the near tier alone.*4\.9 KiB free.*holds steps \[10\]"
        ):
            near_only.wait()
        due = manager.save(20, state_of(20), metrics={"loss": 0.5}, tags={"straight"})
        report = due.wait("committed")
        assert report is not None and report.tier == "root" and report.url.startswith(str(place.root))
        assert "step 20 is saved straight into the root" in caplog.text
        assert steps_in(place.near) == [10] and steps_in(place.root) == [20]
        monkeypatch.undo()
        train(manager, 30)
        assert steps_in(place.near) == [10, 30]
        assert loaded(manager, best="loss") == 20 == loaded(manager, step="straight")
        assert loaded(manager) == 30


def test_a_near_tier_that_fails_hands_due_steps_to_the_root_until_it_works_again(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 10)
        folder = place.near / f"step-{20:012d}"
        folder.write_text("no folder")  # As a disk that fails: nothing can be written there.
        with pytest.raises(CheckpointError):
            train(manager, 20)
        folder.unlink()
        train(manager, 30, 40)
        assert steps_in(place.near)[-2:] == [30, 40] and 40 in steps_in(place.root)


def test_a_budget_in_bytes_counts_what_the_folder_holds(place: Place) -> None:
    with pytest.raises(InvalidError, match="a positive number of bytes"):
        holdfast.Tier(place.near, every=10, bytes_max=0)
    tier = holdfast.Tier(place.near, every=10, bytes_max=40_000)
    options = {"every": 20, "preemption": False, "settings": SETTINGS, "process_group": False}
    with holdfast.CheckpointManager(place.root, near=tier, **options) as manager:  # type: ignore[arg-type]
        loaded(manager)
        for step in (10, 20):
            handle = manager.maybe_save(step, state_of(step))
            assert handle is not None
            handle.wait()
        with pytest.raises(UnavailableError, match=r"of Tier\(bytes_max=39.1 KiB\), and a step needs"):
            manager.save(25, state_of(25), near_only=True).wait()
        report = manager.save(40, state_of(40)).wait()
        assert report is not None and report.tier == "root"


@pytest.mark.parametrize("removed_from", ["near", "root"])
def test_a_removal_that_a_kill_interrupted_gives_the_manifest_back_where_it_was(
    place: Place, removed_from: str
) -> None:
    with place.manager(near=5) as manager:
        loaded(manager)
        train(manager, 5, 10, 15, 20)
        manager.close(wait=False)
    removed, step = (place.near, 15) if removed_from == "near" else (place.root, 20)
    other = place.root if removed_from == "near" else place.near
    if removed_from == "root":
        shutil.rmtree(place.near / "step-000000000020")
    (removed / "superseded").mkdir(exist_ok=True)
    manifest = removed / f"step-{step:012d}" / "manifest.json"
    manifest.rename(removed / aside_key(step, bytes(5)))
    with place.manager(near=5) as manager:
        loaded(manager)
        manager.save(30, state_of(30), near_only=True).wait("near")
        assert step in steps_in(removed) and step not in steps_in(other)
        manager.close(wait=False)


# ------------------------------------------------------------------------------------------------- damage


def packs_of(root: Path | ServerFolder, step: int) -> list[Path] | list[ServerFolder]:
    return sorted(root.glob(f"step-{step:012d}/*/r*.safetensors"))


def flip(path: Path | ServerFolder, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture
def two_steps(place: Place) -> Place:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 20, 40)
    return place


def test_damage_in_either_place_is_read_from_the_other(two_steps: Place, caplog: pytest.LogCaptureFixture) -> None:
    flip(packs_of(two_steps.near, 40)[0], -9000)
    flip(packs_of(two_steps.root, 40)[0], -10)
    with two_steps.manager() as manager:
        assert loaded(manager) == 40
        assert manager.load_report is not None and not manager.load_report.passed_over
        assert {*manager.load_report.sources} == {str(two_steps.near), str(two_steps.root)}
    assert str(packs_of(two_steps.near, 40)[0]) in caplog.text


def test_a_pack_that_is_gone_near_is_read_from_the_root(two_steps: Place) -> None:
    packs_of(two_steps.near, 40)[0].unlink()
    with two_steps.manager() as manager:
        assert loaded(manager) == 40


@pytest.mark.parametrize("damaged", ["manifest.json", "index"])
def test_a_damaged_record_near_is_read_from_the_root(two_steps: Place, damaged: str) -> None:
    (path,) = two_steps.near.glob(f"step-{40:012d}/**/{damaged}*")
    flip(path, path.stat().st_size // 2)
    with two_steps.manager() as manager:
        assert loaded(manager) == 40
        assert loaded(manager, step=40) == 40


def test_both_copies_of_one_chunk_damaged_give_the_next_older_step(two_steps: Place) -> None:
    for root in (two_steps.near, two_steps.root):
        flip(packs_of(root, 40)[0], -10)
    with two_steps.manager() as manager:
        assert loaded(manager) == 20
        assert manager.load_report is not None and [each.step for each in manager.load_report.passed_over] == [40]
        with pytest.raises(CorruptError, match="weights"):
            manager.load(state_of(0), step=40)


def test_a_distrusted_step_comes_from_the_root_and_then_is_left(two_steps: Place) -> None:
    with two_steps.manager() as manager:
        with pytest.raises(InvalidError, match="no step was loaded"):
            manager.distrust("the loss is not finite")
        assert loaded(manager) == 40
        manager.distrust("the loss is not finite")
        assert loaded(manager) == 40
        assert manager.load_report is not None and list(manager.load_report.sources) == [str(two_steps.root)]
        manager.distrust("again")
        with pytest.raises(MissingError, match="no copy that is not distrusted"):
            manager.distrust("a third time")
        assert loaded(manager) == 20
        train(manager, 50)
        assert manager.latest == 50


# ------------------------------------------------------------------------------------------------ bad input


@IN_FOLDERS
def test_near_tiers_that_cannot_be(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, make: Callable[[], object]) -> None:
        with pytest.raises(InvalidError, match=match):
            make()

    refused("expected a folder", lambda: holdfast.Tier("s3://bucket/run", every=10))
    refused("positive whole number", lambda: holdfast.Tier(place.near, every=0))
    refused("a policy when to save", lambda: holdfast.Tier(place.near, every=LatestN(2)))  # type: ignore[arg-type]
    refused("positive whole number", lambda: holdfast.Tier(place.near, every=1, keep_last=0))
    for near in (place.root, place.root / "below", tmp_path):
        refused("lies in the root or holds", Place(place.root, near).manager)
    refused("redo log needs one place", lambda: place.manager(differential=True))
    with pytest.raises(InvalidError, match=r"expected holdfast\.Tier"):
        holdfast.CheckpointManager(place.root, near="here", process_group=False)  # type: ignore[arg-type]
    with place.manager(near=None) as manager:
        refused("near_only without a near tier", lambda: manager.save(1, state_of(1), near_only=True))
    place.near.mkdir()
    with monkeypatch.context() as other:
        other.setattr("os.geteuid", lambda: 12345)
        refused("belongs to user", place.manager)


@IN_FOLDERS
def test_a_near_tier_of_another_run_or_root_is_refused(two_steps: Place, tmp_path: Path) -> None:
    empty = Place(tmp_path / "elsewhere", two_steps.near)
    with pytest.raises(InvalidError, match=r"the root .* is empty.*holdfast drain"):
        empty.manager()
    with empty.manager(near=None) as manager:
        manager.save(1, state_of(1)).wait()
    with pytest.raises(InvalidError, match="expected one run"):
        empty.manager()
    moved = Place(two_steps.root.rename(tmp_path / "moved"), two_steps.near)
    with pytest.raises(InvalidError, match=r"is the near tier of .*root; expected that of"):
        moved.manager()
    itself = Place(two_steps.near, moved.root)
    with pytest.raises(InvalidError, match="it is one itself"):
        itself.manager()
    assert steps_in(two_steps.near) == [20, 40] == steps_in(moved.root)


def test_a_second_job_with_another_near_tier_is_refused_and_changes_nothing(two_steps: Place, tmp_path: Path) -> None:
    other = Place(two_steps.root, tmp_path / "other")
    with two_steps.manager() as first:
        assert loaded(first) == 40
        train(first, 50)
        record = (two_steps.root / "near" / "tier.json").read_bytes()
        with other.manager() as second:
            assert loaded(second) == 40
            with pytest.raises(ConflictError, match="another job writes here"):
                second.save(60, state_of(60)).wait("near")
        assert (two_steps.root / "near" / "tier.json").read_bytes() == record
        train(first, 60)
        assert first.steps() == [20, 40, 50, 60]
