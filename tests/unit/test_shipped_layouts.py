"""Shipped layouts between the files of Hugging Face, models in memory and nanoGPT, value by value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast

HIDDEN, FFN, EXPERTS = 6, 4, 3

CASES = {
    "hf-mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "hf-experts": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""By layout: name of the block in files, and of gate, up and down."""


def require_both_ways(
    folder: Path, layout: str, files: dict[str, torch.Tensor], memory: dict[str, torch.Tensor]
) -> None:
    rules = holdfast.Layout(layout)
    for number, (source, target, each) in enumerate([(files, memory, rules), (memory, files, rules.reversed())]):
        holdfast.save(folder / str(number), {"model": source})
        made = {name: torch.zeros_like(tensor) for name, tensor in target.items()}
        holdfast.load(folder / str(number), {"model": made}, layout=each)
        assert all(torch.equal(made[name], tensor) for name, tensor in target.items())
        shapes = each.shapes({f"model.{name}": tuple(tensor.shape) for name, tensor in source.items()})
        assert shapes == {f"model.{name}": tuple(tensor.shape) for name, tensor in target.items()}


@pytest.mark.parametrize("layout", CASES)
def test_experts_are_stacked_with_gate_above_up(tmp_path: Path, layout: str) -> None:
    block, kinds = CASES[layout]
    shapes = [(FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)]
    gate, up, down = ([torch.rand(shape) for _ in range(EXPERTS)] for shape in shapes)
    files = {
        f"model.layers.0.{block}.experts.{expert}.{kind}.weight": tensors[expert]
        for kind, tensors in zip(kinds, (gate, up, down), strict=True)
        for expert in range(EXPERTS)
    }
    router, norm = torch.rand(EXPERTS, HIDDEN), torch.rand(HIDDEN)
    files |= {f"model.layers.0.{block}.gate.weight": router, "model.norm.weight": norm}
    memory = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.stack(
            [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        ),
        "model.layers.0.mlp.experts.down_proj": torch.stack(down),
        "model.layers.0.mlp.gate.weight": router,
        "model.norm.weight": norm,
    }
    require_both_ways(tmp_path, layout, files, memory)


@pytest.mark.parametrize("has_biases", [True, False])
def test_four_kinds_of_weights_of_nanogpt_are_transposed(tmp_path: Path, has_biases: bool) -> None:
    shapes = {"attn.c_attn": (18, 6), "attn.c_proj": (6, 6), "mlp.c_fc": (24, 6), "mlp.c_proj": (6, 24)}
    weights = {f"transformer.h.0.{name}.weight": torch.rand(shape) for name, shape in shapes.items()}
    same = {f"transformer.{name}.weight": torch.rand(6) for name in ("h.0.ln_1", "h.0.ln_2", "ln_f")}
    same |= {"transformer.wte.weight": torch.rand(9, 6), "transformer.wpe.weight": torch.rand(5, 6)}
    if has_biases:
        same |= {f"transformer.h.0.{name}.bias": torch.rand(shape[0]) for name, shape in shapes.items()}
    memory = {name: weight.T.contiguous() for name, weight in weights.items()}
    require_both_ways(tmp_path, "nanogpt", weights | same, memory | same)
