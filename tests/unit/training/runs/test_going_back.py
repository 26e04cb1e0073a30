"""Going back to an older step: the next save begins a timeline, and no step of any timeline is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.api import list_steps, repair
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.timeline import FIRST_TIMELINE
from holdfast.core.format.manifest import decode_manifest
from holdfast.core.format.names import accepted_key
from holdfast.core.format.sealed_json import decode_sealed
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.policies import LatestN, Policies
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.reader import ReaderLease
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.epochs import declare_timelines, newest_epoch
from holdfast.stored.repository.quarantine import supersede
from holdfast.stored.repository.timelines import committed_steps, displace
from holdfast.training.coordination.job import Job
from holdfast.training.runs.removal.garbage_collection import collected
from holdfast.training.saving.handle import SaveHandle
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import NumpyFramework
from tests.support.tuning import tuned
from tests.unit.ranks import PATIENT, World, fresh_store, plain, run_of, saved, sharded

SETTINGS = tuned(Settings(chunk_bytes=4096, collect_grace_seconds=0.0), window_bytes=8192)


def state_of(step: int) -> dict[str, object]:
    return {"weights": torch.full((3000,), float(step)), "step": step}


def manager_at(
    root: Path, every: int | None = None, keep_last: int | None = None, start_over: bool = False
) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        root,
        every=every,
        keep_last=keep_last,
        start_over=start_over,
        process_group=False,
        preemption=False,
        settings=SETTINGS,
    )


def save_steps(root: Path, *steps: int) -> None:
    with manager_at(root) as manager:
        for step in steps:
            manager.save(step, state_of(step)).wait()


def go_on(root: Path, loaded: int | str | None, *steps: int, keep_last: int | None = None) -> None:
    """Load a step and save others, whose content is the negative number of the step."""
    with manager_at(root, keep_last=keep_last) as manager:
        manager.load(state_of(0), step=loaded)
        for step in steps:
            manager.save(step, state_of(-step)).wait()


def resumed(root: Path, step: int | str | None = None) -> tuple[int | None, object]:
    """Return the step that a restart loads, and the content."""
    state = state_of(0)
    with manager_at(root) as manager:
        return manager.load(state, step=step), state["step"]


def step_path(root: Path, step: int) -> Path:
    return root / f"step-{step:012d}"


def superseded(root: Path) -> list[str]:
    return [record.name for record in list_steps(root).steps if record.superseded]


def collect(root: Path, keep_last: int) -> None:
    collected(store_of(root), SystemClock(), LatestN(keep_last), 0.0, SETTINGS.lease_seconds)


def damage(root: Path, step: int) -> None:
    pack = max(step_path(root, step).glob("*/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)


def store_of(root: Path) -> LocalStore:
    return LocalStore(root, settings=SETTINGS)


# ------------------------------------------------------------------------------------------ a timeline begins


def test_after_going_back_a_restart_resumes_the_new_timeline(tmp_path: Path) -> None:
    save_steps(tmp_path, 100, 200, 300, 400, 500)
    # Between two old numbers, at an old number, and still below the highest one.
    go_on(tmp_path, 200, 250, 300, 360)
    assert resumed(tmp_path) == (360, -360)
    with manager_at(tmp_path) as manager:
        assert manager.steps() == [100, 200, 250, 300, 360] and manager.latest == 360


def test_no_step_of_the_old_timeline_is_lost(tmp_path: Path) -> None:
    save_steps(tmp_path, 100, 200, 300, 400)
    digest = read_manifest(store_of(tmp_path), "step-000000000300/").digest
    go_on(tmp_path, 100, 200, 300)
    names = superseded(tmp_path)
    assert [name.split("@")[0] for name in names] == ["200", "300", "400"] and f"300@{digest[:8]}" in names
    for name in names:
        assert resumed(tmp_path, name) == (int(name.split("@")[0]), int(name.split("@")[0]))
        assert list(holdfast.open_checkpoint(tmp_path / name).verify()) == []
    with pytest.raises(MissingError, match=r"a newer timeline superseded it. .*400@"):
        resumed(tmp_path, 400)
    with pytest.raises(MissingError, match="no step 300@00000000 on the newest timeline"):
        resumed(tmp_path, "300@00000000")
    with pytest.raises(InvalidError, match="at least 4 digits"):
        resumed(tmp_path, "300@1")


def test_a_superseded_step_can_be_tagged(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    go_on(tmp_path, 1, 2)
    names = superseded(tmp_path)
    with manager_at(tmp_path) as manager:
        for name in names:
            manager.tag(name, f"old-{name[0]}")
        manager.tag(2, "new-2")
    tags = {record.name: record.tags for record in list_steps(tmp_path).steps}
    assert tags == {"1": (), "2": ("new-2",), names[0]: ("old-2",), names[1]: ("old-3",)}


def test_a_restart_finds_the_step_that_is_left_under_superseded_alone(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    with manager_at(tmp_path, start_over=True) as manager:
        manager.save(3, state_of(-3)).wait()
    (name,) = superseded(tmp_path)
    with manager_at(tmp_path) as manager:
        assert manager.load(state_of(0), step=name, discard_newer=True) == 3
    # The process ends before it saves, and what it discarded is removed.
    collected(store_of(tmp_path), SystemClock(), None, 0.0, SETTINGS.lease_seconds)
    assert not (step_path(tmp_path, 3) / "manifest.json").exists()
    assert resumed(tmp_path) == (3, 3)


def test_a_damaged_superseded_step_is_named_where_it_lies(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    go_on(tmp_path, 1, 2)
    (name,) = superseded(tmp_path)
    (path,) = tmp_path.glob("superseded/*.json")
    path.write_text(path.read_text().replace('"tensor_bytes"', '"tensor_bites"'))
    with pytest.raises(CorruptError, match=rf"superseded/{path.name}: "):
        resumed(tmp_path, name)


def test_training_can_go_on_from_a_superseded_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    go_on(tmp_path, 1, 2)
    (name,) = (name for name in superseded(tmp_path) if name.startswith("3@"))
    go_on(tmp_path, name, 4)
    assert resumed(tmp_path) == (4, -4)
    with manager_at(tmp_path) as manager:
        assert manager.steps() == [1, 2, 3, 4], "the chain of the loaded step"
    assert resumed(tmp_path, 2) == (2, 2)


def test_a_run_that_never_goes_back_stores_nothing_new(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    go_on(tmp_path, None, 3)
    go_on(tmp_path, 3, 4)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir() and "step" not in path.name} == {"epochs"}
    assert b"timeline" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))


def test_a_new_timeline_takes_effect_with_its_first_commit(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with manager_at(tmp_path) as manager:
        manager.load(state_of(0), step=1)
    assert resumed(tmp_path) == (3, 3), "going back without a save changes nothing"
    with manager_at(tmp_path) as manager:
        manager.load(state_of(0), step=1)
        # A value that cannot be saved: the save fails after the old step 2 has made room.
        with pytest.raises(InvalidError):
            manager.save(2, {"x": object()})
    assert resumed(tmp_path) == (3, 3) and resumed(tmp_path, 2) == (2, 2)


def test_each_time_going_back_begins_a_further_timeline(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    for time in range(3):
        go_on(tmp_path, 1, 2)
        assert resumed(tmp_path) == (2, -2)
        assert len(superseded(tmp_path)) == time + 2
    manifest = read_manifest(store_of(tmp_path), "step-000000000002/")
    assert manifest.timeline.number == 4
    assert [(fork.timeline, fork.step) for fork in manifest.timeline.ancestors] == [("", 1)]


def test_one_manager_goes_back_twice(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step)).wait()
        for sign in (-1, 1):
            assert manager.load(state_of(0), step=1) == 1
            for step in (2, 3):
                manager.save(step, state_of(sign * 10 * step)).wait()
    assert resumed(tmp_path) == (3, 30)


def test_every_rank_goes_back_together() -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> None:
        state = {"w": sharded(2), "p": plain(1.0)}
        for step in (1, 2, 3):
            saved(run, step, state)
        assert run.load(state, 1) == 1
        for step in (2, 4):
            saved(run, step, state)

    assert world.play(part) == [None, None]
    assert world.committed() == [1, 2, 4]


def test_a_step_of_the_chain_that_was_moved_is_not_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    go_on(tmp_path, 1, 2)
    (name,) = (name for name in superseded(tmp_path) if name.startswith("3@"))
    with manager_at(tmp_path) as manager:
        manager.load(state_of(0), step=name)
        # Step 2 of the first timeline is in the chain of step 3, and stored under superseded/.
        with pytest.raises(ConflictError, match=r"already there; .*superseded/000000000002\."):
            manager.save(2, state_of(-2)).wait()
    assert resumed(tmp_path) == (2, -2)


def test_a_lower_number_than_the_loaded_step_is_newer_than_it(tmp_path: Path) -> None:
    save_steps(tmp_path, 100)
    go_on(tmp_path, 100, 50)
    assert resumed(tmp_path) == (50, -50)


def test_a_step_of_the_chain_is_not_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with manager_at(tmp_path) as manager:
        manager.load(state_of(0), step=2)
        for step in (1, 2):
            with pytest.raises(ConflictError, match="already there"):
                manager.save(step, state_of(-step)).wait()
    assert resumed(tmp_path) == (3, 3)


# ------------------------------------------------------------------------------------------- no timeline begins


def test_the_newest_step_asked_for_by_number_begins_none(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    go_on(tmp_path, 2, 3, 4)
    assert superseded(tmp_path) == []


def test_a_load_that_fails_leaves_the_run_where_it_was(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path, 1)
    with manager_at(tmp_path) as manager:
        assert manager.load(state_of(0)) == 2
        with pytest.raises(CorruptError):
            manager.load(state_of(0), step=1)
        manager.save(3, state_of(3)).wait()
    assert superseded(tmp_path) == []


@pytest.mark.parametrize("newest", [None, 3])
def test_loading_the_newest_again_begins_none(tmp_path: Path, newest: int | None) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with manager_at(tmp_path) as manager:
        manager.load(state_of(0), step=1)
        assert manager.load(state_of(0), newest) == 3
        manager.save(4, state_of(4)).wait()
        assert manager.steps() == [1, 2, 3, 4]


# --------------------------------------------------------------------------------------------- nothing was loaded


def test_a_manager_that_loaded_nothing_is_refused_where_steps_are(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with manager_at(tmp_path) as manager, pytest.raises(InvalidError, match=r"committed steps \(2, 1\).*start_over"):
        manager.save(3, state_of(3))
    assert resumed(tmp_path) == (2, 2)


def test_starting_over_leaves_the_old_steps_superseded(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with manager_at(tmp_path, start_over=True) as manager:
        for step in (1, 2):
            manager.save(step, state_of(-step)).wait()
        assert manager.steps() == [1, 2]
    assert resumed(tmp_path) == (2, -2)
    assert [name[0] for name in superseded(tmp_path)] == ["1", "2", "3"]
    # The next process loads, and does not start over once more.
    go_on(tmp_path, None, 3)
    with manager_at(tmp_path) as manager:
        assert manager.steps() == [1, 2, 3]


def test_a_load_ends_starting_over(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with manager_at(tmp_path, start_over=True) as manager:
        assert manager.load(state_of(0)) == 2
        manager.save(3, state_of(3)).wait()
        assert manager.steps() == [1, 2, 3]
    assert not superseded(tmp_path)


def test_starting_over_in_an_empty_root_begins_nothing(tmp_path: Path) -> None:
    with manager_at(tmp_path, start_over=True) as manager:
        manager.save(1, state_of(1)).wait()
    assert b"timeline" not in (step_path(tmp_path, 1) / "manifest.json").read_bytes()


# ---------------------------------------------------------------------------------------------- falling back


def test_falling_back_past_a_damaged_step_begins_a_timeline(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    whole = {path: path.read_bytes() for path in step_path(tmp_path, 3).glob("*/*.safetensors")}
    damage(tmp_path, 3)
    go_on(tmp_path, None, 4)
    # The step is whole again: it must not come before the step that training went on to, nor among its chain.
    for path, data in whole.items():
        path.write_bytes(data)
    assert repair(tmp_path, settings=SETTINGS).is_whole
    assert resumed(tmp_path) == (4, -4)
    with manager_at(tmp_path) as manager:
        assert manager.steps() == [1, 2, 4]
    (name,) = superseded(tmp_path)
    assert resumed(tmp_path, name) == (3, 3)


def test_a_damaged_step_that_is_repaired_before_the_next_save_is_newest_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    whole = {path: path.read_bytes() for path in step_path(tmp_path, 2).glob("*/*.safetensors")}
    damage(tmp_path, 2)
    assert resumed(tmp_path) == (1, 1)
    for path, data in whole.items():
        path.write_bytes(data)
    assert repair(tmp_path, settings=SETTINGS).is_whole
    go_on(tmp_path, None, 3)
    assert superseded(tmp_path) == []


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_damaged_manifest_begins_one_timeline_and_not_one_a_restart(tmp_path: Path, is_moved: bool) -> None:
    save_steps(tmp_path, 1, 2, 9)
    if is_moved:
        # A save at step 9 on a new timeline was killed after it had moved the manifest.
        store = store_of(tmp_path)
        declare_timelines(store, 1, FIRST_TIMELINE)
        displace(store, 9, read_manifest(store, "step-000000000009/").digest, 1)
    (path,) = tmp_path.glob("superseded/*.json") if is_moved else [step_path(tmp_path, 9) / "manifest.json"]
    path.write_bytes(path.read_bytes()[:-40])
    with manager_at(tmp_path) as manager:
        assert manager.steps() == [1, 2, 9], "a resume tries it and reports the damage"
    for step in (3, 4, 5):
        go_on(tmp_path, None, step)
    manifest = read_manifest(store_of(tmp_path), "step-000000000005/")
    assert manifest.timeline.number == 2
    assert resumed(tmp_path) == (5, -5)
    backups = [path for path in (tmp_path / "quarantine").iterdir() if "manifest" in path.name]
    assert len(backups) == 1, "the damaged manifest is kept"


def test_a_save_that_fails_after_a_fallback_leaves_the_steps_before_it_superseded(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    go_on(tmp_path, 1, 2)
    damage(tmp_path, 2)
    assert resumed(tmp_path) == (1, 1)
    # The next save of step 2 ended after it had moved the manifest of the damaged step, the only one of timeline 2.
    store = store_of(tmp_path)
    assert supersede(store, 2, newest_epoch(store))
    assert resumed(tmp_path) == (1, 1), "training has gone back past step 3"
    assert [name.split("@")[0] for name in superseded(tmp_path)] == ["2", "3"]
    go_on(tmp_path, None, 2)
    assert read_manifest(store, "step-000000000002/").timeline.number == 3
    assert resumed(tmp_path) == (2, -2)


# ------------------------------------------------------------------------------------------------- in flight


def test_a_save_in_flight_at_the_load_belongs_to_the_old_timeline() -> None:
    store, released = fresh_store(), Event()

    def stall(operation: FaultPoint) -> None:
        if operation.subject.endswith("000003/manifest.json"):
            released.wait(20.0)

    slow = FaultyStore(store, Faults(stall, names=("put_if_absent",), lasting=True))

    def work(comm: ThreadComm) -> None:
        job = Job(comm, SystemClock(), replace(PATIENT, collect_grace_seconds=0.0), NumpyFramework(0))
        run = CheckpointManager.over(slow, job, policies=Policies(keep=LatestN(2)))
        for step in (1, 2):
            saved(run, step, {"p": plain(float(step))})
        handle = run.save(3, {"p": plain(3.0)})
        run.load({"p": plain(0.0)}, 2)
        again = run.save(4, {"p": plain(4.0)})
        released.set()
        handle.wait()
        # Step 4 is current a moment before its handle says that it is committed.
        assert run._parts.pins.current[0] in (2, 4), "training goes on from there"
        again.wait()
        assert run.steps() == [1, 2, 4] or run.steps() == [2, 4]
        run.close()

    assert outcomes_of_ranks(1, work) == [None]
    assert read_manifest(store, "step-000000000003/").timeline.number == 1
    assert read_manifest(store, "step-000000000004/").timeline.number == 2


def test_a_step_that_cannot_be_read_fails_no_load_and_counts_as_newer() -> None:
    store = fresh_store()

    def work(comm: ThreadComm) -> None:
        run = run_of(comm, store)
        for step in (1, 2):
            saved(run, step, {"p": plain(float(step))})
        run.close()
        data = bytearray(store.get("step-000000000002/manifest.json", 1 << 20))
        data[-20] ^= 1
        store.put("step-000000000002/manifest.json", bytes(data))
        run = run_of(comm, store)
        assert run.load({"p": plain(0.0)}, 1) == 1
        saved(run, 3, {"p": plain(3.0)})
        run.close()

    assert outcomes_of_ranks(1, work) == [None]
    assert read_manifest(store, "step-000000000003/").timeline.number == 2


class LocalShards:
    """One call to a store that waits until it is released."""

    def __init__(self, name: str, key_end: str) -> None:
        self.reached, self._released = Event(), Event()
        self._name, self._key_end = name, key_end

    def over(self, store: Store) -> FaultyStore:
        return FaultyStore(store, Faults(self._wait, names=(self._name,), lasting=True))

    def _wait(self, operation: FaultPoint) -> None:
        if operation.subject.endswith(self._key_end) and not self._released.is_set():
            self.reached.set()
            assert self._released.wait(60.0)

    def require_reached(self) -> None:
        assert self.reached.wait(60.0), f"no call {self._name} of {self._key_end}"

    def release(self) -> None:
        self._released.set()


def step_3_twice(comm: ThreadComm, store: Store, held: LocalShards) -> tuple[CheckpointManager, SaveHandle, SaveHandle]:
    """Save step 3; while that save is held, go back to step 1 and save step 3 again."""
    # Without memory for copies a save writes in the call, while the one before it still runs.
    job = Job(comm, SystemClock(), replace(PATIENT, arena_bytes_max=0), NumpyFramework(0))
    run = CheckpointManager.over(held.over(store), job)
    for step in (1, 2):
        saved(run, step, {"p": plain(float(step))})
    first = run.save(3, {"p": plain(3.0)})
    held.require_reached()
    assert run.load({"p": plain(0.0)}, 1) == 1
    again = run.save(3, {"p": plain(-3.0)})
    held.release()
    return run, first, again


def test_the_clean_up_after_a_save_spares_a_newer_save_of_the_same_step() -> None:
    store, held = fresh_store(), LocalShards("folders", "step-000000000003/")

    def work(comm: ThreadComm) -> None:
        run, first, again = step_3_twice(comm, store, held)
        first.wait(timeout=60.0)
        again.wait(timeout=60.0)
        run.close()

    assert outcomes_of_ranks(1, work) == [None]
    assert read_manifest(store, "step-000000000003/").timeline.number == 2


def test_a_save_that_comes_second_to_a_step_is_refused_by_name() -> None:
    store, held = fresh_store(), LocalShards("put_if_absent", "step-000000000003/manifest.json")

    def work(comm: ThreadComm) -> None:
        run, first, again = step_3_twice(comm, store, held)
        first.wait(timeout=60.0)
        # Not "a part is missing": the clean-up of the first must leave the files of the second to it.
        with pytest.raises(ConflictError, match="an earlier save of this job has saved step 3"):
            again.wait(timeout=60.0)
        run.close()

    assert outcomes_of_ranks(1, work) == [None]
    assert read_manifest(store, "step-000000000003/").timeline.number == 1


# ------------------------------------------------------------------------------------------------ retention


def test_nothing_is_collected_without_keep(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    go_on(tmp_path, 1, 2)
    go_on(tmp_path, 1, 2)
    assert len(list_steps(tmp_path).steps) == 5


def test_the_chain_keeps_its_latest_steps_and_the_former_timeline_its_newest(tmp_path: Path) -> None:
    save_steps(tmp_path, 100, 200, 300, 400, 500)
    go_on(tmp_path, 200, 240, 280, 320, 360, keep_last=2)
    # A restart with the policy, which the defect let resume 500 and remove 360.
    go_on(tmp_path, None, 380, keep_last=2)
    collect(tmp_path, 2)
    assert resumed(tmp_path) == (380, -380)
    steps = list_steps(tmp_path).steps
    assert [record.step for record in steps if record.superseded] == [500]
    assert [record.step for record in steps if record.committed] == [360, 380]


def test_the_newest_step_that_was_moved_stays_whole_though_the_policy_removes_others(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    go_on(tmp_path, 1, 2, 3, 4, 5, keep_last=1)
    collect(tmp_path, 1)
    for name in superseded(tmp_path):
        assert list(holdfast.open_checkpoint(tmp_path / name).verify()) == []
    assert {name[0] for name in superseded(tmp_path)} == {"3"}
    assert [path.name[:12] for path in (tmp_path / "superseded").iterdir()] == ["000000000003"]
    with manager_at(tmp_path) as manager:
        assert 5 in manager.steps() and 4 not in manager.steps()


def test_what_stays_is_whole_though_the_steps_that_wrote_its_tensors_went(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in range(1, 7):
        go_on(tmp_path, step, step + 1, step + 2, keep_last=2)
    steps = list_steps(tmp_path).steps
    assert [record.step for record in steps if record.committed] == [7, 8]
    assert [record.step for record in steps if record.superseded] == [5, 6, 7]
    paths = [step_path(tmp_path, 7), step_path(tmp_path, 8), *(tmp_path / name for name in superseded(tmp_path))]
    for path in paths:
        assert list(holdfast.open_checkpoint(path).verify()) == []


def test_a_superseded_step_that_is_read_stays_until_it_was_read(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    go_on(tmp_path, 1, 2, 3)
    (name,) = superseded(tmp_path)
    store = store_of(tmp_path)
    (key,) = [entry.key for entry in store.list("superseded/")]
    location = CheckpointLocation(store, "step-000000000002/", 2, root=store, moved_manifest=key)
    lease = ReaderLease(SystemClock(), SETTINGS.lease_seconds)
    lease.begin(location, decode_manifest(store.get(key, 1 << 20), key))
    for step in range(2, 7):
        go_on(tmp_path, step, step + 1, step + 2, keep_last=2)
    assert name in superseded(tmp_path)
    lease.close()
    report = collected(store, SystemClock(), LatestN(2), 0.0, SETTINGS.lease_seconds)
    assert name in report.superseded and name not in superseded(tmp_path)
    assert not [entry for entry in store.list("superseded/") if "000000000002" in entry.key]


@pytest.mark.parametrize("loss", ["quarantined", "torn", "unreadable", "set aside"])
def test_the_step_before_the_fork_stays_while_no_newer_one_loads(tmp_path: Path, loss: str) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    go_on(tmp_path, 2, 3, 4)
    for step in (3, 4):
        damage(tmp_path, step)
        for pack in step_path(tmp_path, step).glob("*/*.safetensors") if loss == "torn" else ():
            pack.write_bytes(pack.read_bytes()[:-1])
        if loss == "unreadable":
            manifest = step_path(tmp_path, step) / "manifest.json"
            manifest.write_bytes(manifest.read_bytes()[:-40])
    if loss in ("quarantined", "set aside"):
        assert resumed(tmp_path) == (2, 2)
    store = store_of(tmp_path)
    for step in (3, 4) if loss == "set aside" else ():
        # A save of these steps failed after it had moved the damaged manifests.
        assert supersede(store, step, newest_epoch(store))
    collect(tmp_path, 1)
    assert resumed(tmp_path) == (2, 2), "a restart falls back to the fork"
    assert [record.step for record in list_steps(tmp_path).steps if record.committed and record.step < 3] == [2]


def test_the_step_that_training_goes_on_from_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    with manager_at(tmp_path, keep_last=1) as manager:
        assert manager.load(state_of(0), step=2) == 2
        assert manager._parts.collecting is not None
        assert 2 in manager.kept()
        manager.save(3, state_of(-3)).wait()
        manager.save(5, state_of(-5)).wait()
    assert resumed(tmp_path) == (5, -5)


# --------------------------------------------------------------------------------------------- older readers


def test_a_reader_without_timelines_refuses_a_rewound_root_by_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    store = store_of(tmp_path)
    go_on(tmp_path, 1, 2)
    data = store.get(accepted_key(newest_epoch(store)), 1 << 20)
    # Readers of format 1.2 read this list before they choose a step, and expect this kind.
    with pytest.raises(InvalidError, match="is of kind 'accepted in a run with timelines'"):
        decode_sealed(data, "accepted", dict, "here")


def test_a_fence_of_the_next_writer_keeps_superseded_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    go_on(tmp_path, 1, 2)
    for step in (3, 4):
        go_on(tmp_path, None, step)
    (name,) = superseded(tmp_path)
    assert resumed(tmp_path, name) == (2, 2)
    assert committed_steps(store_of(tmp_path)) == [1, 2, 3, 4]
