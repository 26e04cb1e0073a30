"""Someone copies or moves one step, or the whole run, with the commands of a shell."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import api
from holdfast.errors import CorruptError, InvalidError
from tests.everyday.frozen_run import (
    FROZEN_BYTES,
    STEPS,
    Refusing,
    made_at,
    ran,
    require_resumes,
    require_step,
    state_at,
    step_path,
    used_bytes,
)


def tar(source: Path, destination: Path) -> None:
    """Pack a folder and unpack it elsewhere."""
    archive = destination.parent / "archive.tar"
    ran("tar", "-cf", archive, "-C", source.parent, source.name)
    destination.mkdir()
    ran("tar", "-xf", archive, "-C", destination, "--strip-components=1")


def rsync(source: Path, destination: Path, options: str) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("no rsync here")
    ran("rsync", options, f"{source}/", destination)


COPIES = {
    "cp -r": lambda source, destination: ran("cp", "-r", source, destination),
    "mv": lambda source, destination: ran("mv", source, destination),
    "tar": tar,
    "rsync -a": lambda source, destination: rsync(source, destination, "-a"),
}
WHOLE_COPIES = {
    "cp -a": lambda source, destination: ran("cp", "-a", source, destination),
    "rsync -aH": lambda source, destination: rsync(source, destination, "-aH"),
    **COPIES,
}
KEEPS_LINKS = {"cp -a", "mv", "tar", "rsync -aH"}


@pytest.mark.parametrize("name", ["step-000000000003", "best"])
@pytest.mark.parametrize("how", COPIES)
def test_a_step_elsewhere_is_whole(run: Path, tmp_path: Path, how: str, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    COPIES[how](step_path(run, 3), tmp_path / "elsewhere" / name)
    ran("rm", "-rf", run)
    require_step(tmp_path / "elsewhere" / name, 3)


def test_a_step_elsewhere_serves_every_reader(run: Path, tmp_path: Path) -> None:
    ran("cp", "-r", step_path(run, 3), tmp_path / "alone")
    assert all(tensor.change is None for tensor in holdfast.diff(tmp_path / "alone", step_path(run, 3)).tensors)
    ran("rm", "-rf", step_path(run, 1))
    for path in (tmp_path / "alone", step_path(run, 3)):
        content = holdfast.read(path, mmap=True)
        assert torch.equal(content["backbone"], state_at(3)["backbone"]), "mapped, by its link"  # type: ignore[arg-type]
    ran("rm", "-rf", run)
    holdfast.export(tmp_path / "alone", tmp_path / "exported", to="safetensors")
    holdfast.export(tmp_path / "alone", tmp_path / "again", to="holdfast")
    require_step(tmp_path / "again", 3)


@pytest.mark.parametrize("how", WHOLE_COPIES)
def test_a_root_elsewhere_is_whole_and_goes_on(run: Path, tmp_path: Path, how: str) -> None:
    before = used_bytes(run)
    WHOLE_COPIES[how](run, tmp_path / "moved")
    if how != "mv":
        ran("rm", "-rf", run)
    after = used_bytes(tmp_path / "moved")
    assert (after < before + FROZEN_BYTES) == (how in KEEPS_LINKS), "the backbone once, or once a step"
    for step in STEPS:
        require_step(step_path(tmp_path / "moved", step), step)
    ran("rm", "-rf", step_path(tmp_path / "moved", 1))
    require_resumes(tmp_path / "moved", 3)


def test_where_links_are_refused_a_step_elsewhere_says_what_it_lacks(tmp_path: Path) -> None:
    made_at(tmp_path / "run", Refusing(errno.EXDEV))
    ran("cp", "-r", tmp_path / "run", tmp_path / "copied")
    for step in STEPS:
        require_step(step_path(tmp_path / "copied", step), step)
    ran("cp", "-r", step_path(tmp_path / "run", 3), tmp_path / "alone")
    with pytest.raises(InvalidError, match="there is no run around it and no link"):
        holdfast.load(tmp_path / "alone", state_at(0), process_group=False)
    (tmp_path / "elsewhere").mkdir()
    ran("cp", "-r", step_path(tmp_path / "run", 3), tmp_path / "elsewhere")
    with pytest.raises(CorruptError, match="belongs to step 1"):
        holdfast.load(step_path(tmp_path / "elsewhere", 3), state_at(0), process_group=False)


def test_a_copy_without_its_links_is_read_once_and_its_damage_found(run: Path, tmp_path: Path) -> None:
    ran("cp", "-r", run, tmp_path / "copied")
    (link,) = step_path(tmp_path / "copied", 3).glob("*/step-000000000001.*.link")
    data = bytearray(link.read_bytes())
    data[len(data) // 2] ^= 1
    link.write_bytes(data)
    checkpoint = holdfast.open_checkpoint(step_path(tmp_path / "copied", 3))
    (damage,) = checkpoint.verify()
    assert damage.file.endswith(link.name) and damage.fqn == "backbone"
    assert [record.stands_alone for record in api.list_steps(tmp_path / "copied").steps] == [True] * 3


def test_a_step_is_whole_beside_one_that_was_archived_behind_a_symbolic_link(run: Path, tmp_path: Path) -> None:
    """Nothing below the root is followed, so the packs of step 1 cannot be read there: step 3 has links to them."""
    ran("mv", step_path(run, 1), tmp_path / "archived")
    step_path(run, 1).symlink_to(tmp_path / "archived")
    for step in (2, 3):
        require_step(step_path(run, step), step)
    require_resumes(run, 3)
