"""A checkpoint that Megatron-core 0.16.1 wrote on two ranks (`tests/fixtures/dcp/make_megatron.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import holdfast
from holdfast.base.types.values import Skipped

FIXTURES = Path(__file__).resolve().parents[4] / "fixtures" / "dcp"
FOLDER = FIXTURES / "megatron-core-0.16.1"
EXTRA_STATES = [f"decoder.layers.self_attention._extra_state/shard_{number}_2" for number in range(2)]


def test_every_tensor_reads_bit_for_bit_under_megatrons_names() -> None:
    found = holdfast.open_checkpoint(FOLDER)
    truth = load_file(FIXTURES / "megatron-core-0.16.1.safetensors")
    assert set(found.tensors) == set(truth)
    for key, tensor in truth.items():
        read: Any = found.read(key, framework="torch")
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_what_is_no_tensor() -> None:
    found = holdfast.open_checkpoint(FOLDER)
    assert found.origin == "Megatron-core torch_dist"
    assert found.step == 100
    assert found.manifest.world_size == 2
    assert found.objects == {
        "rng_state/shard_0.0_1.2": [[{"random": (3, (1, 2), None)}]],
        "rng_state/shard_0.1_1.2": [[{"random": (3, (1, 2), None)}]],
        **{key: [Skipped(f"{key}.0")] for key in EXTRA_STATES},
        "args": {"tensor_model_parallel_size": 2, "lr": 1e-3},
        "iteration": 100,
        "checkpoint_version": 3.0,
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 12},
        "optimizer": {"optimizer": {"param_groups": [{"lr": 0.1, "params": [0, 1], "step": 4}]}},
        "content_metadata": {"made_by": "make_megatron.py"},
    }


def test_what_is_left_out_is_told() -> None:
    remarks = {text.partition(":")[0]: text for text in holdfast.open_checkpoint(FOLDER).remarks}
    assert remarks.keys() == {f"{key}.0" for key in EXTRA_STATES}
    assert all("_io.BytesIO" in remarks[f"{key}.0"] for key in EXTRA_STATES)


def test_it_loads_into_tensors_of_those_names() -> None:
    truth = load_file(FIXTURES / "megatron-core-0.16.1.safetensors")
    target = {key: torch.zeros_like(tensor) for key, tensor in truth.items()}
    holdfast.load(FOLDER, target)
    assert all(torch.equal(target[key], tensor) for key, tensor in truth.items())
