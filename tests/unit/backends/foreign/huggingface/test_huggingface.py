"""What `transformers` and `peft` really write: tiny models, saved by them in several files, loaded bit for bit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.errors import InvalidError

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"vocab_size": 101, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def library(name: str) -> Any:
    """Import what only these tests use, when one runs: every process that shares the suite collects this file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason="needs the extra interop")


def llama(seed: int, *, tied: bool = True) -> Any:
    transformers = library("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(intermediate_size=48, num_hidden_layers=3, tie_word_embeddings=tied, **SIZES)
    return transformers.LlamaForCausalLM(config)


def mixtral(seed: int) -> Any:
    transformers = library("transformers")
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(intermediate_size=24, num_hidden_layers=2, num_local_experts=4, **SIZES)
    return transformers.MixtralForCausalLM(config).to(torch.bfloat16)


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Save in several files; return what they hold, as the stock library reads it."""
    model.save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def same(one: Any, other: Any) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        states[0][name].dtype == states[1][name].dtype and torch.equal(states[0][name], states[1][name])
        for name in states[0]
    )


def test_a_tied_llama_in_several_files(tmp_path: Path) -> None:
    model = llama(1)
    content = saved(model, tmp_path)
    assert "lm_head.weight" not in content, "a tied name is left out by transformers"
    fresh = llama(2)
    assert not same(fresh, model)
    report = holdfast.load(tmp_path, {"model": fresh}, process_group=False)
    assert same(fresh, model)
    assert same(fresh, library("transformers").LlamaForCausalLM.from_pretrained(tmp_path))
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight
    assert report.missing == report.unexpected == ()
    assert report.loaded_bytes == report.tensor_bytes
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(fresh(tokens).logits, model(tokens).logits)


def test_a_model_that_is_not_tied_lacks_the_name(tmp_path: Path) -> None:
    saved(llama(1), tmp_path)
    with pytest.raises(InvalidError, match=r"1 missing from the checkpoint: model\.lm_head\.weight"):
        holdfast.load(tmp_path, {"model": llama(2, tied=False)}, process_group=False)


def test_a_mixtral_by_the_names_of_its_files(tmp_path: Path) -> None:
    """transformers 5 keeps the experts of a layer in one tensor and writes them apart."""
    model = mixtral(1)
    content = saved(model, tmp_path)
    held = {name: torch.zeros_like(tensor) for name, tensor in content.items()}
    report = holdfast.load(tmp_path, {"model": held}, process_group=False)
    assert report.missing == report.unexpected == ()
    for name, tensor in content.items():
        assert held[name].dtype == torch.bfloat16
        assert torch.equal(held[name], tensor), name
    if "model.layers.0.mlp.experts.gate_up_proj" in (state := model.state_dict()):
        experts = [
            torch.cat(
                [held[f"model.layers.0.block_sparse_moe.experts.{number}.{part}.weight"] for part in ("w1", "w3")]
            )
            for number in range(4)
        ]
        assert torch.equal(torch.stack(experts), state["model.layers.0.mlp.experts.gate_up_proj"])
    checkpoint = holdfast.open_checkpoint(tmp_path)
    assert list(checkpoint.verify(deep=True)) == []
    assert {info.dtype for info in checkpoint.tensors.values()} == {"bfloat16"}


def test_what_transformers_wrote_equals_what_we_save_of_it(tmp_path: Path) -> None:
    model = llama(1)
    saved(model, tmp_path / "theirs")
    holdfast.save(tmp_path / "ours", {"model": model}, process_group=False)
    found = holdfast.diff(tmp_path / "theirs", tmp_path / "ours")
    assert {each.verdict.value for each in found.tensors} == {"equal"}
    assert found.only_a == ()
    assert [(each.fqn, each.tied_to) for each in found.only_b] == [
        ("model.lm_head.weight", "model.model.embed_tokens.weight")
    ]


def test_an_adapter_by_the_names_of_its_file(tmp_path: Path) -> None:
    peft = library("peft")

    def adapted(seed: int) -> Any:
        model = peft.get_peft_model(llama(7), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
        return model

    model, fresh = adapted(1), adapted(2)
    model.save_pretrained(tmp_path)
    assert not same(fresh, model)
    report = holdfast.load(tmp_path, {"model": peft.get_peft_model_state_dict(fresh)}, process_group=False)
    assert report.missing == report.unexpected == ()
    assert report.tensors == 12
    assert same(fresh, model), "the dict shares its memory with the model"
