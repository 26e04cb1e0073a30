"""`holdfast inspect` begins with totals by key of the state and the plain values; tensors follow."""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast as package
from tests.unit.cli.running import holdfast


def test_inspect_begins_with_totals_and_values(tmp_path: Path) -> None:
    model, target = torch.nn.Linear(256, 256), torch.nn.Linear(2, 2)
    package.save(tmp_path / "c", {"model": model, "target": target, "epoch": 3}, process_group=False)
    lines = holdfast("inspect", tmp_path / "c").out.splitlines()
    words = [line.split() for line in lines]
    header = words.index(["KEY", "TENSORS", "BYTES"])
    assert words[header + 1] == ["model", "2", "257.0", "KiB"]
    assert words[header + 2] == ["target", "2", "24", "B"]
    value = next(number for number, line in enumerate(lines) if "epoch" in line)
    tensor = next(number for number, line in enumerate(words) if line[:1] == ["model.weight"])
    assert header < value < tensor


def test_totals_as_json_count_what_is_chosen(tmp_path: Path) -> None:
    package.save(tmp_path / "c", {"model": torch.nn.Linear(2, 2), "scale": torch.ones(3)}, process_group=False)
    totals = holdfast("inspect", tmp_path / "c", "--json").json()["totals"]
    assert totals == {"model": {"tensors": 2, "bytes": 24}, "scale": {"tensors": 1, "bytes": 12}}
    chosen = holdfast("inspect", tmp_path / "c", "--json", "--tensors", "scale").json()["totals"]
    assert chosen == {"scale": {"tensors": 1, "bytes": 12}}
