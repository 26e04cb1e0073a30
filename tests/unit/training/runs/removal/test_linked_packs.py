"""The pack of a removed step goes once each step that names it has a link, and stays, with the reason, until then."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import api
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.core.format.names import step_folder
from holdfast.policies import LatestN
from holdfast.settings import Settings
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.epochs import current_fence
from holdfast.stored.repository.removal import inspect_step
from holdfast.training.runs.removal.linked_packs import linked_packs
from tests.support.tuning import tuned
from tests.unit.cli.running import holdfast as command

SMALL = tuned(Settings(chunk_bytes=4096, collect_grace_seconds=0.0), window_bytes=8192, unchanged_bytes_min=4096)
FROZEN = 24_000
"""Bytes of the tensor that never changes."""


def state_at(step: int) -> dict[str, object]:
    return {"frozen": torch.arange(FROZEN / 4), "moving": torch.full((3000,), float(step))}


def manager_at(root: Path, keep_last: int | None = None, *, links: bool = True) -> holdfast.CheckpointManager:
    settings = replace(SMALL, link_unchanged=links)
    return holdfast.CheckpointManager(
        root, keep_last=keep_last, process_group=False, preemption=False, settings=settings
    )


def saved(root: Path, *steps: int, keep_last: int | None = None, links: bool = True) -> None:
    with manager_at(root, keep_last, links=links) as manager:
        for step in steps:
            manager.save(step, state_at(step)).wait()


def require_whole(root: Path, *steps: int) -> None:
    for step in steps:
        checkpoint = holdfast.open_checkpoint(root, step=step)
        assert list(checkpoint.verify()) == []
        frozen = holdfast.read(root, step=step)["frozen"]
        assert isinstance(frozen, torch.Tensor) and torch.equal(frozen, torch.arange(FROZEN / 4))


def folders(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def link_of(root: Path, step: int) -> Path:
    (link,) = (root / step_folder(step)).glob("*/*.link")
    return link


def store_of(root: Path) -> LocalStore:
    return LocalStore(root, settings=SMALL)


def test_a_run_with_a_frozen_tensor_has_as_many_folders_as_it_keeps(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, keep_last=2)
    assert folders(tmp_path) == [3, 4]
    require_whole(tmp_path, 3, 4)
    assert link_of(tmp_path, 3).samefile(link_of(tmp_path, 4))


def test_the_next_save_refers_to_the_pack_by_the_link_of_its_base(tmp_path: Path) -> None:
    with manager_at(tmp_path, keep_last=1) as manager:
        for step in (1, 2, 3):
            report = manager.save(step, state_at(step)).wait()
            assert report is not None and report.unchanged_bytes == (0 if step == 1 else FROZEN)
    assert folders(tmp_path) == [3]
    with manager_at(tmp_path, keep_last=1) as manager:  # Another process, which has loaded the step.
        state = state_at(0)
        assert manager.load(state) == 3
        report = manager.save(4, {**state, "moving": torch.ones(3000)}).wait()
        assert report is not None and report.unchanged_bytes == FROZEN
    require_whole(tmp_path, 4)


@pytest.mark.parametrize("kind", ["no links", "a link is gone", "a link is a copy"])
def test_a_pack_that_a_step_needs_at_its_place_stays_with_the_reason(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, 1, 2, 3, links=kind != "no links")
    needed_by = "2, 3" if kind == "no links" else "3"
    if kind == "a link is gone":
        link_of(tmp_path, 3).unlink()
    if kind == "a link is a copy":
        shutil.copy(link_of(tmp_path, 3), tmp_path / "copy")
        os.replace(tmp_path / "copy", link_of(tmp_path, 3))
    report = api.collect(tmp_path, keep=LatestN(2), grace_seconds=0)
    assert report.steps == (1,)
    require_whole(tmp_path, 2, 3)
    (pack,) = (tmp_path / step_folder(1)).rglob("*.safetensors")
    assert pack.stat().st_size > FROZEN
    record = api.list_steps(tmp_path).steps[0]
    assert (record.step, record.holds_packs_of, record.leftovers) == (1, (2, 3), ())
    assert "step 1: removed; holds packs of steps 2, 3" in command("ls", tmp_path).out
    (first, *_) = json.loads(command("ls", tmp_path, "--json").out)["steps"]
    assert (first["status"], first["holds_packs_of"]) == ("removed", [2, 3])
    kept = json.loads(command("gc", tmp_path, "--dry-run", "--json").out)["kept"]
    assert kept["1"] == [f"holds packs of steps {needed_by}"]
    assert "holds packs of steps" in command("gc", tmp_path, "--dry-run").out
    with manager_at(tmp_path) as manager:
        manager.save(4, {"frozen": torch.zeros(8)}).wait() if manager.load(state_at(0)) else None
    api.collect(tmp_path, keep=LatestN(1), grace_seconds=0)
    assert folders(tmp_path) == [4], "it goes with the last step that needs it"


def test_a_removal_of_linked_packs_counts_no_bytes(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (pack,) = (tmp_path / step_folder(1)).rglob("*.safetensors")
    others = sum(path.stat().st_size for path in (tmp_path / step_folder(1)).rglob("*.*") if path != pack)
    assert api.collect(tmp_path, keep=LatestN(1), dry_run=True).bytes < others + 1
    assert folders(tmp_path) == [1, 2], "nothing was removed"


def test_what_the_base_of_a_save_under_way_names_stays(tmp_path: Path) -> None:
    """The save may have got no link: then it needs the pack at its place."""
    saved(tmp_path, 1, 2)
    store = store_of(tmp_path)
    listed = [inspect_step(store, step, current_fence(store))[0] for step in (1, 2)]
    under_way, at_rest = (linked_packs(store, listed, {2}, bases) for bases in ({2}, set[int]()))
    assert under_way.holders == {1: (2,)} and not under_way.linked
    assert at_rest.holders == {} and len(at_rest.linked) == 1
    assert under_way.listed[1].packs - at_rest.listed[1].packs == at_rest.linked


def test_a_store_that_answers_in_pages_is_asked_for_no_link(tmp_path: Path) -> None:
    class Paged(ForwardingStore):
        """A store of objects, as far as its listings go."""

        def identity(self, key: str) -> str:
            raise AssertionError("a request for each pack of each step")

    saved(tmp_path, 1, 2)
    store = Paged(store_of(tmp_path))
    store.traits = replace(store.traits, page_entries=1000)
    listed = [inspect_step(store, step, current_fence(store))[0] for step in (1, 2)]
    assert linked_packs(store, listed, {2}, ()).holders == {1: (2,)}


def test_a_refused_link_is_no_reference_to_a_pack_that_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base has a link, so a collection may remove the pack at any time: the tensor is written anew."""
    saved(tmp_path, 1, 2)
    link_really = Syscalls.link

    def link(self: Syscalls, name: str, new_name: str, **folders: int | None) -> None:
        if new_name.endswith(".link"):
            raise OSError(31, "Too many links")
        link_really(self, name, new_name, **folders)

    with manager_at(tmp_path) as manager:
        state = state_at(0)
        manager.load(state)
        monkeypatch.setattr(Syscalls, "link", link)
        report = manager.save(3, {**state, "moving": torch.ones(3000)}).wait()
    assert report is not None and report.unchanged_bytes == 0
    manifest = read_manifest(store_of(tmp_path), step_folder(3))
    assert all("/" not in pack.name for pack in manifest.packs)
    api.collect(tmp_path, keep=LatestN(1), grace_seconds=0)
    require_whole(tmp_path, 3)
    assert folders(tmp_path) == [3]


def test_a_job_without_links_writes_anew_what_its_base_holds_by_a_link_alone(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, keep_last=2)
    assert folders(tmp_path) == [2, 3]
    with manager_at(tmp_path, links=False) as manager:
        state = state_at(0)
        manager.load(state)
        for step, unchanged_bytes in ((4, 0), (5, FROZEN)):
            report = manager.save(step, {**state, "moving": torch.full((3000,), float(step))}).wait()
            assert report is not None and report.unchanged_bytes == unchanged_bytes
    require_whole(tmp_path, 2, 3, 4, 5)
