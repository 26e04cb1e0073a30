"""However a save fails, its handle is completed and says why."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.names import epoch_key
from holdfast.core.format.part import RankPart
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.publishing.leftovers import delete_leftovers
from holdfast.stored.repository.timelines import displace
from holdfast.training.saving.attempt import SaveAttempt
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.saving.save import begin_save
from holdfast.training.saving.target import path_save
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.support.overwritten_checkpoint import EVERYTHING, job_of, location_of, state_of
from tests.unit.ranks import World, fresh_store, plain


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def out_of_memory(_: FaultPoint) -> None:
    raise MemoryError("no room")


def unprintable(_: FaultPoint) -> None:
    raise Unprintable


@pytest.mark.parametrize(
    ("names", "failure"),
    [
        (("upload.write", "delete"), out_of_memory),
        (("upload.write",), unprintable),
        (("put_if_absent", "delete"), raise_error(OSError)),
    ],
)
def test_a_failure_while_a_failed_save_is_ended_completes_the_handle(
    names: tuple[str, ...], failure: Callable[[FaultPoint], None]
) -> None:
    store = fresh_store()
    broken = FaultyStore(store, Faults(failure, names=names, lasting=True))

    def part(rank: int, run: CheckpointManager) -> object:
        handle = run.save(1, {"p": plain(1.0)})
        with pytest.raises(UnavailableError):
            handle.wait(timeout=10.0)
        return handle.committed.done()

    assert World(1, store=store, stores={0: broken}).play(part) == [True]


def test_of_four_saves_of_one_step_begun_together_one_is_whole() -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> object:
        handles = [run.save(1, {"p": plain(float(value))}) for value in range(4)]
        return [type(outcome_of(handle)) for handle in handles]

    for outcomes in world.play(part):
        assert outcomes == [SaveReport, ConflictError, ConflictError, ConflictError]
    target = {"p": plain(9.0)}
    assert World(1, store=world.store).play(lambda rank, run: run.load(target)) == [1]
    assert (target["p"].array == 0.0).all()


def outcome_of(handle: SaveHandle) -> object:
    try:
        return handle.wait(timeout=25.0)
    except CheckpointError as error:
        return error


def test_a_save_whose_end_fails_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a failed save raises by itself: the caller hears of it, rather than to wait for good."""

    def lose(attempt: SaveAttempt, error: BaseException) -> None:
        raise MemoryError("no room to fail in")

    monkeypatch.setattr(SaveAttempt, "_lose", lose)
    store = fresh_store()
    broken = FaultyStore(store, Faults(raise_error(UnavailableError), names=("upload.write",), lasting=True))

    def part(rank: int, run: CheckpointManager) -> object:
        handle = run.save(1, {"p": plain(1.0)})
        with pytest.raises(UnavailableError, match="outcome unknown: MemoryError: no room to fail in"):
            handle.wait(timeout=10.0)
        return handle.may_be_committed

    assert World(1, store=store, stores={0: broken}).play(part) == [True]


def test_an_error_of_any_kind_after_the_publishing_leaves_the_published_files() -> None:
    """The look at the epoch after the put runs out of memory: the manifest is there, so no file may be removed."""
    world = World(1)
    raised: list[str] = []

    def no_room(operation: FaultPoint) -> None:
        if operation.subject == epoch_key(2) and not raised and world.committed() == [1]:
            raised.append(operation.subject)
            raise MemoryError("no room")

    broken = FaultyStore(world.store, Faults(no_room, names=("get",), lasting=True))

    def part(rank: int, run: CheckpointManager) -> object:
        outcome_of(run.save(1, {"p": plain(1.0)}))
        target = {"p": plain(9.0)}
        return run.load(target), float(target["p"].array[0])

    assert World(1, store=world.store, stores={0: broken}).play(part) == [(1, 1.0)]
    assert raised


def test_a_state_that_cannot_be_collected_names_the_error_of_its_object() -> None:
    class Full(dict[str, object]):
        def items(self) -> object:  # type: ignore[override]
            raise MemoryError("no room for the copy")

    def part(rank: int, run: CheckpointManager) -> object:
        handle = run.save(1, Full(p=plain(1.0)))
        with pytest.raises(UnavailableError, match="the state could not be collected now: MemoryError") as caught:
            handle.wait(timeout=10.0)
        return type(caught.value.__cause__)

    assert World(1).play(part) == [MemoryError]


def test_a_clean_up_removes_nothing_once_its_manifest_has_made_room_for_a_newer_save() -> None:
    world = World(1)
    world.play(lambda rank, run: run.save(1, {"p": plain(1.0)}).wait(timeout=60.0))
    store, manifest = world.store, world.manifest(1)
    dead, newer = ("step-000000000001/" + folder + "/r00000.safetensors" for folder in ("0" * 16, "f" * 16))
    location = CheckpointLocation(store, "step-000000000001/", 1, root=store)
    store.put(dead, b"of a save that failed")
    delete_leftovers(location, manifest.attempt, "save of step 1", 0)
    assert dead not in world.files()
    displace(store, 1, manifest.digest, 1)
    store.put(newer, b"of the save that goes on")
    delete_leftovers(location, manifest.attempt, "save of step 1", 0)
    assert newer in world.files()


@pytest.mark.parametrize("hanging", ("delete", "tags"))
def test_the_outcome_of_a_published_save_does_not_wait_for_storage_that_hangs(
    hanging: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The test ends the hang itself, once the outcome is there."""
    monkeypatch.setattr("holdfast.core.engine.background._SOON_SECONDS", 0.05)
    over, met = threading.Event(), threading.Event()

    def hang(operation: FaultPoint) -> None:
        if hanging == "delete" or "tags/" in operation.subject:
            met.set()
            assert over.wait(60.0)

    world = World(2)
    dead = f"step-000000000001/{'0' * 16}/r00000.safetensors"
    world.store.put(dead, b"of a save that failed")
    names = {"delete"} if hanging == "delete" else {"put", "put_if_absent"}
    broken = FaultyStore(world.store, Faults(hang, names=names, lasting=True))
    world = replace(world, stores={0: broken, 1: broken})

    both = threading.Barrier(2)

    def part(rank: int, run: CheckpointManager) -> object:
        try:
            report = run.save(1, {"p": plain(1.0)}, tags=["paper"]).wait(timeout=30.0)
            both.wait(30.0)
            assert met.wait(30.0)
        finally:
            over.set()
        return report

    assert all(isinstance(report, SaveReport) for report in world.play(part))
    assert world.committed() == [1]
    assert ("removal of files" in caplog.text) == (hanging == "delete")
    assert "gets its names later" in caplog.text, "a tag is put under a lease, which is deleted"


def refused(path: Path) -> weakref.ref[torch.Tensor]:
    tensor = torch.zeros(1000)
    with holdfast.CheckpointManager(path, process_group=False) as manager:
        try:
            manager.save(1, {"tensor": tensor, "wrong": object()})
        except InvalidError:
            return weakref.ref(tensor)
    raise AssertionError("the first save of a manager raises at a value that cannot be saved")


def test_a_refused_state_is_freed_at_once(tmp_path: Path) -> None:
    """A user who catches the error may need the memory for the next try."""
    gc.collect()
    gc.disable()
    try:
        assert refused(tmp_path / "one")() is None
    finally:
        gc.enable()


def test_no_part_of_a_save_lives_at_the_commit(tmp_path: Path) -> None:
    """The caller goes on then, and the collector would walk hundreds of thousands of values of a large state."""
    job, alive = job_of(), list[int]()
    target, collect = path_save(job, location_of(tmp_path / "one"), state_of(1), EVERYTHING, overwrite=False)

    def count() -> None:
        alive.append(sum(isinstance(each, RankPart) for each in gc.get_objects()))

    gc.collect()
    begin_save(job, replace(target, on_end=count), collect).wait()
    job.close()
    assert alive == [0]
