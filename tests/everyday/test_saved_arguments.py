"""Someone builds the model from the arguments in the checkpoint, and loads it afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import holdfast


def saved_state(width: int, step: int) -> dict[str, object]:
    model = torch.nn.Linear(width, width)
    torch.nn.init.constant_(model.weight, float(step))
    return {"model": model, "args": {"width": width, "names": ["a", "b"], "step": step}, "optimizer": "left out"}


def test_a_checkpoint_gives_its_arguments_first(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", saved_state(3, 1), process_group=False)
    state: dict[str, Any] = {"args": {}}
    holdfast.load(tmp_path / "c", state, process_group=False)
    assert state == {"args": {"width": 3, "names": ["a", "b"], "step": 1}}
    model = torch.nn.Linear(state["args"]["width"], state["args"]["width"])
    holdfast.load(tmp_path / "c", {"model": model}, process_group=False)
    assert torch.equal(model.weight, torch.ones(3, 3))


def test_a_run_whose_newest_step_is_damaged_gives_arguments_and_model_of_one_step(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, process_group=False) as manager:
        for step in (1, 2):
            manager.save(step, saved_state(3, step)).wait()
    pack = next((tmp_path / "step-000000000002").rglob("*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1
    pack.write_bytes(data)
    state: dict[str, Any] = {"args": {}}
    with holdfast.CheckpointManager(tmp_path, process_group=False) as manager:
        assert manager.load(state) == 2, "no tensor is read, so no damage is met"
        model = state["model"] = torch.nn.Linear(state["args"]["width"], 3)
        assert manager.load(state) == 1
        assert state["args"] == {"width": 3, "names": ["a", "b"], "step": 1}
        assert torch.equal(model.weight, torch.ones(3, 3))
        manager.save(3, state).wait()
