"""What is exported, loaded by the real transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.base.types.export import ExportOptions
from tests.export.sources import bits, exported


def library() -> Any:
    """Import Transformers when a test runs: every process that shares the suite collects this file."""
    return pytest.importorskip("transformers", reason="extra: interop")


def config_of(kind: str, *, tied: bool) -> object:
    transformers = library()
    small = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    if kind == "mixtral":
        return transformers.MixtralConfig(**small, num_local_experts=4, num_experts_per_tok=2)
    return transformers.LlamaConfig(**small)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [1 << 40, 30_000])
def test_what_is_exported_is_loaded_from_the_folder(tmp_path: Path, kind: str, tied: bool, shard_bytes: int) -> None:
    transformers = library()
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, tied=tied)).eval()
    holdfast.save(tmp_path / "saved", {"model": model}, process_group=False)
    exported(tmp_path / "saved", tmp_path / "out", ExportOptions(shard_bytes=shard_bytes))
    (tmp_path / "out" / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    again, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    expected = model.state_dict()
    assert {name: bits(each) for name, each in again.state_dict().items()} == {
        name: bits(each) for name, each in expected.items()
    }
    tokens = torch.arange(20).reshape(2, 10)
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)
