"""What an overwrite, or a save beside one, removes: never a file of what is published or may yet be."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast._face import export_wiring, wiring
from holdfast._face.comparison import diff
from holdfast._face.offline_api import export, repair
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.errors import ConflictError, CorruptError, UnavailableError
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.path_claim import release_path_claim, take_path_claim
from holdfast.stored.leases.process import this_process
from holdfast.stored.repository.overwriting import claim_of, put_claim, read_claim, take_claim_away
from holdfast.training.saving.save import save_and_wait
from holdfast.training.saving.target import path_save
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.support.overwritten_checkpoint import (
    EVERYTHING,
    HASTY,
    PATIENT,
    attempt_at,
    attempts_at,
    job_of,
    number_at,
    save,
    state_of,
)

WAIT_SECONDS = 20.0


def test_a_late_plain_save_does_not_remove_what_replaced_it(tmp_path: Path) -> None:
    """An overwrite writes while the plain save lists leftovers, and ends before that save looks for a claim."""
    best = tmp_path / "best"
    store = LocalStore(best, settings=PATIENT)
    is_written, goes_on = threading.Event(), threading.Event()

    def wait_written(point: FaultPoint) -> None:
        if point.subject.endswith(".next.json"):
            is_written.set()
            assert goes_on.wait(WAIT_SECONDS)

    def overwrite() -> None:
        save(FaultyStore(store, Faults(wait_written, names={"put_if_absent"}, lasting=True)), 2, PATIENT)

    other = threading.Thread(target=overwrite)

    def act(point: FaultPoint) -> None:
        if point.name == "folders" and (best / "manifest.json").exists():
            other.start()
            assert is_written.wait(WAIT_SECONDS)
        if point.name == "get" and point.subject == "overwriting/claim.json" and not goes_on.is_set():
            goes_on.set()
            other.join(WAIT_SECONDS)

    # The manifest may be read before the claim or after it: the overwrite ends between the two.
    job = job_of(PATIENT)
    location = CheckpointLocation(FaultyStore(store, Faults(act, lasting=True)), "", None)
    save_and_wait(job, *path_save(job, location, state_of(1), EVERYTHING))
    job.close()
    assert goes_on.is_set() and not other.is_alive()
    assert number_at(best) == 2


def test_a_save_that_is_quicker_than_the_removal_removes_all_the_same(tmp_path: Path) -> None:
    best = tmp_path / "best"
    for number in (1, 2):
        save(best, number)
    first_two, published = attempts_at(best), threading.Event()
    oldest = (first_two - {attempt_at(best)}).pop()

    def wait_published(point: FaultPoint) -> None:
        if point.name == "list" and point.subject == f"{oldest}/":
            assert published.wait(WAIT_SECONDS)

    def note_published(point: FaultPoint) -> None:
        if point.name == "move":
            published.set()

    slow = FaultyStore(LocalStore(best, settings=HASTY), Faults(wait_published, lasting=True))
    save(FaultyStore(slow, Faults(note_published, lasting=True, after=True)), 3)
    assert published.is_set() and number_at(best) == 3
    assert oldest not in attempts_at(best)


def test_a_claim_that_was_moved_away_by_mistake_does_not_come_back_late(tmp_path: Path) -> None:
    """Its files may be gone by then: another job has had the path meanwhile, and counted it as dead."""
    clock, store = SystemClock(), LocalStore(tmp_path / "best", settings=HASTY)
    save(tmp_path / "best", 1)
    dead, alive = (claim_of(this_process(clock, 30.0)) for _ in range(2))
    assert put_claim(store, alive)

    def another_job(point: FaultPoint) -> None:
        release_path_claim(take_path_claim(store, clock, 30.0, "another job"))

    # It is stopped once it has read what it moved.
    stopped = FaultyStore(store, Faults(another_job, names={"get"}, at=1, after=True))
    take_claim_away(stopped, dead)
    assert read_claim(store) is None


def test_a_claim_that_was_moved_away_by_mistake_comes_back(tmp_path: Path) -> None:
    clock, store = SystemClock(), LocalStore(tmp_path / "best", settings=HASTY)
    save(tmp_path / "best", 1)
    dead, alive = (claim_of(this_process(clock, 30.0)) for _ in range(2))
    assert put_claim(store, alive)
    take_claim_away(store, dead)
    found = read_claim(store)
    assert found is not None and found.data == alive
    assert [entry.key for entry in store.list("overwriting/")] == ["overwriting/claim.json"]


@pytest.mark.parametrize("name", ["get", "sync"])
def test_one_whose_files_were_removed_is_told_that_another_job_took_over(tmp_path: Path, name: str) -> None:
    """It was stopped while it committed; the next one counted its attempt as one that never was a checkpoint."""
    best = tmp_path / "best"
    store = LocalStore(best, settings=HASTY)
    save(best, 1)

    taken: list[FaultPoint] = []

    def take_over(point: FaultPoint) -> None:
        if "/parts/" in point.subject and not taken:
            taken.append(point)
            store.delete(["overwriting/claim.json"])
            save(best, 2)

    faults = Faults(take_over, names={name}, lasting=True)
    with pytest.raises(ConflictError, match="may not overwrite the checkpoint any more") as refusal:
        save(FaultyStore(store, faults), 3)
    assert taken and isinstance(refusal.value.__cause__, CorruptError | UnavailableError)
    assert number_at(best) == 2


def test_an_error_of_one_that_holds_its_claim_is_its_own(tmp_path: Path) -> None:
    best = tmp_path / "best"
    save(best, 1)
    faults = Faults(raise_error(UnavailableError), names={"sync"})
    with pytest.raises(UnavailableError, match="a fault was injected at sync"):
        save(FaultyStore(LocalStore(best, settings=HASTY), faults), 2)
    assert number_at(best) == 1


def test_a_repair_does_not_undo_an_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job overwrites the checkpoint once the repair has compared its manifest: one of the two is told."""
    best = tmp_path / "best"
    save(best, 1)
    (best / "manifest.json").write_bytes((best / "manifest.json").read_bytes()[:-5])
    said: list[str] = []

    def overwrite(point: FaultPoint) -> None:
        if point.subject.startswith("replaced/") and not said:
            said.append("begun")
            try:
                save(best, 2)
                said.append("done")
            except ConflictError as error:
                said.append(str(error))

    store = FaultyStore(LocalStore(best, settings=HASTY), Faults(overwrite, names={"put_if_absent"}, lasting=True))
    monkeypatch.setattr(wiring, "repairable_at", lambda *_: (store, None))
    assert repair(best, settings=HASTY).is_whole
    assert said[0] == "begun" and "another job overwrites this checkpoint" in said[1]
    assert number_at(best) == 1 and not (best / "overwriting").exists()
    save(best, 3)
    assert number_at(best) == 3


@pytest.mark.parametrize("act", ["export to holdfast", "export to safetensors", "diff"])
def test_what_reads_for_long_says_that_it_was_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """Not that the checkpoint is damaged: the files of the old one were removed."""
    best, out = tmp_path / "best", tmp_path / "out"
    save(best, 1)
    save(tmp_path / "other", 1)
    opened = wiring.checkpoint_at

    def overwritten(path: object, settings: Settings, step: int | None = None, layout: None = None) -> Checkpoint:
        checkpoint = opened(path, settings, step, layout)
        if path == best:
            assert checkpoint.index
            save(best, 2)
            save(best, 3)
        return checkpoint

    for module in (wiring, export_wiring):
        monkeypatch.setattr(module, "checkpoint_at", overwritten)
    with pytest.raises(ConflictError, match="was overwritten while it was read"):
        if act == "diff":
            diff(best, tmp_path / "other", full=True)
        else:
            export(best, out, to=act.removeprefix("export to "))
    assert not (out / "manifest.json").exists() and not (out / "model.safetensors").exists()
