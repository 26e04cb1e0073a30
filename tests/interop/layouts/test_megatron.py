"""A GPTModel of Megatron-core and a model of Transformers give the same logits after a load through layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.filterwarnings("default")

from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config  # noqa: E402

import holdfast  # noqa: E402
from tests.interop.layouts.megatron_on_cpu import gpt, logits, megatron  # noqa: E402

TOLERANCE = 5e-6
"""Of the largest logit."""

SIZES = {"heads": 4, "groups": 2, "ffn": 96, "vocab": 96}
SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
KINDS: dict[str, tuple[Any, dict[str, int]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
TOKENS = torch.arange(34).reshape(2, 17) * 7 % 96


@pytest.fixture(scope="module", autouse=True)
def _megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with megatron(tmp_path_factory.mktemp("ranks") / "store"):
        yield


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def models(kind: str, tied: bool) -> tuple[Any, torch.nn.Module]:
    """Return a model of either system, with unlike values."""
    make, more = KINDS[kind]
    config = make(**SHAPE, **more, tie_word_embeddings=tied)
    torch.manual_seed(3)
    pair = (AutoModelForCausalLM.from_config(config).eval(), gpt(config))
    with torch.no_grad():
        for model in pair:
            for each in model.parameters():
                each.add_(torch.randn_like(each) * 0.05)
    return pair


def difference(model: Any, megatron_model: torch.nn.Module) -> float:
    with torch.no_grad():
        expected = model(TOKENS).logits
    return float((logits(megatron_model, TOKENS) - expected).abs().max() / expected.abs().max())


def to_files(kind: str) -> str:
    return "megatron-hf-mixtral" if kind == "mixtral" else "megatron-hf-llama"


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_transformers_load_into_megatron(tmp_path: Path, kind: str, tied: bool) -> None:
    model, other = models(kind, tied)
    assert difference(model, other) > 1e-2
    model.save_pretrained(tmp_path / "files")
    layout = [holdfast.Layout(to_files(kind)).reversed(), holdfast.Layout("megatron-local").reversed()]
    holdfast.load(tmp_path / "files", {"model": other}, layout=layout, skip="*._extra_state")
    assert difference(model, other) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_megatron_loads_into_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    model, other = models(kind, tied)
    holdfast.save(tmp_path / "step", {"model": other})
    layout: list[holdfast.Layout | str] = ["megatron-local", holdfast.Layout(to_files(kind), sizes=SIZES)]
    layout += ["hf-mixtral"] if kind == "mixtral" else []
    holdfast.load(tmp_path / "step", {"model": model}, layout=layout)
    assert difference(model, other) < TOLERANCE
