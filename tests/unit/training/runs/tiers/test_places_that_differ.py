"""What a near tier and a root do that do not agree: one was away, is damaged, or was written by a job without it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import CorruptError, MissingError
from holdfast.policies import LatestN
from holdfast.stored.repository.timelines import run_timelines
from tests.support.server_folders import ServerFolder, remove_tree
from tests.unit.training.runs.tiers.test_near_tier import (
    COUNT,
    Place,
    flip,
    loaded,
    packs_of,
    place,
    state_of,
    steps_in,
    train,
)

__all__ = ["place"]


@contextmanager
def away(place: Place) -> Iterator[None]:
    """Have the near tier be away for a while."""
    elsewhere = place.near.rename(place.near.with_name("away"))
    yield
    shutil.rmtree(place.near, ignore_errors=True)
    elsewhere.rename(place.near)


def trained(place: Place, *steps: int) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, *steps)
        manager.close(wait=False)


def tags_in(root: Path | ServerFolder) -> list[str]:
    return sorted(path.stem for path in root.glob("tags/*.json"))


def test_a_tag_that_was_removed_while_the_near_tier_was_away_stays_removed(place: Place) -> None:
    trained(place, 10, 20)
    holdfast.api.tag(place.root, 20, "best")
    with away(place):
        holdfast.api.untag(place.root, "best")
    assert not holdfast.api.list_steps(place.root).tags
    holdfast.api.tag(place.root, 10, "best")
    holdfast.api.untag(place.root, "best")
    holdfast.api.tag(place.root, 20, "other")
    with away(place):
        holdfast.api.untag(place.root, "other")
    trained(place, 30)
    assert tags_in(place.near) == []


def test_a_root_that_is_given_back_has_the_tags_again(place: Place) -> None:
    trained(place, 10, 20)
    holdfast.api.tag(place.root, 10, "best")
    remove_tree(place.root)
    assert holdfast.api.drain(str(place.near)).steps == (10, 20)
    assert tags_in(place.root) == ["best"]


@pytest.mark.parametrize("damaged", ["manifest", "pack"])
def test_a_step_that_is_damaged_near_does_not_keep_others_from_the_drain(place: Place, damaged: str) -> None:
    trained(place, 20, 40)
    remove_tree(place.root)
    flip(place.near / "step-000000000020/manifest.json" if damaged == "manifest" else packs_of(place.near, 20)[0], -10)
    with pytest.raises(CorruptError):
        holdfast.api.drain(str(place.near), remove=True)
    assert steps_in(place.root) == [40]
    assert steps_in(place.near) == [20, 40], "nothing is removed"


def test_a_step_that_was_removed_while_the_near_tier_was_away_stays_removed(place: Place) -> None:
    trained(place, 20, 40)
    with away(place):
        holdfast.api.remove_steps(place.root, [40], grace_seconds=0)
    with place.manager() as manager:
        assert manager.steps() == [20]
        assert loaded(manager) == 20
        train(manager, 30)
        assert manager.steps() == [20, 30]


def both(step: int, moving: float) -> dict[str, object]:
    """A state of which one tensor never changes, so that its packs are those of the first step."""
    weights = torch.full((COUNT,), moving)
    return {"frozen": torch.arange(200_000.0), "weights": weights, "step": step}


def test_a_removal_leaves_the_packs_that_one_of_the_places_needs(place: Place) -> None:
    for step in (20, 40):
        with place.manager() as manager:
            manager.load(both(0, 0.0))
            manager.save(step, both(step, float(step))).wait()
    for link in place.root.glob("**/*.link"):
        link.unlink()
    holdfast.api.remove_steps(place.root, [20], grace_seconds=0)
    shutil.rmtree(place.near)
    state = both(0, 0.0)
    assert holdfast.load(place.root, state, step=40).step == 40


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_step_of_the_root_alone_outlives_damage_near_of_a_pack_that_it_refers_to(place: Place, damage: str) -> None:
    for step, near in ((20, 10), (40, None)):
        with place.manager(near=near) as manager:
            manager.load(both(0, 0.0))
            manager.save(step, both(step, float(step))).wait()
    assert steps_in(place.near) == [20] and steps_in(place.root) == [20, 40]
    for path in packs_of(place.near, 20):
        data = path.read_bytes()
        middle = len(data) // 2
        rest = b"" if damage == "cut" else bytes(100) + data[middle + 100 :]
        path.write_bytes(data[:middle] + rest)
    with place.manager() as manager:
        state = both(0, 0.0)
        assert manager.load(state) == 40
        assert torch.equal(state["frozen"], torch.arange(200_000.0))  # type: ignore[arg-type]
    assert not list(place.root.glob("quarantine/*"))


def test_the_root_knows_the_newest_timeline_once_its_steps_there_are_removed(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 20, 40)
        loaded(manager, step=20)
        train(manager, 40)
    for key in place.root.glob("timelines/*.json"):
        key.unlink()  # As a collection does, once the root has a step of the timeline.
    with place.manager() as manager:
        loaded(manager)
        train(manager, 50)
        manager.close(wait=False)
    holdfast.api.remove_steps(place.root, ["40"], grace_seconds=0)
    shutil.rmtree(place.near)
    with place.manager() as manager:
        assert loaded(manager) == 20, "the step 40 of before is superseded"


def test_a_record_that_only_the_near_tier_still_has_is_left(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 20, 40)
        loaded(manager, step=20)
        train(manager, 40)
    for key in place.root.glob("timelines/*.json"):
        key.unlink()
    trained(place, 60)
    assert steps_in(place.root) == [20, 40, 60]


def test_a_step_that_cannot_be_drained_holds_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.manager() as manager, monkeypatch.context() as away:
        away.setattr(manager._near.drain, "_wake_up", lambda: None)  # type: ignore[union-attr]
        loaded(manager)
        handles = [manager.save(step, state_of(step), tags={f"tag{step}"}) for step in (20, 40)]
        for handle in handles:
            handle.wait("near")
        flip(packs_of(place.near, 20)[0], -10)
        away.undo()
        manager._near.drain._wake_up()  # type: ignore[union-attr]
        handles[1].wait("committed", timeout=20)
        with pytest.raises(CorruptError, match="step 20 is damaged"):
            handles[0].wait("committed", timeout=20)
    assert steps_in(place.root) == [40]


def test_a_manifest_that_is_damaged_in_the_root_is_replaced_by_the_drain(place: Place) -> None:
    trained(place, 20, 40)
    flip(place.root / "step-000000000040/manifest.json", -10)
    trained(place, 60)
    assert holdfast.load(place.root, state_of(0), step=40).step == 40
    assert list(place.root.glob("quarantine/step-000000000040.*.manifest.json"))


def test_a_step_that_gets_a_tag_later_is_drained(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 10)
        manager.tag(10, "best")
        train(manager, 20)
        tagged = manager.maybe_save(30, state_of(30), tags={"other"})
        assert tagged is not None
        tagged.wait("committed", timeout=20)
    assert steps_in(place.root) == [10, 20, 30]


def test_a_near_step_that_is_saved_as_it_was_loaded_is_committed_once_the_root_has_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.manager() as manager:
        loaded(manager)
        manager.save(10, state_of(10), near_only=True).wait()
        manager.close(wait=False)
    assert steps_in(place.root) == []
    with place.manager() as manager:
        state = state_of(0)
        assert manager.load(state) == 10
        assert manager.save(10, state).wait(timeout=20) is not None
        assert steps_in(place.root) == [10]


def test_a_new_near_tier_is_one_although_the_first_thing_is_to_discard_steps(place: Place) -> None:
    trained(place, 20, 40)
    shutil.rmtree(place.near)
    with place.manager() as manager:
        assert loaded(manager, step=20, discard_newer=True) == 20
    trained(place, 30)
    assert steps_in(place.near) == [30]


def test_a_superseded_step_that_waits_for_the_drain_begins_no_timeline(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.manager() as manager:
        monkeypatch.setattr(manager._near.drain, "_wake_up", lambda: None)  # type: ignore[union-attr]
        loaded(manager)
        for step in (20, 40):
            manager.save(step, state_of(step)).wait("near")
        loaded(manager, step=20)
        manager.save(30, state_of(30)).wait("near")
        assert loaded(manager, step=30) == 30 and not manager._position.has_gone_back
        manager.save(31, state_of(31)).wait("near")
        assert run_timelines(manager._run).newest.number == 2
        manager.close(wait=False)


def test_the_step_that_was_loaded_is_distrusted_and_not_another_with_its_number(place: Place) -> None:
    with place.manager(near=None) as manager:
        loaded(manager)
        train(manager, 20, 40)
        former = run_timelines(manager._run).chain[-1]
        loaded(manager, step=20)
        train(manager, 40)
        assert manager.load(state_of(0), step=f"40@{former.digest}") == 40
        manager.distrust("the loss is not finite")
    quarantined = {step.manifest.digest for step in holdfast.api.list_steps(place.root).steps if step.quarantined}
    assert quarantined == {former.digest}


def test_a_tag_that_moved_while_the_near_tier_was_away_keeps_no_step_there(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 10, 20)
        manager.tag(10, "best")
        manager.close(wait=False)
    with away(place):
        holdfast.api.tag(place.root, 20, "best", move=True)
    assert holdfast.api.remove_steps(place.root, [10], grace_seconds=0).steps == ("10",)


def test_what_a_load_discarded_makes_no_due_step_skipped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.manager(keep=LatestN(2)) as manager:
        with monkeypatch.context() as slow:
            slow.setattr(manager._near.drain, "_wake_up", lambda: None)  # type: ignore[union-attr]
            loaded(manager)
            for step in (20, 40, 60):
                handle = manager.save(step, state_of(step))
                handle.wait("near")
            loaded(manager, step=20, discard_newer=True)
        manager._near.drain._wake_up()  # type: ignore[union-attr]
        manager.save(21, state_of(21)).wait("committed", timeout=20)
    assert {20, 21} <= set(steps_in(place.root))


@pytest.mark.parametrize("removed", ["new", "former"])
def test_a_removal_after_the_run_went_back_near_only_takes_what_is_named(place: Place, removed: str) -> None:
    """The root has the former step 40 in its folder, and the near tier the new one; each goes alone."""
    values = {"new": -1.0, "former": 40.0}
    with place.manager() as manager:
        loaded(manager)
        train(manager, 20, 40)
        digests = {"former": run_timelines(manager._run).chain[-1].digest}
        loaded(manager, step=20)
        again = {"weights": torch.full((COUNT,), values["new"]), "step": 40}
        manager.save(40, again, near_only=True).wait()
        digests["new"] = run_timelines(manager._run).chain[-1].digest
        manager.close(wait=False)
    assert steps_in(place.root) == [20, 40] == steps_in(place.near)
    name = "40" if removed == "new" else f"40@{str(digests['former'])[:8]}"
    assert holdfast.api.remove_steps(place.root, [name], grace_seconds=0).steps == (name,)
    (left,) = {*values} - {removed}
    with place.manager() as manager:
        assert manager.steps() == ([20] if removed == "new" else [20, 40])
        state = state_of(0)
        assert manager.load(state, step=f"40@{digests[left]}") == 40
        assert torch.equal(state["weights"], torch.full((COUNT,), values[left]))  # type: ignore[arg-type]
        with pytest.raises(MissingError):
            manager.load(state, step=f"40@{digests[removed]}")
        assert manager.load(state) == manager.steps()[-1]
        manager.save(50, state_of(50)).wait()
        assert loaded(manager) == 50
    paths = [
        path
        for root in (place.root, place.near)
        for pattern in ("step-*/manifest.json", "superseded/*")
        for path in root.glob(pattern)
    ]
    stored = {stated_digest(path.read_bytes()) for path in paths}
    assert digests[left] in stored and digests[removed] not in stored


def test_latest_names_a_step_of_its_own_place_after_a_load_that_discards(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Other tools read `latest`, of which the near tier may have one and the root none."""
    with place.manager(every=1000) as manager:
        loaded(manager)
        for step in (10, 20, 30):
            manager.save(step, state_of(step), near_only=True).wait()
        assert loaded(manager, step=20, discard_newer=True) == 20
        assert (place.near / "latest").read_bytes() == b"step-000000000020" and not (place.root / "latest").exists()
        manager.save(40, state_of(40)).wait()
        manager.save(50, state_of(50), near_only=True).wait()
        assert loaded(manager, step=40, discard_newer=True) == 40
        manager.close(wait=False)
    assert (place.near / "latest").read_bytes() == b"step-000000000040" == (place.root / "latest").read_bytes()
    assert "latest" not in caplog.text
