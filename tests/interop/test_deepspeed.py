"""Checkpoints of the DeepSpeed that is installed, other than those kept as fixtures: read, and trained on from.

Needs the extra `interop`. The first run builds DeepSpeed's communication for CPUs, which takes a minute or two.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import holdfast
from tests.interop.deepspeed_training import BATCH, Model, groups_of, words_of
from tests.support.forked_processes import environment
from tests.support.gloo_worlds import Case, Results, run_world
from tests.unit.backends.foreign.deepspeed.assembled import assembled, listing_of

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra interop"),
    pytest.mark.timeout(900),
]

STEPS, MORE = 3, 2
DEADLINE_SECONDS = 500
"""Of one world; the first builds a library."""

ONE = {"zero_optimization": {"stage": 1}}
THREE = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 100}}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, **ONE}
ROUND_ROBIN = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
CONFIGS: dict[str, tuple[dict[str, Any], int, int]] = {
    "one_dp2": (ONE, 2, 12),
    "one_dp4": (ONE, 4, 12),
    "three_dp2": (THREE, 2, 12),
    "three_dp4": (THREE, 4, 5),
    "bf16_dp4": (BF16, 4, 9),
    "bf16_zero3_dp2": ({**THREE, "bf16": {"enabled": True}}, 2, 8),
    "round_robin_dp2": (ROUND_ROBIN, 2, 10),
    "elastic_dp4": ({"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, 4, 6),
}
"""By name: DeepSpeed's settings, ranks, and how wide the model is."""

RESUMED = {
    "one_dp2 in ZeRO-3": ("one_dp2", THREE, 2),
    "three_dp2 in ZeRO-1": ("three_dp2", ONE, 2),
    "one_dp2 on 4": ("one_dp2", ONE, 4),
    "one_dp4 on 2": ("one_dp4", ONE, 2),
    "one_dp4 in ZeRO-3 on 2": ("one_dp4", THREE, 2),
}
"""Which checkpoint, in an engine of which settings and how many ranks."""


def case(function: str, name: str, folder: Path, config: dict[str, Any], width: int, **more: object) -> Case:
    arguments = {"folder": str(folder), "config": config, "width": width, "steps": STEPS, "more": MORE, **more}
    return Case(f"tests.interop.deepspeed_training:{function}", arguments, name)


def require_all(results: Results, cases: list[Case]) -> None:
    for each in cases:
        results.values(each.key())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with what came of every case: trained, saved, and trained on in every way."""
    root = tmp_path_factory.mktemp("deepspeed")
    for ranks in (2, 4):
        cases = []
        for name, (config, size, width) in CONFIGS.items():
            if size == ranks:
                (root / name).mkdir()
                cases.append(case("train", name, root / name, config, width))
        for name in ("one_dp2", "three_dp2") if ranks == 2 else ():
            cases.append(case("resume_own", f"{name} by itself", root / name, *CONFIGS[name][::2]))
        require_all(run_world(ranks, cases, root / f"train{ranks}", deadline_seconds=DEADLINE_SECONDS), cases)
    for ranks in (2, 4):
        cases = [
            case("resume_through_holdfast", name, root / source, config, CONFIGS[source][2], result=name)
            for name, (source, config, size) in RESUMED.items()
            if size == ranks
        ]
        require_all(run_world(ranks, cases, root / f"resume{ranks}", deadline_seconds=DEADLINE_SECONDS), cases)
    yield root


@pytest.mark.parametrize("name", CONFIGS)
def test_what_it_saved_is_what_the_engine_held(trained: Path, name: str) -> None:
    folder = trained / name / "ckpt"
    listing = listing_of(folder)
    checkpoint = holdfast.open_checkpoint(folder)
    for fqn, expected in load_file(trained / name / "live.safetensors").items():
        if "round_robin" in name and fqn.startswith("optimizer."):
            continue  # DeepSpeed's own are mixed up.
        found = checkpoint.read(fqn, framework="torch")
        assert isinstance(found, torch.Tensor)
        if fqn.startswith("model.") and fqn.replace("model.", "optimizer.state.") + ".master" in listing.tensors:
            found = found.to(expected.dtype)  # With ZeRO-3 the weight is the master copy.
        assert found.dtype == expected.dtype and torch.equal(found, expected), fqn
    for master, weight in listing.casts.items():
        cast = torch.from_numpy(assembled(folder, listing, master)).to(getattr(torch, listing.tensors[weight].dtype))
        assert assembled(folder, listing, weight).tobytes() == cast.view(torch.uint8).numpy().tobytes(), weight
    assert checkpoint.step == STEPS
    assert checkpoint.manifest.world_size == CONFIGS[name][1]
    assert checkpoint.manifest.tree.items["consumed"] == STEPS * BATCH


@pytest.mark.parametrize("name", ["one_dp2", "three_dp2"])
def test_it_resumes_itself_as_if_uninterrupted(trained: Path, name: str) -> None:
    own, whole = (load_file(trained / name / f"{each}.safetensors") for each in ("own", "uninterrupted"))
    assert all(torch.equal(own[fqn], whole[fqn]) for fqn in whole)


@pytest.mark.parametrize("name", ["one_dp2", "three_dp2"])
def test_an_engine_and_its_parts_are_refused(tmp_path: Path, name: str) -> None:
    config, ranks, width = CONFIGS[name]
    refused = [case("refuse", name, tmp_path, config, width)]
    require_all(run_world(ranks, refused, tmp_path / "world", deadline_seconds=DEADLINE_SECONDS), refused)


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_in_another_stage_and_on_other_ranks(trained: Path, name: str) -> None:
    source, _, ranks = RESUMED[name]
    resumed, whole = (load_file(trained / source / f"{each}.safetensors") for each in (name, "uninterrupted"))
    assert resumed.keys() == whole.keys()
    for fqn, expected in whole.items():
        if ranks == CONFIGS[source][1]:
            assert torch.equal(resumed[fqn], expected), fqn
        else:  # Gradients are summed in another order.
            torch.testing.assert_close(resumed[fqn], expected, rtol=1e-4, atol=1e-6, msg=fqn)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra interop")
@pytest.mark.parametrize("stage", [1, 3])
def test_what_it_cuts_itself_is_put_together_as_its_own_converter_does(tmp_path: Path, stage: int) -> None:
    training = Case("tests.interop.deepspeed_autotp:train", {"folder": str(tmp_path), "stage": stage}, "autotp")
    require_all(run_world(4, [training], tmp_path / "world", deadline_seconds=DEADLINE_SECONDS), [training])
    tag, converted = tmp_path / "ckpt" / "global_step2", tmp_path / "universal" / "global_step2"
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", tag, "--output_folder",
         converted, "--num_extract_workers", "1", "--num_merge_workers", "1"],
        env=environment(DS_ACCELERATOR="cpu"), check=True, capture_output=True, timeout=DEADLINE_SECONDS,
    )  # fmt: skip
    native, universal = listing_of(tag), listing_of(converted)
    assert native.tensors == universal.tensors
    assert not native.remarks
    assert len(native.tensors) == 105
    for fqn in native.tensors:
        assert assembled(tag, native, fqn).tobytes() == assembled(converted, universal, fqn).tobytes(), fqn
    assert native.replicas


@pytest.mark.parametrize("name", ["one_dp2", "one_dp4", "three_dp2"])
def test_a_plain_module_and_adamw_train_on_from_it(trained: Path, name: str) -> None:
    model = Model(CONFIGS[name][2])
    optimizer = torch.optim.AdamW(groups_of(model)[::-1], lr=1.0, betas=(0.5, 0.5))
    torch.nn.init.zeros_(model.emb.weight)
    holdfast.load(trained / name / "ckpt", {"model": model, "optimizer": optimizer}, skip=["optimizer.state.*.master"])
    for step in range(STEPS, STEPS + MORE):
        words, following = words_of(step, 0, 1)
        optimizer.zero_grad()
        functional.cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
        optimizer.step()
    expected = load_file(trained / name / "uninterrupted.safetensors")
    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            for key in ("master", "exp_avg", "exp_avg_sq"):
                found = parameter.detach() if key == "master" else state[key]
                wanted = expected[f"optimizer.state.{fqn}.{key}"]
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=f"{fqn} {key}")
