"""Links to the packs of other steps: who makes them, when they go, and what is never linked."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import api
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.clock import SystemClock
from holdfast.core.format.names import (
    is_attempt_file,
    is_link_name,
    is_pack_name,
    link_name,
    manifest_key,
    step_folder,
    step_of_pack,
)
from holdfast.errors import CheckpointError
from holdfast.policies import LatestN
from holdfast.settings import Settings
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.quarantine import identity_at, quarantine
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from tests.doubles.faults import Faults, FaultyStore
from tests.support.crashed_run import run_at
from tests.support.tuning import tuned

SMALL = tuned(Settings(chunk_bytes=4096, collect_grace_seconds=0.0), window_bytes=8192, unchanged_bytes_min=4096)


def manager_at(root: Path, settings: Settings = SMALL) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, process_group=False, settings=settings)


def state_at(step: int) -> dict[str, object]:
    return {"frozen": torch.arange(6000.0), "moving": torch.full((3000,), float(step))}


def links_under(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if is_link_name(path.name))


def store_of(root: Path) -> LocalStore:
    return LocalStore(root, settings=SMALL)


@pytest.mark.parametrize(
    "name",
    ["r00003.safetensors", "r00003-12.safetensors", "enc/r00003.safetensors", "coded/r00003-1.safetensors"],
)
def test_the_name_of_a_link_follows_from_that_of_the_pack(name: str) -> None:
    pack = f"step-000000001000/0123456789abcdef/{name}"
    link = link_name(pack)
    assert is_link_name(link) and is_attempt_file(link)
    assert not is_pack_name(link) and step_of_pack(link) is None
    assert not link.endswith(".safetensors"), "readers that list the folder must not take it for a pack of this step"
    assert link != link_name("step-000000001000/0123456789abcdef/r00004.safetensors")


def test_one_link_for_each_pack_and_none_without_a_reference(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step)).wait()
        manager.save(4, {"frozen": torch.zeros(6000), "moving": torch.zeros(3000)}).wait()
    assert [len(links_under(tmp_path / step_folder(step))) for step in (1, 2, 3, 4)] == [0, 1, 1, 0]
    (pack,) = (tmp_path / step_folder(1)).glob("*/r00000.safetensors")
    for step in (2, 3):
        (link,) = (tmp_path / step_folder(step)).glob("*/*.link")
        assert link.samefile(pack)
        assert not list((tmp_path / step_folder(step)).glob("*/step*.safetensors"))


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    with manager_at(tmp_path, tuned(Settings(link_unchanged=False), unchanged_bytes_min=4096)) as manager:
        for step in (1, 2):
            report = manager.save(step, state_at(step)).wait()
    assert report is not None and report.unchanged_bytes == 24_000
    assert links_under(tmp_path) == []
    assert [record.stands_alone for record in api.list_steps(tmp_path).steps] == [True, False]


def test_an_aborted_save_leaves_no_link(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        manager.save(1, state_at(1)).wait()
        gate = threading.Event()
        blocked = manager._job.commits.submit(lambda: gate.wait(30.0))
        handle = manager.save(2, state_at(2))
        assert len(links_under(tmp_path)) == 1, "made in the call, before this rank votes"
        (link,) = (tmp_path / step_folder(2)).glob("*/*.link")
        # A folder in place of the part: this rank cannot write it.
        (link.parent / "parts" / "r00000.msgpack").mkdir(parents=True)
        gate.set()
        blocked.result()
        with pytest.raises(CheckpointError):
            handle.wait()
        assert links_under(tmp_path) == []


def test_links_of_a_dead_attempt_go_with_it(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        manager.save(1, state_at(1)).wait()
        manager.save(2, state_at(2)).wait()
    (attempt,) = (path.parent for path in (tmp_path / step_folder(2)).glob("*/*.link"))
    # What a process that was killed before its commit leaves, at a step that is saved and at one that is not.
    for step in (2, 3):
        shutil.copytree(attempt, tmp_path / step_folder(step) / ("0" * 15 + str(step)), copy_function=os.link)
    with manager_at(tmp_path) as manager:
        manager.load(state_at(0))
        manager.save(3, state_at(3)).wait()
    assert len(links_under(tmp_path / step_folder(3))) == 1
    report = api.collect(tmp_path, grace_seconds=0.0)
    assert report.files == 4 and len(links_under(tmp_path / step_folder(2))) == 1
    for step in (1, 2, 3):
        assert list(holdfast.open_checkpoint(tmp_path / step_folder(step)).verify()) == []


def test_a_removed_step_takes_its_links_and_frees_no_bytes_with_them(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step)).wait()
    sizes = {path: path.stat().st_size for path in tmp_path.glob("step-*/*/**/*") if path.is_file()}
    (pack,) = (tmp_path / step_folder(1)).glob("*/r00000.safetensors")
    report = api.collect(tmp_path, keep=LatestN(1), grace_seconds=0.0)
    assert report.steps == (1, 2)
    assert not (tmp_path / step_folder(1)).exists() and not (tmp_path / step_folder(2)).exists()
    # The pack that the last step has a link to frees no bytes either.
    freed = [path for path in sizes if not path.exists() and not is_link_name(path.name) and path != pack]
    assert report.bytes == sum(sizes[path] for path in freed)
    assert any(is_link_name(path.name) for path in sizes if not path.exists())
    assert list(holdfast.open_checkpoint(tmp_path / step_folder(3)).verify()) == []


def test_a_collection_does_not_take_links_for_strangers_or_list_the_step_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Faults()
    store = FaultyStore(store_of(tmp_path), seen)
    with manager_at(tmp_path) as manager, caplog.at_level(logging.WARNING):
        for step in (1, 2):
            manager.save(step, state_at(step)).wait()
        collector = CheckpointGC(store, SystemClock(), LatestN(2), None)
        assert not collector.survey().unreferenced
        seen.seen.clear()
        assert not collector.survey().unreferenced
    assert [point.subject for point in seen.seen if point.name == "list" and "step-" in str(point.subject)] == []
    assert "no file of a save" not in caplog.text


def test_a_step_whose_packs_are_found_by_links_alone_is_not_torn(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step)).wait()
    shutil.rmtree(tmp_path / step_folder(1))
    survey = api.collect(tmp_path, keep=LatestN(1), dry_run=True)
    assert survey.steps == (2,) and survey.reasons[3] == ("latest 1", "newest")


def test_what_is_under_quarantine_is_not_linked(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        manager.save(1, state_at(1)).wait()
        store = store_of(tmp_path)
        quarantine(store, 1, manifest_key(1), identity_at(store, manifest_key(1)), "a test", "today")
        report = manager.save(2, state_at(2)).wait()
    assert report is not None and report.unchanged_bytes == 0
    assert links_under(tmp_path) == []


def test_an_attempt_under_quarantine_keeps_its_links(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).wait()
        store = store_of(tmp_path)
        quarantine(store, 2, manifest_key(2), identity_at(store, manifest_key(2)), "a test", "today")
        manager.save(3, state_at(3)).wait()
    api.collect(tmp_path, keep=LatestN(1), grace_seconds=0.0)
    assert len(links_under(tmp_path / step_folder(2))) == 1


def test_what_an_import_by_reference_holds_is_not_linked(tmp_path: Path) -> None:
    save_file({"frozen": torch.arange(6000.0)}, tmp_path / "theirs.safetensors")
    settings = tuned(Settings(allowed_roots=(str(tmp_path),)), unchanged_bytes_min=4096)
    holdfast.import_checkpoint(tmp_path / "theirs.safetensors", tmp_path / "run", step=1, settings=settings)
    state = {"frozen": torch.zeros(6000)}
    with manager_at(tmp_path / "run", settings) as manager:
        manager.load({"model": state})
        manager.save(2, {"model": state}).wait()
    assert links_under(tmp_path) == []
    assert (tmp_path / "theirs.safetensors").stat().st_nlink == 1


class Vanishing(Syscalls):
    """An operating system on which somebody removes a pack just before it is linked."""

    def link(self, name: str, new_name: str, *, dir_fd: int, new_dir_fd: int | None = None) -> None:
        if new_dir_fd is not None:
            self.unlink(name, dir_fd=dir_fd)
        super().link(name, new_name, dir_fd=dir_fd, new_dir_fd=new_dir_fd)


def test_elements_that_are_not_finite_count_once_if_the_pack_vanishes(tmp_path: Path) -> None:
    settings = tuned(Settings(count_nonfinite=True), unchanged_bytes_min=4096)
    frozen = torch.arange(6000.0)
    frozen[7] = float("nan")
    with run_at(LocalStore(tmp_path, settings=settings, syscalls=Vanishing()), settings=settings) as manager:
        for step in (1, 2):
            report = manager.save(step, {"frozen": frozen}).wait()
    assert report is not None and report.unchanged_bytes == 0
    counted = read_manifest(store_of(tmp_path), step_folder(2)).health
    assert counted is not None and counted.nonfinite == {"frozen": 1}
