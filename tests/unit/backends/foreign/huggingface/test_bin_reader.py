"""Hugging Face weights as `.bin` files: with an index, by their names, one alone, and an adapter of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import InvalidError, MissingError

FIRST = "pytorch_model-00001-of-00002.bin"
SECOND = "pytorch_model-00002-of-00002.bin"
INDEX = "pytorch_model.bin.index.json"


def written(folder: Path, *, index: bool = True) -> dict[str, torch.Tensor]:
    """Write a model of two files, as `save_pretrained` cuts it; return its state dict."""
    weights = {f"layers.{number}.weight": torch.randn(3, 4).bfloat16() for number in range(5)}
    files = dict(zip(weights, (FIRST, FIRST, SECOND, SECOND, FIRST), strict=True))
    for file in (FIRST, SECOND):
        part = {name: tensor for name, tensor in weights.items() if files[name] == file}
        torch.save(part, folder / file)  # noqa: TID251 - what is read here is what torch writes
    if index:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 120}, "weight_map": files}))
    return weights


def assert_holds(path: Path, weights: dict[str, torch.Tensor]) -> None:
    found = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    report = holdfast.load(path, {"model": found})
    assert report.missing == report.unexpected == ()
    for name, tensor in weights.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("index", [True, False], ids=["index", "names"])
def test_a_model_of_two_files(index: bool, tmp_path: Path) -> None:
    weights = written(tmp_path, index=index)
    torch.save({"unrelated": 1}, tmp_path / "training_args.bin")  # noqa: TID251 - lies beside such weights
    assert_holds(tmp_path, weights)
    if index:
        assert_holds(tmp_path / INDEX, weights)


def test_one_of_the_files_alone(tmp_path: Path) -> None:
    weights = written(tmp_path)
    part = {name: tensor for name, tensor in weights.items() if name in ("layers.2.weight", "layers.3.weight")}
    assert_holds(tmp_path / SECOND, part)


def test_an_adapter(tmp_path: Path) -> None:
    weights = {"base_model.model.q_proj.lora_A.weight": torch.randn(2, 4)}
    torch.save(weights, tmp_path / "adapter_model.bin")  # noqa: TID251 - what is read here is what torch writes
    assert_holds(tmp_path, weights)


def test_a_file_that_lacks_is_missing(tmp_path: Path) -> None:
    written(tmp_path, index=False)
    (tmp_path / SECOND).unlink()
    with pytest.raises(MissingError, match=r"1 files of pytorch_model-\*-of-00002\.bin; expected all 2"):
        holdfast.open_checkpoint(tmp_path)


def test_a_tensor_that_the_index_names_and_no_file_has_is_missing(tmp_path: Path) -> None:
    written(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["layers.9.weight"] = FIRST
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(MissingError, match=r"layers\.9\.weight"):
        holdfast.open_checkpoint(tmp_path)


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "../elsewhere.bin"}}))
    with pytest.raises(InvalidError, match=r"\.\./elsewhere\.bin"):
        holdfast.open_checkpoint(tmp_path)


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    written(tmp_path, index=False)
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")  # noqa: TID251 - a second model
    with pytest.raises(InvalidError, match="expected one of them"):
        holdfast.open_checkpoint(tmp_path)


def test_a_file_of_that_name_that_is_no_model_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "step": 3}, tmp_path / "pytorch_model.bin")  # noqa: TID251 - no state dict
    with pytest.raises(InvalidError, match="no dict of tensors by name"):
        holdfast.open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_what_transformers_and_peft_save(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) >= 5:
        pytest.skip(f"transformers {transformers.__version__} writes no .bin any more")
    peft: Any = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for name, size in (("one", "5GB"), ("several", "20KB")):
        model.save_pretrained(tmp_path / name, safe_serialization=False, max_shard_size=size)
        stored = {key: tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
        assert_holds(
            tmp_path / name, stored | ({"lm_head.weight": model.lm_head.weight.detach()} if size == "5GB" else {})
        )
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter", safe_serialization=False)
    assert_holds(tmp_path / "adapter", peft.get_peft_model_state_dict(adapted))
