"""What `holdfast diff` shows and how it ends."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

import holdfast as package
from tests.unit.cli.conftest import ESCAPE
from tests.unit.cli.running import holdfast, on_terminal, separately


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("diff")
    one = {"w": torch.ones(40, 50), "same": torch.ones(3), "bad": torch.tensor([math.nan, 1.0, math.inf])}
    other = {"w": torch.ones(40, 50), "same": torch.ones(3), "bad": torch.tensor([2.0, 1.0, math.inf])}
    other["w"][3, 4] = 1.5
    package.save(root / "a", {"model": one, "epoch": 1}, process_group=False)
    package.save(root / "b", {"model": other, "epoch": 2}, process_group=False)
    return root / "a", root / "b"


def test_equal_checkpoints_end_with_0_and_read_nothing(pair: tuple[Path, Path]) -> None:
    ended = separately("diff", pair[0], pair[0])
    assert (ended.status, ended.err) == (0, "")
    assert ended.out == "equal: 3 tensors; 0 B read, 7.8 KiB settled by digests\n"


def test_different_checkpoints_end_with_1_and_a_summary(pair: tuple[Path, Path]) -> None:
    ended = separately("diff", *pair)
    assert (ended.status, ended.err) == (1, "")
    lines = ended.out.splitlines()
    assert lines[0].split() == [
        "TENSOR",
        "CHANGED",
        "MAX",
        "ABS",
        "MAX",
        "REL",
        "NORM",
        "A",
        "NORM",
        "B",
        "NORM",
        "A-B",
    ]
    assert lines[2].split() == ["model.w", "0.05", "%", "0.5", "0.3333", "44.72", "44.74", "0.5"]
    assert "model.bad: NaN 1 in A, 0 in B; infinite 1 in A, 1 in B; 1 changed elements" in ended.out
    assert "  epoch: 1 in A, 2 in B" in lines
    assert lines[-1] == "different: 2 of 3 tensors, 1 value; 15.6 KiB read, 12 B settled by digests"
    assert "model.same" not in ended.out
    assert "model.same" in holdfast("diff", *pair, "--all").out


def test_json_says_it_all_and_holds_no_nan(pair: tuple[Path, Path]) -> None:
    ended = holdfast("diff", *pair, "--json")
    assert ended.status == 1
    document = ended.json()
    assert document["equal"] is False
    assert document["tensor_counts"] == {"equal": 1, "changed": 2, "dtype": 0, "shape": 0}
    assert document["tensors"]["model.w"] == {
        "verdict": "changed",
        "dtype": ["float32", "float32"],
        "shape": [[40, 50], [40, 50]],
        "settled_bytes": 0,
        "changed": 1,
        "changed_fraction": 0.0005,
        "unmeasured": 0,
        "max_absolute": 0.5,
        "max_relative": 1 / 3,
        "norm_difference": 0.5,
        "norm": [math.sqrt(2000), math.sqrt(1999 + 2.25)],
        "nan": [0, 0],
        "inf": [0, 0],
    }
    assert document["tensors"]["model.bad"]["unmeasured"] == 1
    assert document["tensors"]["model.same"] == {
        "verdict": "equal", "dtype": ["float32", "float32"], "shape": [[3], [3]], "settled_bytes": 12,
    }  # fmt: skip
    assert document["values"] == [{"path": "epoch", "a": 1, "b": 2}]
    assert (document["read_bytes"], document["settled_bytes"]) == (2 * 8012, 12)


def test_chosen_tensors_only(pair: tuple[Path, Path]) -> None:
    assert holdfast("diff", *pair, "--tensors", "*.same").status == 0


def test_what_cannot_be_done_ends_with_2(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ended = separately("diff", pair[0], tmp_path / "nothing")
    assert (ended.status, ended.out) == (2, "")
    damaged = Path(shutil.copytree(pair[1], tmp_path / "damaged"))
    (damaged / "manifest.json").write_text("{}")
    assert holdfast("diff", pair[0], damaged).status == 2, "damage is no difference"


def test_on_a_terminal_rows_are_stacked_and_nothing_is_left_behind(pair: tuple[Path, Path]) -> None:
    ended = on_terminal("diff", *pair, columns=60)
    assert ended.status == 1
    assert "model.w\n" in ended.out.replace("\x1b[0m", "")


def test_names_and_values_steer_no_terminal(hostile: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    package.save(other, {f"name{ESCAPE}": torch.zeros(2), "values": {f"key{ESCAPE}": 1}}, process_group=False)
    for against in (pair[0], other):
        for more in ([], ["--json"], ["--all"]):
            out = holdfast("diff", hostile, against, *more).out
            assert all(each.isprintable() or each == "\n" for each in out)
