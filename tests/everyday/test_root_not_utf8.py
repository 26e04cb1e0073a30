"""A folder whose name is no UTF-8, such as one that was made under Latin-1."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.observers import jsonl
from tests.unit.cli.running import holdfast as command

NAMES = [b"lat\xe9", b"\xff\xfe", b"\xc3\x28", b"\xa4\xb3\xa4\xec"]


@pytest.fixture(params=NAMES, ids=["latin-1", "no start of a character", "a cut character", "euc-jp"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / os.fsdecode(request.param)


def zeros() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(10)}


def test_a_run_there_is_saved_loaded_and_tagged(root: Path, tmp_path: Path) -> None:
    events = jsonl(tmp_path / "events.jsonl")
    with holdfast.CheckpointManager(root, process_group=False, observers=[events]) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((10,), float(step)), "from": root}).wait()
        manager.tag(2, "best")
    state = zeros() | {"from": None}
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        assert manager.load(state) == 2
    assert state["w"].tolist() == [2.0] * 10 and os.fspath(str(state["from"])) == str(root)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert f"{root}/step-000000000002" in {json.loads(line).get("url") for line in lines}
    assert os.fsencode(root) in map(os.fsencode, tmp_path.iterdir())


def test_a_checkpoint_by_path_there_is_overwritten_and_verified(root: Path) -> None:
    for value in (1.0, 2.0):
        holdfast.save(root / "c", {"w": torch.full((10,), value)}, process_group=False, overwrite=True)
    state = zeros()
    holdfast.load(root / "c", state, process_group=False)
    assert state["w"].tolist() == [2.0] * 10
    assert command("verify", str(root / "c")).status == 0
