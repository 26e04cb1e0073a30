"""Layouts on real checkpoints of Megatron-core 0.16.1, bit for bit (`tests/fixtures/megatron_layouts`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.errors import InvalidError, MissingError

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "megatron_layouts"
CASES = {"dense_tp2_pp2": "megatron-hf-llama", "moe_ep2": "megatron-hf-mixtral"}
VOCAB = 37
NEOX = """
layout = 1
follow = [["{}", "model.{}"]]
[sizes]
vocab = [{ value = "args.vocab_size" }, { json = "config.json", key = "vocab_size" }]
[[rule]]
from = "embedding.word_embeddings.weight"
pad = { dim = 0, content = "vocab" }
to = "gpt_neox.embed_in.weight"
[[rule]]
from = "output_layer.weight"
pad = { dim = 0, content = "vocab" }
to = "embed_out.weight"
[[rule]]
from = "decoder.final_layernorm.{what:weight|bias}"
to = "gpt_neox.final_layer_norm.{what}"
[[rule]]
from = "decoder.layers.{layer:int}.self_attention.linear_qkv.layer_norm_{what:weight|bias}"
to = "gpt_neox.layers.{layer}.input_layernorm.{what}"
[[rule]]
from = "decoder.layers.{layer:int}.self_attention.linear_qkv.{what:weight|bias}"
to = "gpt_neox.layers.{layer}.attention.query_key_value.{what}"
[[rule]]
from = "decoder.layers.{layer:int}.self_attention.linear_proj.{what:weight|bias}"
to = "gpt_neox.layers.{layer}.attention.dense.{what}"
[[rule]]
from = "decoder.layers.{layer:int}.mlp.linear_fc1.layer_norm_{what:weight|bias}"
to = "gpt_neox.layers.{layer}.post_attention_layernorm.{what}"
[[rule]]
from = "decoder.layers.{layer:int}.mlp.linear_fc1.{what:weight|bias}"
to = "gpt_neox.layers.{layer}.mlp.dense_h_to_4h.{what}"
[[rule]]
from = "decoder.layers.{layer:int}.mlp.linear_fc2.{what:weight|bias}"
to = "gpt_neox.layers.{layer}.mlp.dense_4h_to_h.{what}"
"""
"""GPT-NeoX differs from Megatron in names alone."""


def megatron(case: str) -> Path:
    return FIXTURES / case / "torch_dist" / "iter_0000100"


def layouts(case: str) -> list[Any]:
    return ["megatron-dist", CASES.get(case) or holdfast.Layout(NEOX)]


def back(case: str) -> list[Any]:
    return [holdfast.Layout(each).reversed() if isinstance(each, str) else each.reversed() for each in layouts(case)][
        ::-1
    ]


def truth(case: str) -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / case / "hf" / "model.safetensors")


@pytest.mark.parametrize("case", [*CASES, "neox_tp2"])
def test_megatron_loads_as_hugging_face_stores_it(case: str) -> None:
    expected = truth(case)
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    report = holdfast.load(megatron(case), {"model": state}, layout=layouts(case))
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert report.tensors == len(expected)


@pytest.mark.parametrize("case", [*CASES, "neox_tp2"])
def test_back_by_the_same_rules_and_padding_keeps_the_values_of_the_state(case: str) -> None:
    source = holdfast.open_checkpoint(megatron(case))
    names = [name for name in source.tensors if "optimizer" not in name]
    state = {name: torch.full(source.tensors[name].shape, 7.0) for name in names}
    holdfast.load(FIXTURES / case / "hf", state, layout=back(case))
    for name, tensor in state.items():
        found: Any = source.read(name, framework="torch")
        rows = VOCAB if found.shape[0] == 40 else found.shape[0]
        assert torch.equal(tensor[:rows], found[:rows]), name
        assert (tensor[rows:] == 7).all()


@pytest.mark.parametrize("case", CASES)
def test_moments_and_every_slice_of_a_tensor(case: str) -> None:
    source, viewed = (
        holdfast.open_checkpoint(megatron(case)),
        holdfast.open_checkpoint(megatron(case), layout=layouts(case)),
    )
    whole = {name: np.asarray(viewed.read(name)) for name in viewed.tensors}
    for name, array in whole.items():
        for at in (slice(1, None, 2), (slice(None), slice(3, 5)) if array.ndim > 1 else slice(2, 3), -1, ...):
            assert np.array_equal(np.asarray(viewed.read(name, at)), array[at]), (name, at)
    if case != "moe_ep2":
        return
    stacked = np.asarray(
        source.read("chained_1.optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight")
    )
    for layer, expert, part in ((0, 0, 0), (1, 3, 1)):
        expert_name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{('w1', 'w3')[part]}"
        name = f"optimizer.state.{expert_name}.weight.exp_avg"
        assert np.array_equal(whole[name], stacked[layer, expert, 24 * part : 24 * part + 24])
    fused = np.asarray(
        source.read("chained_0.optimizer.state.exp_avg_sq.decoder.layers.self_attention.linear_qkv.weight")
    )
    keys = fused[1].reshape(2, 16, 16)[:, 8:12].reshape(8, 16)
    assert np.array_equal(whole["optimizer.state.model.layers.1.self_attn.k_proj.weight.exp_avg_sq"], keys)


@pytest.mark.parametrize("case", CASES)
def test_export_diff_and_both_imports(case: str, tmp_path: Path) -> None:
    expected = truth(case)
    holdfast.export(megatron(case), tmp_path / "out", to="safetensors", layout=layouts(case))
    (file,) = (tmp_path / "out").glob("*.safetensors")
    exported = load_file(file)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    found = holdfast.diff(megatron(case), FIXTURES / case / "hf", layout=layouts(case), tensors="model.*")
    assert {tensor.verdict.name for tensor in found.tensors} == {"EQUAL"}
    assert len(found.tensors) == len(expected)
    for copy in (True, False):
        root = tmp_path / f"run-{copy}"
        report = holdfast.import_checkpoint(megatron(case), root, copy=copy, layout=layouts(case))
        settings = holdfast.Settings(allowed_roots=report.allowed_roots)
        step = holdfast.open_checkpoint(root, step="latest", settings=settings)
        assert [*step.verify()] == []
        for name, tensor in expected.items():
            assert torch.equal(step.read(f"model.{name}", framework="torch"), tensor)  # type: ignore[arg-type]


def test_only_skip_cast_and_rename_go_with_a_layout() -> None:
    expected = truth("dense_tp2_pp2")
    name = "model.layers.0.self_attn.q_proj.weight"
    state = {"model": {"q": torch.zeros(16, 16, dtype=torch.float64), "o": torch.ones(16, 16)}}
    holdfast.load(
        megatron("dense_tp2_pp2"),
        state,
        layout=layouts("dense_tp2_pp2"),
        rename={"model.layers.0.self_attn.q_proj.weight": "q", "model.layers.0.self_attn.o_proj.weight": "o"},
        cast=True,
        strict=False,
        skip="*.o",
    )
    assert torch.equal(state["model"]["q"], expected[name].double())
    assert (state["model"]["o"] == 1).all()
    part = {"model": {name: torch.zeros(16, 16)}}
    holdfast.load(megatron("dense_tp2_pp2"), part, layout=layouts("dense_tp2_pp2"), only=f"model.{name}", strict=False)
    assert torch.equal(part["model"][name], expected[name])


def test_a_step_of_holdfast_goes_through_a_layout_with_the_hyperparameters(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters(), "lr": 0.5}]
    )
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "ck", {"model": model, "optimizer": optimizer})
    rules = """
layout = 1
follow = [["optimizer.state.{}.{key:exp_avg|exp_avg_sq|step}", "optimizer.state.{}.{key}"], ["model.{}", "model.{}"]]
[[rule]]
from = "0.{what:weight|bias}"
sections = { dim = 0, parts = [{ length = 2, to = "first.{what}" }, { length = 4, to = "rest.{what}" }] }
[[rule]]
from = "1.{what:*}"
to = "last.{what}"
"""
    cut = torch.nn.ModuleDict(
        {"first": torch.nn.Linear(4, 2), "rest": torch.nn.Linear(4, 4), "last": torch.nn.Linear(6, 4)}
    )
    of_cut = torch.optim.AdamW(
        [{"params": [*cut["first"].parameters(), *cut["rest"].parameters()]}, {"params": cut["last"].parameters()}],
        lr=1.0,
    )
    holdfast.load(tmp_path / "ck", {"model": cut, "optimizer": of_cut}, layout=rules)
    assert torch.equal(torch.cat([cut["first"].weight, cut["rest"].weight]), model[0].weight)
    assert [group["lr"] for group in of_cut.param_groups] == [0.25, 0.5]
    moments = [of_cut.state[cut[name].weight]["exp_avg"] for name in ("first", "rest")]
    assert torch.equal(torch.cat(moments), optimizer.state[model[0].weight]["exp_avg"])
    assert of_cut.state[cut["rest"].bias]["step"] == 1
    holdfast.save(tmp_path / "again", {"model": cut, "optimizer": of_cut})
    again = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 9.0}, {"params": model[1].parameters(), "lr": 9.0}]
    )
    was = model[0].weight.detach().clone()
    torch.nn.init.zeros_(model[0].weight)
    holdfast.load(tmp_path / "again", {"model": model, "optimizer": again}, layout=holdfast.Layout(rules).reversed())
    assert torch.equal(model[0].weight, was)
    assert [group["lr"] for group in again.param_groups] == [0.25, 0.5]
    of_cut.param_groups[0]["lr"] = 0.75
    of_cut.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    of_cut.param_groups.pop()
    apart = torch.optim.AdamW(
        [{"params": cut[name].parameters(), "lr": lr} for name, lr in (("first", 1), ("rest", 2), ("last", 3))]
    )
    apart.load_state_dict({**apart.state_dict()})
    cut["first"](torch.ones(1, 4)).sum().backward()
    cut["rest"](torch.ones(1, 4)).sum().backward()
    cut["last"](torch.ones(1, 6)).sum().backward()
    apart.step()
    holdfast.save(tmp_path / "apart", {"model": cut, "optimizer": apart})
    with pytest.raises(
        InvalidError, match=r"first.weight and rest.weight become 0.weight, with unlike hyperparameters"
    ):
        holdfast.load(
            tmp_path / "apart", {"model": model, "optimizer": again}, layout=holdfast.Layout(rules).reversed()
        )


def test_arguments_of_a_call() -> None:
    with pytest.raises(MissingError, match=r"no shipped layout and no readable file.*megatron-dist"):
        holdfast.open_checkpoint(megatron("dense_tp2_pp2"), layout="megatron-hf-lama")
    with pytest.raises(InvalidError, match="expected a name, a path"):
        holdfast.open_checkpoint(megatron("dense_tp2_pp2"), layout=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="expected an integer"):
        holdfast.Layout("nanogpt" if "nanogpt" in holdfast.api.shipped() else "megatron-local", sizes={"heads": 1.5})  # type: ignore[dict-item]


def test_the_sizes_come_from_a_file_beside_the_checkpoint_or_from_the_caller(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "dense_tp2_pp2" / "hf" / "model.safetensors", tmp_path)
    rules = holdfast.Layout("megatron-hf-llama").reversed()
    with pytest.raises(InvalidError, match=r"size vocab: found in none of its places.*--size vocab=N"):
        _ = holdfast.open_checkpoint(tmp_path, layout=rules).tensors
    given = holdfast.Layout("megatron-hf-llama", sizes={"heads": 4, "groups": 2, "ffn": 24, "vocab": VOCAB}).reversed()
    assert holdfast.open_checkpoint(tmp_path, layout=given).tensors["decoder.layers.1.mlp.linear_fc1.weight"].shape == (
        48,
        16,
    )
    with pytest.raises(
        InvalidError, match=r"size heads: 8 from --size heads, and 4 from num_attention_heads of config.json"
    ):
        other = holdfast.Layout("megatron-hf-llama", sizes={"heads": 8}).reversed()
        _ = holdfast.open_checkpoint(FIXTURES / "dense_tp2_pp2" / "hf", layout=other).tensors


def test_a_padded_tensor_that_the_state_lacks_is_no_pattern_of_the_caller() -> None:
    state = {"decoder.final_layernorm.weight": torch.zeros(16)}
    holdfast.load(FIXTURES / "dense_tp2_pp2" / "hf", state, layout=back("dense_tp2_pp2"))
    assert torch.equal(state["decoder.final_layernorm.weight"], truth("dense_tp2_pp2")["model.norm.weight"])


def test_a_given_size_that_no_rule_uses_must_agree_too(tmp_path: Path) -> None:
    wrong = holdfast.Layout("megatron-hf-llama", sizes={"hidden": 99})
    with pytest.raises(InvalidError, match=r"size hidden: 99 from --size hidden, and 16 from dimension 0"):
        _ = holdfast.open_checkpoint(megatron("dense_tp2_pp2"), layout=["megatron-dist", wrong]).tensors
    (tmp_path / "large.toml").write_text("#" * (2 << 20))
    with pytest.raises(InvalidError, match="expected at most 1048576"):
        holdfast.Layout(tmp_path / "large.toml")


def test_large_transpositions_and_permutations(tmp_path: Path) -> None:
    saved = {"a": torch.rand(601, 1100), "b": torch.randint(0, 255, (20, 30, 1030), dtype=torch.uint8)}
    holdfast.save(tmp_path / "ck", saved, settings=holdfast.Settings(chunk_bytes=1 << 16))
    rules = """
layout = 1
[[rule]]
from = "a"
transpose = true
to = "a"
[[rule]]
from = "b"
permute = [2, 0, 1]
to = "b"
"""
    state = {"a": torch.zeros(1100, 601), "b": torch.zeros(1030, 20, 30, dtype=torch.uint8)}
    holdfast.load(tmp_path / "ck", state, layout=rules)
    assert torch.equal(state["a"], saved["a"].T)
    assert torch.equal(state["b"], saved["b"].permute(2, 0, 1))
    part: Any = holdfast.open_checkpoint(tmp_path / "ck", layout=rules).read("a", (slice(7, 900), slice(3, 590)))
    assert np.array_equal(part, saved["a"].T[7:900, 3:590].numpy())
