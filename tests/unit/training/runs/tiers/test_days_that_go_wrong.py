"""Days that go wrong: a near tier in memory at the end of a job, one that fails, writers that die between places."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

import holdfast
from holdfast._face.wiring import store_at
from holdfast.backends.stores.local import LocalStore
from holdfast.errors import ConflictError, CorruptError, UnavailableError
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.epochs import newest_epoch, read_heartbeat, require_newest
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.runs.tiers.drain import Drain
from tests.support.server_folders import ServerFolder
from tests.unit.training.runs.tiers.test_near_tier import (
    SETTINGS,
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


@pytest.fixture
def memory(tier_root: Path | ServerFolder) -> Iterator[Place]:
    """Return the places of a run whose near tier is in memory."""
    folder = Path(mkdtemp(dir="/dev/shm"))
    yield Place(tier_root, folder / "near")
    shutil.rmtree(folder)


# --------------------------------------------------------------------------------------------------- in memory


def test_a_job_that_ends_empties_a_near_tier_in_memory_once_the_root_has_its_newest_step(memory: Place) -> None:
    with memory.manager() as manager:
        loaded(manager)
        train(manager, 20, 30)
        (memory.near / "of_others").write_text("a file of another program")
    assert steps_in(memory.near) == [] and steps_in(memory.root) == [20, 30]
    assert (memory.near / "of_others").exists()


def test_an_exception_leaves_the_near_tier_in_memory_whole(memory: Place) -> None:
    with pytest.raises(ZeroDivisionError), memory.manager() as manager:
        loaded(manager)
        train(manager, 10, 30)
        raise ZeroDivisionError
    assert steps_in(memory.near) == [10, 30] and steps_in(memory.root) == []
    with memory.manager() as manager:
        assert loaded(manager) == 30
    assert steps_in(memory.near) == [] and steps_in(memory.root) == [30], "a job that saves nothing drains it"


def test_a_job_that_saves_nothing_drains_the_steps_of_a_killed_job(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dead:
        dead.setattr(Drain, "_wake_up", lambda self: None)
        with place.manager() as manager:
            loaded(manager)
            train(manager, 10)
            for step in (20, 30):
                handle = manager.maybe_save(step, state_of(step))
                assert handle is not None
                handle.wait("near")
            manager.close(wait=False)
    assert steps_in(place.root) == []
    with place.manager() as manager:
        assert loaded(manager) == 30
        manager.close(wait=False)
    assert steps_in(place.root) == [], "this end does not wait"
    with place.manager() as manager:
        assert loaded(manager) == 30
    assert steps_in(place.root) == [20, 30] and steps_in(place.near) == [20, 30]


def test_a_reader_beside_a_job_drains_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drain, "_wake_up", lambda self: None)
    with place.manager() as writer:
        loaded(writer)
        for step in (20, 30):
            handle = writer.maybe_save(step, state_of(step))
            assert handle is not None
            handle.wait("near")
        with place.manager() as reader:
            assert loaded(reader) == 30
        assert steps_in(place.root) == []
        train(writer, 50)
        writer.close(wait=False)


def test_a_job_warns_of_an_emptied_near_tier_and_of_another_one(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 20)
    shutil.rmtree(place.near)
    with place.manager() as manager:
        assert loaded(manager) == 20
        assert "is empty now: steps that only this folder had are lost" in caplog.text
        train(manager, 30)
    other = Place(place.root, place.near.with_name("other"))
    with other.manager() as manager:
        assert loaded(manager) == 30, "the close has drained the newest step"
        train(manager, 40)
    caplog.clear()
    with place.manager() as manager:
        assert f"was {other.near} on host" in caplog.text and "newer steps may lie there" in caplog.text
        assert loaded(manager) == 40
    caplog.clear()
    holdfast.api.drain(str(other.near), remove=True)
    with place.manager():
        assert "near tier of the run" not in caplog.text, "an emptied near tier is no loss"


def test_a_step_that_cannot_be_drained_keeps_the_near_tier_in_memory(memory: Place) -> None:
    with memory.manager() as manager:
        loaded(manager)
        train(manager, 10, 30)
        flip(packs_of(memory.near, 30)[0], -10)
    assert steps_in(memory.near) == [10, 30] and steps_in(memory.root) == []


def test_a_writer_that_was_replaced_removes_nothing(memory: Place) -> None:
    first = memory.manager()
    loaded(first)
    train(first, 20)
    first._parts.writer_lease.release()  # As a job on another host that was taken for dead.
    with memory.manager() as second:
        assert loaded(second) == 20
        train(second, 30)
        with pytest.raises(ConflictError):
            first._parts.writer_lease.hold(str(first._parts.run_facts))
        first.close()
        assert steps_in(memory.near) == [20, 30]


# --------------------------------------------------------------------------------------- a near tier that fails


def test_a_near_tier_that_is_gone_stops_neither_saves_into_the_root_nor_the_heartbeat(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 10)
        root = store_at(place.root, SETTINGS)
        number = newest_epoch(root)

        originals = {
            name: getattr(LocalStore, name) for name in ("get", "put", "put_if_absent", "list", "folders", "size")
        }
        for name, original in originals.items():

            def failing(store: LocalStore, *args: object, original: object = original, **named: object) -> object:
                if store.url == str(place.near):
                    raise UnavailableError(f"{store.url}: EIO")
                return original(store, *args, **named)  # type: ignore[operator]

            monkeypatch.setattr(LocalStore, name, failing)
        before = read_heartbeat(root, number)
        with pytest.raises(UnavailableError):
            manager.save(25, state_of(25), near_only=True).wait()
        report = manager.save(40, state_of(40)).wait()
        assert report is not None and report.tier == "root" and steps_in(place.root) == [40]
        manager._job.clock.sleep(SETTINGS.lease_seconds)
        assert read_heartbeat(root, number) != before
        monkeypatch.undo()
        train(manager, 50)
        assert loaded(manager) == 50 and loaded(manager, step=40) == 40


# ------------------------------------------------------------------------------------------- writers that die


def test_a_writer_that_died_between_the_places_leaves_no_hole(place: Place) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, 10)
        manager.close(wait=False)
    near, root = (store_at(path, SETTINGS) for path in (place.near, place.root))
    data = (place.root / "epochs/000000000001.json").read_bytes()
    dead = WriterLease(root, manager._job.clock, 5.0)  # It took epoch 2 at the root, and died.
    dead.hold(str(data))
    dead.release()
    both = WriterLease(TwoRoots(near, root), manager._job.clock, 5.0)
    assert both.hold(str(data)) == 3
    with pytest.raises(ConflictError):
        require_newest(near, 1)
    both.release()


def test_a_first_save_without_room_collects_no_due_step_of_an_earlier_job(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.training.runs.tiers.drain import Drain

    with monkeypatch.context() as dead:
        dead.setattr(Drain, "_wake_up", lambda self: None)
        with place.manager(every=10) as manager:
            loaded(manager)
            for step in (10, 20, 30):
                manager.save(step, state_of(step)).wait("near")
            manager.close(wait=False)
    with place.manager(every=10) as manager:
        assert loaded(manager) == 30
        parts = manager._near and manager._near.parts
        assert parts is not None and parts.collecting is not None
        parts.collecting.want_room()
        manager._job.clock.sleep(0.5)
        assert steps_in(place.near) == [10, 20, 30]
        train(manager, 40)
    assert steps_in(place.root) == [10, 20, 30, 40]


def test_a_drain_by_hand_copies_every_due_step_before_it_removes(place: Place) -> None:
    with place.manager(every=1000) as manager:
        loaded(manager)
        for step in (10, 20):
            handle = manager.save(step, state_of(step), near_only=True)
            handle.wait()
        manager.close(wait=False)
    assert holdfast.api.drain(str(place.near), step=20).steps == (20,)
    assert holdfast.api.drain(str(place.near), remove=True).left == (10,)


def test_a_drain_by_hand_copies_the_newest_step_that_can_be_read(place: Place) -> None:
    with place.manager(every=1000) as manager:
        loaded(manager)
        for step in (10, 20, 30):
            manager.save(step, state_of(step), near_only=True).wait()
        manager.close(wait=False)
    flip(place.near / "step-000000000030/manifest.json", -200)
    with pytest.raises(CorruptError):
        holdfast.api.drain(str(place.near), remove=True)
    assert steps_in(place.root) == [20] and 20 in steps_in(place.near), "nothing is removed beside damage"
