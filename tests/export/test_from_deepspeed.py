"""Flat partitions that DeepSpeed wrote, exported to torch's own formats: what its engine held, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast import api
from tests.export.written import dcp_loaded, loaded, same

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
KINDS = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def held(case: str) -> dict[str, torch.Tensor]:
    """Return what the engine held, by the names that Holdfast gives it."""
    found = {}
    for key, tensor in load_file(FIXTURES / case / "ref_live.safetensors").items():
        kind, _, name = key.partition("::")
        if kind in KINDS:
            found[f"optimizer.state.{name}.{KINDS[kind]}"] = tensor
        elif kind == "module":
            found[f"model.{name}"] = tensor
    return found


@pytest.mark.parametrize("case", ["zero1_dp2", "zero2_dp4", "bf16_dp2"])
def test_a_zero_checkpoint_becomes_a_torch_file_and_a_folder_of_dcp(tmp_path: Path, case: str) -> None:
    expected = held(case)
    assert len(expected) > 20
    for to in ("torch", "dcp"):
        api.export(FIXTURES / case / "ckpt", tmp_path / to, to=to, model_only=False, workers=2)
    found: Any = loaded(tmp_path / "torch")
    flat = {f"model.{name}": each for name, each in found["model"].items()}
    for name, state in found["optimizer"]["state"].items():
        flat |= {f"optimizer.state.{name}.{key}": each for key, each in state.items()}
    same({name: flat[name] for name in expected}, expected)
    room = {name: torch.zeros_like(each) for name, each in expected.items()}
    same(dcp_loaded(tmp_path / "dcp", room), expected)
