"""Layouts compiled from Transformers' mapping: the same tensors as `from_pretrained`, and the files back again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")

import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

import holdfast  # noqa: E402
from holdfast.errors import InvalidError  # noqa: E402
from holdfast.integrations.transformers import layout_of  # noqa: E402
from tests.interop.layouts import compiled_types  # noqa: E402

TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 4, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SHIPPED = {
    "mixtral": ("MixtralForCausalLM", "hf-mixtral"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "hf-experts"),
    "olmoe": ("OlmoeForCausalLM", "hf-experts"),
}
COMPILED = {
    "deepseek_v3": "DeepseekV3ForCausalLM",  # stacks and joins, in some layers
    "gte": "GteModel",  # sections
    "step3p5_vision": "Step3p7VisionModel",  # sections with rotary pairs
    "nemotron_h": "NemotronHForCausalLM",  # stacks alone
    "olmo_hybrid": "OlmoHybridForCausalLM",  # joins alone
    "gpt_neox": "GPTNeoXForCausalLM",  # names alone
}
SHARE_MIN = 0.8


def require_both_ways(folder: Path, kind: str, name: str, layout: holdfast.Layout) -> None:
    """Require that a load equals `from_pretrained`, and an export the files of `save_pretrained`."""
    default = AutoConfig.for_model(kind)
    changed = {key: value for key, value in TINY.items() if getattr(default, key, None) is not None}
    config = AutoConfig.for_model(kind, **{"pad_token_id": 0, **changed})
    made: Any = getattr(transformers, name, None) or compiled_types.class_named(config, name)
    model, loaded = made._from_config(config), made._from_config(config)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn_like(each))
    model.save_pretrained(folder / "files")
    holdfast.load(folder / "files", {"model": loaded}, layout=layout)
    require_equal(loaded.state_dict(), made.from_pretrained(folder / "files").state_dict())
    require_equal(loaded.state_dict(), model.state_dict())
    holdfast.save(folder / "step", {"model": model})
    sizes = {size: config.num_attention_heads for size in layout.file.sizes if size.startswith("heads_")}
    back = holdfast.Layout(layout.file.text, sizes=sizes).reversed()
    holdfast.export(folder / "step", folder / "back", to="safetensors", layout=back)
    require_equal(load_file(folder / "back/model.safetensors"), load_file(folder / "files/model.safetensors"))
    shutil.copy(folder / "files/config.json", folder / "back")
    require_equal(made.from_pretrained(folder / "back").state_dict(), model.state_dict())


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {*found} == {*expected}
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("kind", SHIPPED)
def test_a_shipped_layout_equals_from_pretrained(tmp_path: Path, kind: str) -> None:
    name, layout = SHIPPED[kind]
    require_both_ways(tmp_path, kind, name, holdfast.Layout(layout))


@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_layout_equals_from_pretrained(tmp_path: Path, kind: str) -> None:
    require_both_ways(tmp_path, kind, COMPILED[kind], holdfast.Layout(layout_of(kind)))


@pytest.mark.parametrize(("kind", "layout"), [("mixtral", "hf-mixtral"), ("qwen3_moe", "hf-experts")])
def test_a_shipped_layout_is_the_compilers_output(kind: str, layout: str) -> None:
    def rules(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("about = ")]

    assert rules(holdfast.Layout(layout).file.text) == rules(layout_of(kind))


@pytest.mark.timeout(900)
def test_each_type_with_a_mapping_is_compiled_or_refused_by_name() -> None:
    compiled, refused = compiled_types.compiled_types()
    share = len(compiled) / (len(compiled) + len(refused))
    print(f"compiled: {len(compiled)} of {len(compiled) + len(refused)} model types, {share:.0%}")
    assert share >= SHARE_MIN, refused
    assert compiled_types.page(compiled, refused) == compiled_types.PAGE.read_text(encoding="utf-8"), (
        "run python -m tests.interop.layouts.compiled_types --write"
    )


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(InvalidError, match="no such model type"):
        layout_of("no_such_model")
