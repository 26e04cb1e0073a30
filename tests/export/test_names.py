"""Which tensors of a state are its model, and what they are called where there is nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast import api
from tests.export.sources import bits

FLAT = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


class Tied(torch.nn.Module):
    """An embedding to be tied, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(4, 3)
        self.fc = torch.nn.Linear(3, 3)


def tied() -> tuple[Tied, torch.nn.Linear]:
    model, head = Tied(), torch.nn.Linear(3, 4, bias=False)
    head.weight = model.emb.weight
    return model, head


def flat_state() -> dict[str, torch.Tensor]:
    """Return what a causal language model of `transformers` has as its state dict."""
    return {name: torch.randn(4, 3) for name in FLAT}


def in_safetensors(source: Path, target: Path) -> dict[str, torch.Tensor]:
    api.export(source, target, to="safetensors")
    return safetensors.torch.load_file(target / "model.safetensors")


def in_torch(source: Path, target: Path, *, model_only: bool = True) -> dict[str, torch.Tensor]:
    api.export(source, target, to="torch", model_only=model_only)
    found: dict[str, torch.Tensor] = torch.load(target)  # noqa: TID251 - the real library is the oracle
    return found


@pytest.mark.parametrize("by", ["holdfast", "dcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_bare_state_dict_keeps_all_its_names(tmp_path: Path, by: str) -> None:
    state, source = flat_state(), tmp_path / "saved"
    if by == "dcp":
        dcp.save(dict(state), checkpoint_id=source, no_dist=True)
    else:
        holdfast.save(source, dict(state), process_group=False)
    expected = {name: bits(each) for name, each in state.items()}
    for number, found in enumerate(
        (
            in_safetensors(source, tmp_path / "safe"),
            in_torch(source, tmp_path / "torch"),
            in_torch(source, tmp_path / "all", model_only=False),
        )
    ):
        assert {name: bits(each) for name, each in found.items()} == expected, number
    api.export(source, tmp_path / "dcp", to="dcp")
    assert sorted(api.open_checkpoint(tmp_path / "dcp").tensors) == FLAT


@pytest.mark.parametrize("order", [("model", "head"), ("head", "model")])
def test_a_tie_to_another_module_costs_the_model_nothing(tmp_path: Path, order: tuple[str, str]) -> None:
    model, head = tied()
    parts = {"model": model, "head": head}
    holdfast.save(tmp_path / "saved", {key: parts[key] for key in order}, process_group=False)
    expected = {name: bits(each) for name, each in model.state_dict().items()}
    for found in (in_safetensors(tmp_path / "saved", tmp_path / "safe"), in_torch(tmp_path / "saved", tmp_path / "pt")):
        assert {name: bits(each) for name, each in found.items()} == expected
    assert not {"eight", "weight"} & set(api.open_checkpoint(tmp_path / "safe").aliases)
    api.export(tmp_path / "saved", tmp_path / "dcp", to="dcp")
    assert {name.removeprefix("model.") for name in api.open_checkpoint(tmp_path / "dcp").tensors} == set(expected)


@pytest.mark.parametrize("order", [("model", "ema"), ("ema", "model")])
def test_with_everything_asked_for_both_sides_of_a_tie_are_there(tmp_path: Path, order: tuple[str, str]) -> None:
    shared = torch.randn(4, 3)
    state = {"model": {"w": shared, "v": torch.ones(2)}, "ema": {"w": shared}}
    holdfast.save(tmp_path / "saved", {key: state[key] for key in order}, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out", to="safetensors", model_only=False)
    assert set(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")) == {"v", "w"}
    rest = safetensors.torch.load_file(tmp_path / "out" / "optimizer.safetensors")
    assert {name: bits(each) for name, each in rest.items()} == {"ema.w": bits(shared)}


def test_a_tie_of_a_name_that_the_metadata_keeps_for_itself_is_written(tmp_path: Path) -> None:
    shared = torch.randn(4, 3)
    holdfast.save(tmp_path / "saved", {"model": {"a": shared, "b": shared, "format": shared}}, process_group=False)
    found = in_safetensors(tmp_path / "saved", tmp_path / "out")
    assert {name: bits(each) for name, each in found.items()} == {"a": bits(shared), "format": bits(shared)}
    assert api.open_checkpoint(tmp_path / "out").aliases == {"model.b": "model.a"}
