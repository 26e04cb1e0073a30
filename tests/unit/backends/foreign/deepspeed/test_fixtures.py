"""Checkpoints that DeepSpeed 0.19.8 wrote, bit by bit against what its engine held when it saved them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.base.types.listing import ForeignListing
from holdfast.base.types.values import Group
from holdfast.errors import InvalidError
from tests.unit.backends.foreign.deepspeed.assembled import assembled, listing_of
from tests.unit.backends.foreign.deepspeed.crafted import Crafted, numbered

FIXTURES = Path(__file__).parents[4] / "fixtures" / "deepspeed"
CASES = ["bf16_dp2", "zero1_dp2", "zero1elastic_dp2", "zero2_dp4", "zero2rr_dp2", "zero3_dp4"]
FOLDERS = [(case, kind) for case in CASES for kind in ("ckpt", "universal") if (FIXTURES / case / kind).is_dir()]
KEYS = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
TAG = "global_step3"


def reference(case: str) -> dict[str, torch.Tensor]:
    """Return what the live engine held, as `<kind>::<name>`."""
    return load_file(FIXTURES / case / "ref_live.safetensors")


def fqn_of(key: str) -> str:
    kind, _, name = key.partition("::")
    return f"optimizer.state.{name}.{KEYS[kind]}" if kind in KEYS else f"model.{name}"


def trustworthy(case: str, key: str) -> bool:
    """Return whether the reference is right: DeepSpeed's own masters and moments are mixed up after round robin."""
    return not key.startswith("buffer::tmp") and (case != "zero2rr_dp2" or not key.startswith(tuple(KEYS)))


def same_bits(found: np.ndarray[Any, Any], expected: torch.Tensor) -> bool:
    raw = expected.contiguous().view(torch.uint8) if expected.ndim else expected.reshape(1).view(torch.uint8)
    return found.shape == tuple(expected.shape) and found.tobytes() == raw.numpy().tobytes()


@pytest.mark.parametrize(("case", "kind"), FOLDERS)
def test_every_tensor_is_bit_for_bit_what_the_engine_held(case: str, kind: str) -> None:
    folder = FIXTURES / case / kind
    listing = listing_of(folder)
    compared = 0
    for key, expected in reference(case).items():
        if trustworthy(case, key):
            assert same_bits(assembled(folder, listing, fqn_of(key)), expected), key
            compared += 1
    assert compared == (12 if case == "zero2rr_dp2" else 36)
    assert listing.step == 3
    assert "model.tmp" not in listing.tensors, "a buffer that is not persistent"


@pytest.mark.parametrize(("case", "kind"), FOLDERS)
def test_every_verb_reads_the_same(case: str, kind: str) -> None:
    checkpoint = holdfast.open_checkpoint(FIXTURES / case / kind)
    assert checkpoint.step == 3
    for key, expected in reference(case).items():
        if trustworthy(case, key):
            found = checkpoint.read(fqn_of(key), framework="torch")
            assert isinstance(found, torch.Tensor)
            assert found.dtype == expected.dtype and torch.equal(found, expected), key


@pytest.mark.parametrize("case", CASES)
def test_a_tag_folder_is_known_by_itself(case: str) -> None:
    by_latest, by_tag = (listing_of(FIXTURES / case / "ckpt" / each) for each in ("", TAG))
    assert by_tag.tensors == by_latest.tensors
    assert {f"{TAG}/{key}": size for key, size in by_tag.files.items()} == by_latest.files


def test_master_copies_after_round_robin_cast_to_the_weights() -> None:
    folder = FIXTURES / "zero2rr_dp2" / "ckpt"
    listing = listing_of(folder)
    assert len(listing.casts) == 8
    for master, weight in listing.casts.items():
        assert np.array_equal(assembled(folder, listing, master), assembled(folder, listing, weight)), master
    assert [remark for remark in listing.remarks if "param_slice_mappings" in remark]


def test_what_deepspeed_made_of_round_robin_is_warned_of() -> None:
    folder = FIXTURES / "zero2rr_dp2" / "universal"
    listing = listing_of(folder)
    wrong = [m for m, w in listing.casts.items() if assembled(folder, listing, m).tobytes() !=
             assembled(folder, listing, w).tobytes()]  # fmt: skip
    assert len(wrong) == 6
    assert [remark for remark in listing.remarks if "round_robin_gradients" in remark]


@pytest.mark.parametrize(("case", "kind"), [each for each in FOLDERS if each[0] in ("bf16_dp2", "zero2_dp4")])
def test_a_master_copy_is_named_with_the_weight_that_was_cast_from_it(case: str, kind: str) -> None:
    folder = FIXTURES / case / kind
    listing = listing_of(folder)
    assert len(listing.casts) == 8
    for master, weight in listing.casts.items():
        cast = torch.from_numpy(assembled(folder, listing, master)).to(reference(case)["module::gain"].dtype)
        assert same_bits(assembled(folder, listing, weight), cast)


def test_without_a_weight_of_its_own_the_master_copy_is_the_weight() -> None:
    listing = listing_of(FIXTURES / "zero3_dp4" / "ckpt")
    assert listing.casts["optimizer.state.emb.weight.master"] == "model.emb.weight"
    assert listing.pieces["model.emb.weight"] == listing.pieces["optimizer.state.emb.weight.master"]
    assert listing.tensors["model.emb.weight"].dtype == "float32"


@pytest.mark.parametrize(("case", "kind"), FOLDERS)
def test_steps_and_ties_and_hyperparameters_go_by_name(case: str, kind: str) -> None:
    folder = FIXTURES / case / kind
    listing = listing_of(folder)
    meta = json.loads((FIXTURES / case / "ref_meta.json").read_text())
    assert listing.aliases["model.head.weight"] == "model.emb.weight"
    assert listing.aliases["optimizer.state.head.weight.exp_avg"] == "optimizer.state.emb.weight.exp_avg"
    assert assembled(folder, listing, "optimizer.state.l1.bias.step") == 3
    optimizer = listing.tree.items["optimizer"]
    assert isinstance(optimizer, Group)
    members, values = optimizer.items["param_groups"], optimizer.items["hyperparameters"]
    assert isinstance(members, dict) and isinstance(values, dict)
    trained = set(meta["shapes"]) - set(meta["frozen"])
    assert set(members) == trained | {"head.weight"}
    for name, content in members.items():
        if case == "zero1elastic_dp2":
            assert values[content] == {}
            continue
        group = meta["groups"][int(name != "head.weight" and len(meta["shapes"][name]) == 1)]
        assert values[content]["weight_decay"] == group["weight_decay"]
        assert values[content]["initial_lr"] == group["base_lr"]
        assert "params" not in values[content]


class Model(nn.Module):
    """The model of the fixtures: tied, with a frozen layer, buffers and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("tmp", torch.zeros(4), persistent=False)
        self.emb, self.l1, self.norm = nn.Embedding(37, 10), nn.Linear(10, 14), nn.LayerNorm(14)
        self.frozen, self.l2 = nn.Linear(14, 15).requires_grad_(False), nn.Linear(15, 10)
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.emb.weight


def model_and_optimizer(case: str) -> tuple[Model, torch.optim.AdamW]:
    """Return both as fresh ones, the optimizer's groups the other way round than in the checkpoint."""
    model = Model()
    if case == "bf16_dp2":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [[each for each in trained if (each.ndim > 1) is matrices] for matrices in (False, True)]
    return model, torch.optim.AdamW([{"params": each} for each in groups])


@pytest.mark.parametrize(("case", "kind"), FOLDERS)
def test_a_plain_module_and_adamw_load_from_it(case: str, kind: str) -> None:
    model, optimizer = model_and_optimizer(case)
    holdfast.load(FIXTURES / case / kind, {"model": model, "optimizer": optimizer}, skip=["optimizer.state.*.master"])
    expected = reference(case)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"module::{name}"]), name
        for key in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            if trustworthy(case, f"{key}::{name}"):
                assert torch.equal(optimizer.state[parameter][key], expected[f"{key}::{name}"]), name
                assert optimizer.state[parameter]["step"] == 3
    assert model.count == 7 and torch.equal(model.scale, expected["buffer::scale"])
    if case != "zero1elastic_dp2":
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
            (0.00125, 0),
            (0.0025, 0.1),
        ]


@pytest.mark.parametrize("case", ["zero1_dp2", "zero3_dp4"])
def test_frozen_parameters_that_the_optimizer_holds_need_nothing_of_it(case: str) -> None:
    model = Model()
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others}])
    state = {"model": model, "optimizer": optimizer}
    holdfast.load(FIXTURES / case / "ckpt", state, skip=["optimizer.state.*.master"])
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.state[model.l1.weight]["step"] == 3 and model.frozen.weight not in optimizer.state
    model.frozen.requires_grad_(True)
    with pytest.raises(InvalidError, match=r"missing .* optimizer\.param_groups\.frozen"):
        holdfast.load(FIXTURES / case / "ckpt", state, skip=["optimizer.state.*.master"])


def test_a_scheduler_loads_from_it() -> None:
    _, optimizer = model_and_optimizer("zero1_dp2")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    state = {"lr_scheduler": scheduler, "iteration": 0, "my_client_state": {"consumed_samples": 0}}
    holdfast.load(FIXTURES / "zero1_dp2" / "ckpt", state)
    assert scheduler.last_epoch == 3
    assert state["iteration"] == 3 and state["my_client_state"] == {"consumed_samples": 12}


@pytest.mark.parametrize("kept", ["state", "group", "elastic"])
def test_a_step_kept_as_a_number_lets_adamw_go_on(tmp_path: Path, kept: str) -> None:
    weights = {"w": numbered(3, 5), "v": numbered(4)}
    crafted = Crafted([weights], 2)
    faults: dict[str, dict[str, Any]] = {}
    for rank in range(2):
        saved = crafted.optimizer_state(0, rank)["optimizer_state_dict"]
        base = saved["base_optimizer_state"]
        moments = {key: each for key, each in base["state"][0].items() if key != "step"}
        moments["exp_avg_sq"] = moments["exp_avg"] ** 2
        if kept == "state":
            changed = {"state": {0: {**moments, "step": 7}}, "param_groups": base["param_groups"]}
        elif kept == "group":
            changed = {"state": {0: moments}, "param_groups": [{**base["param_groups"][0], "step": 7}]}
        else:
            changed = [moments]
        faults[f"zero_pp_rank_{rank}_mp_rank_00_optim"] = {"base_optimizer_state": changed} | (
            {"base_optimizer_state_step": 7} if kept == "elastic" else {}
        )
    folder = crafted.write(tmp_path / "c", **faults)
    model = {name: torch.zeros_like(each).requires_grad_() for name, each in weights.items()}
    optimizer = torch.optim.AdamW(model.values())
    holdfast.load(folder, {"model": model, "optimizer": optimizer}, skip=["optimizer.state.*.master"])
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(optimizer.state[parameter]["step"] == 8 for parameter in model.values())


# ------------------------------------------------------------------------------------------------ tensor parallel


def tensor_parallel(kind: str) -> tuple[Path, ForeignListing]:
    folder = FIXTURES / "zero1_tp2_dp2" / kind
    return folder, listing_of(folder)


@pytest.mark.parametrize("kind", ["ckpt", "universal"])
def test_tensor_parallel_shards_are_put_together(kind: str) -> None:
    folder, listing = tensor_parallel(kind)
    compared = 0
    for key, expected in reference("zero1_tp2_dp2").items():
        if not key.startswith("shard") and not (kind == "ckpt" and key.endswith("alibi")):
            assert same_bits(assembled(folder, listing, fqn_of(key)), expected), key
            compared += 1
            if key.startswith("fp32::"):
                weight = assembled(folder, listing, f"model.{key.removeprefix('fp32::')}")
                assert same_bits(weight, expected), f"weight of {key}"
    assert compared == (18 if kind == "ckpt" else 21)
    assert listing.world_size == 4


def test_what_is_to_be_averaged_is_left_out_by_name_and_missed_by_who_asks_for_it() -> None:
    folder, listing = tensor_parallel("ckpt")
    assert not [fqn for fqn in listing.tensors if "alibi" in fqn]
    remarks = [remark for remark in listing.remarks if "alibi and its optimizer state are left out" in remark]
    assert [remark for remark in remarks if "to be averaged" in remark]
    with pytest.raises(InvalidError, match=r"alibi"):
        holdfast.load(folder, {"model": {"alibi": torch.zeros(5), "norm.weight": torch.zeros(11)}})


def test_what_is_taken_by_deepspeeds_rule_for_the_rest_is_said() -> None:
    _, listing = tensor_parallel("ckpt")
    said = [remark for remark in listing.remarks if "states no layout" in remark]
    assert len(said) == 1 and "(col.weight)" in said[0]


def test_copies_on_other_tensor_parallel_ranks_are_listed_to_be_compared() -> None:
    _, listing = tensor_parallel("ckpt")
    assert set(listing.replicas) >= {"model.norm.weight", "optimizer.state.norm.weight.exp_avg"}
    assert "model.row.weight" not in listing.replicas
