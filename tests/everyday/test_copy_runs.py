"""Someone copies a whole run with `holdfast cp`, or restores what another command made of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import api
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.core.format.names import is_link_name, step_folder
from holdfast.errors import ConflictError, InvalidError, MissingError
from holdfast.offline.copying.copy_run import RunCopy
from holdfast.settings import Settings
from holdfast.stored.repository.run_readme import README_FILE
from tests.everyday.frozen_run import (
    FROZEN_BYTES,
    STEPS,
    ran,
    require_resumes,
    require_step,
    state_at,
    step_path,
    used_bytes,
)
from tests.unit.cli.running import holdfast as command


def test_cp_keeps_links_tags_and_records(run: Path, tmp_path: Path) -> None:
    api.tag(run, 2, "best")
    ended = command("cp", run, tmp_path / "copy")
    assert (ended.status, ended.err) == (0, "") and ended.out.startswith("3 steps: copied ")
    copy = tmp_path / "copy"
    assert abs(used_bytes(copy) - used_bytes(run)) < FROZEN_BYTES / 4
    for step in STEPS:
        require_step(step_path(copy, step), step)
    assert [record.tags for record in api.list_steps(copy).steps] == [(), ("best",), ()]
    assert api.list_steps(copy).run_id == api.list_steps(run).run_id
    api.untag(copy, "best")
    require_resumes(copy, 3)


def test_cp_says_in_json_what_it_did(run: Path, tmp_path: Path) -> None:
    document = command("cp", run, tmp_path / "copy", "--json").json()
    assert (document["steps"], document["linked"], document["duplicated"], document["left_out"]) == (3, 3, 0, [])
    assert document["root"] == str(tmp_path / "copy")


def test_cp_refuses_what_is_not_its_own(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConflictError, match=r"is not empty \(it holds notes.txt\)"):
        api.copy_run(run, other)
    api.copy_run(run, tmp_path / "copy")
    with pytest.raises(ConflictError, match="is not empty"):
        api.copy_run(run, tmp_path / "copy")
    for inside in (run, run / "inside", run.parent):
        with pytest.raises(InvalidError, match="expected a folder apart"):
            api.copy_run(run, inside)
    with holdfast.CheckpointManager(tmp_path / "second", process_group=False) as manager:
        manager.save(1, state_at(1)).wait()
    (tmp_path / "second" / "copying").mkdir()
    for claim in (b"another", api.list_steps(run).run_id.encode()):  # type: ignore[union-attr]
        (tmp_path / "second" / "copying" / "run.json").write_bytes(claim)
        with pytest.raises(ConflictError, match="holds an unfinished copy of run"):
            api.copy_run(run, tmp_path / "second")
    with pytest.raises(MissingError, match="no root of a run"):
        api.copy_run(tmp_path / "typo", tmp_path / "new")
    assert [path.name for path in other.iterdir()] == ["notes.txt"]
    assert not (tmp_path / "new").exists()


def test_a_tag_that_moves_meanwhile_names_a_step_of_the_copy(run: Path, tmp_path: Path) -> None:
    """A job tags its best step again and again, and a copy takes long."""
    api.tag(run, 2, "best")

    class MovesOn(LocalStore):
        has_moved = False

        def read_into(self, key, ranges, buffers, on_range=None):  # type: ignore[no-untyped-def]
            super().read_into(key, ranges, buffers, on_range)
            with moving:
                if not self.has_moved:
                    self.has_moved = True
                    with holdfast.CheckpointManager(run, process_group=False) as manager:
                        manager.load(state_at(0))
                        manager.save(4, state_at(4)).wait()
                    api.tag(run, 4, "best", move=True)

    moving = threading.Lock()
    destination = LocalStore(tmp_path / "copy", settings=Settings())
    assert RunCopy(MovesOn(run, settings=Settings()), destination, SystemClock()).run().steps == 3
    assert [record.tags for record in api.list_steps(tmp_path / "copy").steps] == [(), ("best",), ()]
    require_step(tmp_path / "copy" / step_folder(2), 2)
    assert holdfast.open_checkpoint(tmp_path / "copy", step="best").step == 2


def test_cp_beside_a_job_that_saves(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).wait()
        api.copy_run(tmp_path / "run", tmp_path / "copy")
        manager.save(3, state_at(3)).wait()
    # The copy has no writer: the next job need not wait for the one that still trains on the original.
    require_resumes(tmp_path / "copy", 2)


def test_a_copy_without_links_is_copied_with_links_again(run: Path, tmp_path: Path) -> None:
    large, lean = tmp_path / "large", tmp_path / "lean"
    ran("cp", "-r", run, large)
    assert used_bytes(large) > used_bytes(run) + 2 * FROZEN_BYTES
    for options in ((), ("--dry-run", "--json")):
        ended = command("relink", large, *options)
        assert ended.status == 2 and f"`holdfast cp {large} NEW`" in ended.err
    assert command("cp", large, lean).status == 0
    assert abs(used_bytes(lean) - used_bytes(run)) < FROZEN_BYTES / 4
    for step in STEPS:
        require_step(step_path(lean, step), step)
    ran("rm", "-rf", step_path(lean, 1))
    for step in (2, 3):
        require_step(step_path(lean, step), step)


def test_a_copy_has_links_that_a_save_did_not_make(tmp_path: Path) -> None:
    settings = Settings(link_unchanged=False)
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, settings=settings) as manager:
        for step in STEPS:
            manager.save(step, state_at(step)).wait()
    assert api.copy_run(tmp_path / "run", tmp_path / "copy").linked == 3
    ran("rm", "-rf", step_path(tmp_path / "copy", 1))
    for step in (2, 3):
        require_step(step_path(tmp_path / "copy", step), step)


def damaged_pack(root: Path) -> Path:
    """Flip one bit of the backbone, where step 1 wrote it."""
    (pack,) = step_path(root, 1).glob("*/r00000.safetensors")
    data = bytearray(pack.read_bytes())
    backbone = state_at(1)["backbone"]
    assert isinstance(backbone, torch.Tensor)
    data[data.index(backbone.numpy().tobytes()) + 70_000] ^= 1
    pack.write_bytes(data)
    return pack


def test_repair_replaces_a_damaged_pack_by_the_copy_of_another_step(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    ran("cp", "-r", run, copy)
    pack = damaged_pack(copy)
    content = pack.read_bytes()
    planned = command("repair", copy, "--step", "1", "--dry-run", "--json").json()
    assert planned["steps"][0]["outcome"] == "repaired" and pack.read_bytes() == content
    report = api.repair(copy, 1)
    assert [(step.outcome, step.lost) for step in report.steps] == [("repaired", ())]
    (kept,) = (copy / "quarantine").glob("step-000000000001.*.r00000.safetensors")
    assert kept.read_bytes() == content, "what was replaced is kept"
    assert pack.stat().st_nlink == 2, "it is a link to the copy of another step"
    for step in STEPS:
        require_step(step_path(copy, step), step)


def test_repair_does_not_touch_the_only_copy(run: Path) -> None:
    pack = damaged_pack(run)
    content = pack.read_bytes()
    report = api.repair(run, 1)
    assert [(step.outcome, step.lost_tensors) for step in report.steps] == [("damaged", ("backbone",))]
    assert pack.read_bytes() == content


def test_repair_links_a_missing_pack_to_what_other_steps_have(run: Path) -> None:
    """Somebody removed a pack, and with it step 1; step 3, which has no link, lacks it too."""
    (pack,) = step_path(run, 1).glob("*/r00000.safetensors")
    (link,) = step_path(run, 3).glob("*/step-000000000001.*.link")
    pack.unlink()
    link.unlink()
    planned = api.repair(run, dry_run=True)
    assert [(step.step, step.outcome) for step in planned.steps] == [(1, "repaired"), (3, "repaired")]
    assert not pack.exists() and not link.exists()
    report = api.repair(run, 3)
    assert [(step.outcome, step.lost) for step in report.steps] == [("repaired", ())] and not pack.exists()
    assert [step.outcome for step in api.repair(run).steps] == ["repaired"] and pack.samefile(link)
    for step in STEPS:
        require_step(step_path(run, step), step)


def test_the_readme_disturbs_nobody_and_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / README_FILE).write_text("notes of mine")
    for root in (tmp_path / "mine", tmp_path / "new"):
        with holdfast.CheckpointManager(root, process_group=False) as manager:
            manager.save(1, state_at(1)).wait()
            manager.save(2, state_at(2)).wait()
    assert (tmp_path / "mine" / README_FILE).read_text() == "notes of mine"
    text = (tmp_path / "new" / README_FILE).read_text()
    assert "rsync -aH" in text and "holdfast cp" in text and "step-000000000001" not in text
    assert not api.collect(tmp_path / "new", dry_run=True).files
    for root in (tmp_path / "mine", tmp_path / "new"):
        with pytest.raises(InvalidError, match="is the root of a run"):
            holdfast.open_checkpoint(root)


def test_a_symbolic_link_in_place_of_a_link_is_not_followed(run: Path) -> None:
    (link,) = step_path(run, 3).glob("*/step-000000000001.*.link")
    pack = step_path(run, 1) / link.name.split(".")[1] / "r00000.safetensors"
    link.unlink()
    link.symlink_to(pack)
    assert [record.stands_alone for record in api.list_steps(run).steps] == [True, True, False]
    (damage,) = holdfast.open_checkpoint(step_path(run, 3)).verify()
    assert damage.file.endswith(link.name) and "symbolic link" in damage.message
    ran("rm", "-rf", step_path(run, 1))
    with pytest.raises(InvalidError, match="symbolic link"):
        holdfast.open_checkpoint(step_path(run, 3)).read("backbone")


def test_links_are_no_files_of_their_own_to_a_reader_of_safetensors(run: Path) -> None:
    links = [path for path in run.rglob("*") if is_link_name(path.name)]
    assert len(links) == 3 and not [path for path in links if path.suffix == ".safetensors"]
    document = json.loads((step_path(run, 3) / "manifest.json").read_bytes())
    assert not [name for name, *_ in document["packs"] if name.endswith(".link")], "the manifest is as on any storage"
    assert LocalStore(run, settings=Settings()).identity(links[0].relative_to(run).as_posix())


def test_packs_that_no_other_reader_opens_are_copied_and_linked_too(tmp_path: Path) -> None:
    """Complex numbers are in packs of their own, which safetensors cannot name."""
    state = {"wave": torch.arange(50_000.0).to(torch.complex128), "head": torch.zeros(3)}
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        for step in (1, 2):
            manager.save(step, {**state, "head": state["head"] + step}).wait()
    (link,) = (tmp_path / "run").rglob("*.enc.*.link")
    ran("cp", "-r", tmp_path / "run", tmp_path / "copy")
    api.copy_run(tmp_path / "copy", tmp_path / "copied")
    assert (tmp_path / "copied" / link.relative_to(tmp_path / "run")).stat().st_nlink == 2
    for step in (1, 2):
        assert list(holdfast.open_checkpoint(step_path(tmp_path / "copied", step)).verify()) == []
