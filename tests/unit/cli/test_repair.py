"""`holdfast repair` as people meet it, without torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import holdfast as package
from tests.support.newer_format import write_newer
from tests.unit.cli.conftest import small_state
from tests.unit.cli.running import holdfast, separately

STEP = "step-000000000010"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def test_what_is_damaged_is_repaired_and_told(root: Path) -> None:
    cut(root / STEP / "manifest.json")
    told = holdfast("repair", root, "--dry-run")
    assert (told.status, "step 10: would be repaired" in told.out) == (0, True)
    assert holdfast("verify", root / STEP).status == 1
    ended = separately("repair", root)
    assert (ended.status, ended.err) == (0, "")
    assert "step 10: repaired" in ended.out
    assert "rebuilt from" in ended.out
    assert holdfast("verify", root / STEP).status == 0
    assert holdfast("repair", root, "--step", 10).out == "step 10: whole\n"


def test_what_is_lost_is_told_and_ends_with_1(root: Path) -> None:
    (pack,) = (root / STEP).glob("*/r00000.safetensors")
    # The run was copied without its links, so step 20 has a copy of the pack.
    (copy,) = root.glob("*/*/*.link")
    for path in (pack, copy):
        cut(path)
    ended = holdfast("repair", root, "--json")
    assert ended.status == 1
    document = ended.json()
    (step,) = [each for each in document["steps"] if each["step"] == 10]
    assert (step["outcome"], step["done"]) == ("damaged", [])
    assert "r00000.safetensors" in step["lost"][0]
    assert "lost: " in holdfast("repair", root).out


def test_what_another_step_has_a_copy_of_is_restored_and_told(root: Path) -> None:
    (pack,) = (root / STEP).glob("*/r00000.safetensors")
    cut(pack)
    ended = holdfast("repair", root)
    assert ended.status == 0 and "r00000.safetensors: replaced by a link to step-000000000020/" in ended.out
    assert holdfast("verify", root / STEP).status == 0


def test_an_unfinished_step_is_told_and_no_failure(root: Path) -> None:
    ended = holdfast("repair", root)
    assert ended.status == 0
    assert "step 30: unfinished" in ended.out


def test_a_step_of_a_newer_format_is_left_as_it_is_and_the_others_are_repaired(root: Path) -> None:
    newer = write_newer(root / STEP / "manifest.json")
    cut(root / "step-000000000020" / "manifest.json")
    ended = holdfast("repair", root)
    assert ended.status == 0, ended.err
    assert "step 10: unreadable\n" in ended.out and "Read it with a newer Holdfast" in ended.out
    assert "step 20: repaired" in ended.out and "lost: " not in ended.out
    assert (root / STEP / "manifest.json").read_bytes() == newer
    assert holdfast("repair", root, "--json").json()["steps"][0]["outcome"] == "unreadable"


def test_a_step_of_a_newer_format_that_is_asked_for_is_refused(root: Path) -> None:
    newer = write_newer(root / STEP / "manifest.json")
    ended = holdfast("repair", root, "--step", 10)
    assert ended.status == 2
    assert "Read it with a newer Holdfast" in ended.err
    assert (root / STEP / "manifest.json").read_bytes() == newer


def test_a_damaged_manifest_of_a_newer_format_is_not_rebuilt(root: Path) -> None:
    manifest = root / STEP / "manifest.json"
    damaged = write_newer(manifest)[:-60]
    manifest.write_bytes(damaged)
    ended = holdfast("repair", root)
    assert ended.status == 1 and "Repair it with a newer Holdfast" in ended.out
    assert manifest.read_bytes() == damaged


@pytest.mark.parametrize("arguments", [("--step", 11), ("--step", -1)])
def test_a_step_that_is_not_there_is_refused(root: Path, arguments: tuple[object, ...]) -> None:
    ended = holdfast("repair", root, *arguments)
    assert ended.status == 2
    assert "step" in ended.err


@pytest.mark.parametrize("how", ["its folder", "its number", "its tag"])
def test_one_step_is_repaired_by_path_or_name(root: Path, how: str) -> None:
    assert holdfast("tag", root, 10, "paper").status == 0
    for step in (STEP, "step-000000000020"):
        cut(root / step / "manifest.json")
    arguments = {"its folder": (root / STEP,), "its number": (root, "--step", 10), "its tag": (root, "--step", "paper")}
    ended = holdfast("repair", *arguments[how])
    assert ended.status == 0 and ended.out.startswith("step 10: repaired"), ended
    assert holdfast("verify", root / STEP).status == 0 and holdfast("verify", root / "step-000000000020").status == 1
    assert holdfast("repair", root / STEP, "--step", 10).status == 2


@pytest.fixture(params=["copied out of a run", "saved by path"])
def alone(request: pytest.FixtureRequest, root: Path, tmp_path: Path) -> Path:
    path = tmp_path / "alone"
    if request.param == "saved by path":
        package.save(path, small_state(), process_group=False)
        return path
    return Path(shutil.copytree(root / STEP, path))


def test_a_checkpoint_in_no_run_is_repaired_from_its_own_files(alone: Path) -> None:
    manifest = alone / "manifest.json"
    whole, tensors = manifest.read_bytes(), package.open_checkpoint(alone).tensors
    assert holdfast("repair", alone).out.split(": ")[1] == "whole\n"
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 4
    manifest.write_bytes(flipped)
    before = sorted(alone.rglob("*"))
    assert "would be repaired" in holdfast("repair", alone, "--dry-run").out
    assert (manifest.read_bytes(), sorted(alone.rglob("*"))) == (flipped, before)
    ended = holdfast("repair", alone)
    assert ended.status == 0 and "one bit corrected" in ended.out
    assert manifest.read_bytes() == whole
    twice = bytearray(flipped)
    twice[-60] ^= 1
    manifest.write_bytes(twice)
    ended = holdfast("repair", alone)
    assert ended.status == 0 and "rebuilt from 1 parts; lost are" in ended.out
    assert holdfast("verify", alone).status == 0
    assert dict(package.open_checkpoint(alone).tensors) == dict(tensors)
    kept = {path.read_bytes() for path in (alone / "replaced").iterdir()}
    assert kept >= {bytes(flipped), bytes(twice)}, "what was replaced is kept"
    cut(manifest)
    ended = holdfast("repair", alone)
    assert ended.status == 1 and "readable run id" in ended.out, "nothing else tells it"


def test_what_no_file_of_a_lone_checkpoint_proves_is_lost(alone: Path) -> None:
    (index,) = alone.glob("*/index-00000.msgpack")
    cut(index)
    assert "index: rebuilt from parts" in holdfast("repair", alone).out
    (pack,) = alone.glob("*/r00000.safetensors")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    ended = holdfast("repair", alone, "--json")
    (found,) = ended.json()["steps"]
    assert (ended.status, found["outcome"]) == (1, "damaged") and found["lost_tensors"]
    (part,) = alone.glob("*/parts/r00000.msgpack")
    cut(part)
    cut(alone / "manifest.json")
    ended = holdfast("repair", alone)
    assert ended.status == 1 and "part" in ended.out
    assert holdfast("repair", alone, "--step", 10).status == holdfast("repair", alone, "--unfinished").status == 2
