from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.cli.running import holdfast, on_terminal, separately

STEP = "step-000000000004"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "a model"
    folder.mkdir()
    save_file({"w": torch.arange(3000.0), "b": torch.ones(7)}, folder / "model.safetensors")
    return folder


def test_import_by_reference_says_how_to_read_it(source: Path, tmp_path: Path) -> None:
    ended = separately("import", source, tmp_path / "run", "--step", 4)
    assert (ended.status, ended.err) == (0, "")
    assert "step 4: 2 tensors of 11.7 KiB, by reference, from safetensors" in ended.out
    assert f"allowed_roots=({str(source)!r},)" in ended.out
    (said,) = [line for line in ended.out.splitlines() if "--allow-root" in line]
    options = shlex.split(said.partition("commands")[2])
    assert options == ["--allow-root", str(source)]
    refused = separately("verify", tmp_path / "run" / STEP)
    assert refused.status == 2 and "--allow-root" in refused.err
    verified = separately("verify", tmp_path / "run" / STEP, *options)
    assert (verified.status, verified.err) == (0, "")
    assert "whole" in verified.out


def test_what_is_referenced_is_shown(source: Path, tmp_path: Path) -> None:
    holdfast("import", source, tmp_path / "run", "--step", 4)
    listed = holdfast("ls", tmp_path / "run")
    assert listed.status == 0 and "11.7 KiB" in listed.out
    shown = holdfast("inspect", tmp_path / "run" / STEP)
    assert shown.status == 0
    assert "in 1 referenced file" in shown.out
    assert "origin     safetensors" in shown.out
    document = holdfast("inspect", tmp_path / "run" / STEP, "--json").json()
    assert [pack["name"] for pack in document["packs"]] == [f"file://{source}/model.safetensors"]
    assert document["origin"] == "safetensors"


def test_import_copied(source: Path, tmp_path: Path) -> None:
    ended = separately("import", source, tmp_path / "run", "--copy", "--step", 4)
    assert (ended.status, ended.err) == (0, "")
    assert "copied" in ended.out and "--allow-root" not in ended.out
    (source / "model.safetensors").unlink()
    assert separately("verify", tmp_path / "run" / STEP).status == 0


@pytest.mark.parametrize("copied", (False, True))
def test_import_as_json(source: Path, tmp_path: Path, copied: bool) -> None:
    document = holdfast("import", source, tmp_path / "run", "--step", 4, "--json", *["--copy"] * copied).json()
    assert document.pop("attempt")
    assert document == {
        "step": 4,
        "url": f"{tmp_path}/run/{STEP}",
        "origin": "safetensors",
        "tensor_count": 2,
        "tensor_bytes": 12028,
        "copied": copied,
        "allowed_roots": [] if copied else [str(source)],
    }


def test_import_shows_a_bar_on_a_terminal(source: Path, tmp_path: Path) -> None:
    ended = on_terminal("import", source, tmp_path / "run", "--step", 4)
    assert ended.status == 0 and "importing" in ended.out


def test_what_cannot_be_imported_is_one_line_and_2(source: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ((source, tmp_path / "run"), "--step"),
        ((tmp_path / "nothing", tmp_path / "run", "--step", 4), "nothing"),
        ((source, "nothing://bucket/run", "--step", 4), "not supported"),
    ):
        ended = holdfast("import", *arguments)
        assert ended.status == 2 and said in ended.err and len(ended.err.splitlines()) == 1
    assert holdfast("import", source, tmp_path / "run", "--step", 4).status == 0
    again = holdfast("import", source, tmp_path / "run", "--step", 4)
    assert again.status == 2 and "already there" in again.err


def test_a_file_that_changed_since_is_told_with_its_bytes_and_ends_with_1(source: Path, tmp_path: Path) -> None:
    holdfast("import", source, tmp_path / "run", "--step", 4)
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ended = holdfast("verify", tmp_path / "run" / STEP, "--allow-root", source, "--json")
    assert ended.status == 1
    (damage,) = ended.json()["damages"]
    assert damage["file"] == f"file://{path}"
    assert damage["start"] < len(data) == damage["stop"]
    copied = holdfast("import", tmp_path / "run" / STEP, tmp_path / "copy", "--copy", "--allow-root", source)
    assert copied.status == 1 and "hash to" in copied.err


def test_diff_and_export_read_what_is_referenced_where_that_is_allowed(source: Path, tmp_path: Path) -> None:
    holdfast("import", source, tmp_path / "run", "--step", 4)
    step = tmp_path / "run" / STEP
    assert holdfast("diff", step, source).status == 2
    assert holdfast("diff", step, source, "--allow-root", source).status == 0
    out = tmp_path / "out"
    assert holdfast("export", step, out, "--to", "safetensors").status == 2
    for number, workers in enumerate((1, 2)):
        arguments = ("export", step, f"{out}{number}", "--to", "safetensors", "--workers", workers)
        assert holdfast(*arguments, "--allow-root", source).status == 0
        assert holdfast("diff", f"{out}{number}", source, "--tensors", "*").status == 0
