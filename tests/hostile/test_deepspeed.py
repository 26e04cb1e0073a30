"""DeepSpeed checkpoints that lie, lack files or are two in one folder: typed errors that name the place, in time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.backends.foreign.deepspeed.reader import DeepSpeedFormat
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from tests.unit.backends.foreign.deepspeed.assembled import listing_of
from tests.unit.backends.foreign.deepspeed.crafted import Crafted, numbered, save

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
TAG = "global_step3"
WEIGHTS = {"w": numbered(3, 5), "v": numbered(4)}
FIRST, SECOND = "zero_pp_rank_0_mp_rank_00_optim", "zero_pp_rank_1_mp_rank_00_optim"
HUGE = 1 << 61


def copied(case: str, tmp_path: Path) -> Path:
    """Return a copy of a fixture's tag folder."""
    return Path(shutil.copytree(FIXTURES / case / "ckpt" / TAG, tmp_path / case))


def copy_over(case: str, name: str, folder: Path, as_name: str | None = None) -> None:
    shutil.copy(FIXTURES / case / "ckpt" / TAG / name, folder / (as_name or name))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder = copied("zero2_dp4", tmp_path)
    (folder / f"{SECOND}_states.pt").unlink()
    with pytest.raises(MissingError, match="data-parallel rank 1"):
        listing_of(folder)
    (folder / f"{FIRST}_states.pt").unlink()
    with pytest.raises(MissingError, match="rank 0"):
        listing_of(folder)


def test_missing_model_states_are_named(tmp_path: Path) -> None:
    folder = copied("zero1_tp2_dp2", tmp_path)
    (folder / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(MissingError, match="states 2"):
        listing_of(folder)
    folder = copied("zero3_dp4", tmp_path)
    (folder / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(MissingError, match=r"no model states of data-parallel rank 2, .* some of frozen"):
        listing_of(folder)


def test_a_rank_of_another_run_is_found_out(tmp_path: Path) -> None:
    name = f"{SECOND}_states.pt"
    folder = copied("zero1_dp2", tmp_path)
    copy_over("zero2_dp4", name, folder)
    with pytest.raises(InvalidError, match="ZeRO stage: 1 and 2"):
        listing_of(folder)
    copy_over("zero3_dp4", name, folder)
    with pytest.raises(InvalidError, match="ZeRO stage: 1 and 3"):
        listing_of(folder)


def test_files_left_by_more_ranks_are_found_out(tmp_path: Path) -> None:
    folder = copied("zero1_dp2", tmp_path)
    copy_over("zero2_dp4", "zero_pp_rank_3_mp_rank_00_optim_states.pt", folder)
    with pytest.raises(InvalidError, match=r"rank_3_mp_rank_00_optim_states\.pt is of data-parallel rank 3"):
        listing_of(folder)


@pytest.mark.parametrize("other", ["bf16_", ""])
def test_two_files_of_one_rank_are_found_out(tmp_path: Path, other: str) -> None:
    folder = copied("zero1_dp2", tmp_path)
    copy_over("zero1_dp2", f"{FIRST}_states.pt", folder, f"{other}zero_pp_rank_00_mp_rank_00_optim_states.pt")
    with pytest.raises(InvalidError, match="are both of"):
        listing_of(folder)


def test_weights_of_another_run_are_found_out(tmp_path: Path) -> None:
    folder = copied("zero1_dp2", tmp_path)
    copy_over("zero1_tp2_dp2", "mp_rank_00_model_states.pt", folder)
    with pytest.raises(CheckpointError, match="mp_rank_00"):
        listing_of(folder)


FAULTS: dict[str, tuple[dict[str, Any], type[CheckpointError], str]] = {
    "another step": ({"base_optimizer_state": {"state": {0: {"step": torch.tensor(8.0), "exp_avg": torch.ones(10)}},
                                               "param_groups": [{"lr": 0.1, "params": [0]}]}}, InvalidError, "step is"),
    "another rate": ({"base_optimizer_state": {"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.ones(10)}},
                                               "param_groups": [{"lr": 0.2, "params": [0]}]}}, InvalidError, "hyper"),
    "another count of ranks": ({"partition_count": [3]}, InvalidError, "ranks: 2 and 3"),
    "other keys": ({"base_optimizer_state": {"state": {0: {"step": torch.tensor(7.0)}},
                                             "param_groups": [{"lr": 0.1, "params": [0]}]}}, CorruptError, "exp_avg"),
    "a short share": ({"single_partition_of_fp32_groups": [torch.ones(2)]}, CorruptError, "equal shares"),
    "a long share": ({"single_partition_of_fp32_groups": [torch.ones(99)]}, CorruptError, "equal shares"),
    "no tensor": ({"single_partition_of_fp32_groups": [3]}, CorruptError, "master copy 0"),
    "two dimensions": ({"single_partition_of_fp32_groups": [torch.ones(5, 2)]}, CorruptError, "one dimension"),
    "more buffers": ({"single_partition_of_fp32_groups": [torch.ones(10)] * 2, "group_paddings": [0, 0]},
                     CorruptError, "param_groups list 1"),
    "a huge padding": ({"group_paddings": [HUGE]}, CorruptError, "equal shares"),
    "a negative padding": ({"group_paddings": [-1]}, CorruptError, "group_paddings"),
    "an unknown stage": ({"zero_stage": 9}, CorruptError, "zero_stage"),
    "no ranks": ({"partition_count": 0}, CorruptError, "partition_count"),
    "ranks by group": ({"partition_count": [2, 1]}, InvalidError, "experts"),
    "states of no buffer": ({"base_optimizer_state": {"state": {5: {}}, "param_groups": [{"params": [0]}]}},
                            CorruptError, "state of 1 buffers"),
    "no dict": ({"base_optimizer_state": 3}, CorruptError, "optimizer's state"),
    "gaps of another length": ({"param_alignment_paddings": [[0]]}, CorruptError, "param_alignment_paddings"),
    "experts": ({"ds_zero_partition_groups": [{}]}, InvalidError, "experts"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_optimizer_states_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    fault, error, match = FAULTS[name]
    folder = Crafted([WEIGHTS], 2).write(tmp_path / "c", **{SECOND: fault})
    with pytest.raises(error, match=match) as caught:
        listing_of(folder)
    assert str(folder) in str(caught.value)


MODEL_FAULTS: dict[str, tuple[dict[str, Any], type[CheckpointError], str]] = {
    "a longer parameter": ({"param_shapes": [{"w": (3, 6), "v": (4,)}]}, CorruptError, "param_shapes to agree"),
    "a huge parameter": ({"param_shapes": [{"w": (1 << 40, 1 << 40), "v": (4,)}]}, CorruptError, "param_shapes"),
    "a huge length": ({"param_shapes": [{"w": (HUGE,), "v": (4,)}]}, CorruptError, "param_shapes to agree"),
    "another shape": ({"param_shapes": [{"w": (15,), "v": (4,)}]}, CorruptError, "w"),
    "a negative length": ({"param_shapes": [{"w": (-3, -5), "v": (4,)}]}, CorruptError, "param_shapes"),
    "no shape": ({"param_shapes": [{"w": "x", "v": (4,)}]}, CorruptError, "param_shapes"),
    "more buffers": ({"param_shapes": [{"w": (3, 5), "v": (4,)}, {}]}, InvalidError, "buffers"),
    "an unknown parameter": ({"param_shapes": [{"w": (3, 5), "u": (4,)}]}, CorruptError, "u"),
    "an unnamed parameter": ({"module": {"w": 3}}, CorruptError, "v"),
    "a pipeline": ({"checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1}}, InvalidError, "pipeline"),
    "a pipeline's module": ({"module": None}, InvalidError, "pipeline"),
    "AutoEP": ({"ds_autoep_layers": [1]}, InvalidError, "AutoEP"),
    "more model-parallel ranks": ({"mp_world_size": 3}, MissingError, "states 3"),
    "another version": ({"ds_version": "9"}, InvalidError, "version 9"),
    "names that are no text": ({"module": {3: torch.ones(1)}}, CorruptError, "module"),
}


@pytest.mark.parametrize("name", MODEL_FAULTS)
def test_model_states_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    fault, error, match = MODEL_FAULTS[name]
    folder = Crafted([WEIGHTS], 2).write(tmp_path / "c", mp_rank_00=fault)
    with pytest.raises(error, match=match):
        holdfast.open_checkpoint(folder)


def test_zero_3_shares_that_are_too_short_are_refused(tmp_path: Path) -> None:
    fault = {"fp32_flat_groups": [torch.ones(3)]}
    folder = Crafted([WEIGHTS], 2, 3).write(tmp_path / "c", **{SECOND: fault})
    with pytest.raises(CorruptError, match="has 3 elements"):
        listing_of(folder)


def test_state_that_cannot_be_told_apart_is_left_out_and_missed_by_who_asks_for_it(tmp_path: Path) -> None:
    state = {0: {"step": torch.tensor(7.0), "state1": torch.ones(10, dtype=torch.uint8), "absmax1": torch.ones(3)}}
    fault = {"base_optimizer_state": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}}
    folder = Crafted([WEIGHTS], 2).write(tmp_path / "c", **{FIRST: fault, SECOND: fault})
    assert [remark for remark in listing_of(folder).remarks if "absmax1" in remark]
    model = {name: torch.zeros_like(each).requires_grad_() for name, each in WEIGHTS.items()}
    with pytest.raises(InvalidError, match="optimizer"):
        holdfast.load(folder, {"model": model, "optimizer": torch.optim.AdamW(model.values())})
    holdfast.load(folder, {"model": model})
    assert all(torch.equal(model[name], each) for name, each in WEIGHTS.items())


@pytest.mark.parametrize("name", ["layer_00-model_00-model_states.pt", "layer_1_expert_2_mp_rank_00_model_states.pt"])
def test_pipelines_and_experts_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = copied("zero1_dp2", tmp_path)
    save({}, folder / name)
    with pytest.raises(InvalidError, match=name):
        listing_of(folder)


def test_a_tag_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    copied("zero1_dp2", tmp_path)
    (tmp_path / "inside").mkdir()
    for tag in ("../zero1_dp2", str(tmp_path / "zero1_dp2"), "x" * 5000, "\0", ""):
        (tmp_path / "inside" / "latest").write_text(tag)
        assert not DeepSpeedFormat().recognises(ForeignFiles(tmp_path / "inside"), "")


@pytest.mark.long
@pytest.mark.parametrize(
    "name_of",
    [lambda n: f"note{n}.txt", lambda n: f"zero_pp_rank_{n + 2}_mp_rank_00_optim_states.pt"],
    ids=["others", "ranks"],
)
def test_a_hundred_thousand_files_are_judged_in_seconds(tmp_path: Path, name_of: Callable[[int], str]) -> None:
    folder = copied("zero1_dp2", tmp_path)
    for number in range(100_000):
        os.mknod(folder / name_of(number))
    start = time.process_time()
    if "rank" in name_of(0):
        with pytest.raises(InvalidError, match="The folder holds two checkpoints"):
            listing_of(folder)
    else:
        assert len(listing_of(folder).files) == 3
    assert time.process_time() - start < 20


@pytest.mark.parametrize("kind", ["zero1_dp2", "zero3_dp4"])
def test_files_cut_short_anywhere_are_damage(tmp_path: Path, kind: str) -> None:
    folder = copied(kind, tmp_path)
    path = sorted(folder.iterdir())[0]
    data = path.read_bytes()
    for count in range(0, len(data), 97):
        path.write_bytes(data[:count])
        with pytest.raises(CheckpointError):
            listing_of(folder)


@pytest.mark.parametrize("fault", ["shape", "no tensor", "unknown", "no optimizer"])
def test_universal_folders_that_do_not_fit_are_refused(tmp_path: Path, fault: str) -> None:
    folder = Path(shutil.copytree(FIXTURES / "zero3_dp4" / "universal" / TAG, tmp_path / "u"))
    if fault == "shape":
        save({"param": torch.ones(37, 9)}, folder / "zero" / "emb.weight" / "exp_avg.pt")
    elif fault == "no tensor":
        save({"param": 3}, folder / "zero" / "emb.weight" / "exp_avg.pt")
    elif fault == "unknown":
        shutil.copytree(folder / "zero" / "emb.weight", folder / "zero" / "expert.weight")
    else:
        save({"param_groups": 3}, folder / "zero" / "optimizer_state.pt")
    with pytest.raises(CorruptError):
        listing_of(folder)


def without_optimizer(case: str, tmp_path: Path) -> Path:
    """Return a copy of a fixture's tag folder that has no files of optimizer states."""
    folder = copied(case, tmp_path)
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    return folder


def test_zero_3_without_its_optimizer_files_is_no_model_of_empty_tensors(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"zero_pp_rank_0_mp_rank_00_optim_states\.pt: is missing"):
        listing_of(without_optimizer("zero3_dp4", tmp_path))


def test_weights_of_zero_without_its_optimizer_files_are_read_and_it_is_said(tmp_path: Path) -> None:
    found = listing_of(without_optimizer("zero1_dp2", tmp_path))
    assert found.tensors["model.emb.weight"].global_shape == (37, 10)
    assert not any(name.startswith("optimizer.") for name in found.tensors)
    assert any("files of optimizer states are missing" in remark for remark in found.remarks)


def test_a_module_tensor_of_another_shape_than_param_shapes_is_refused(tmp_path: Path) -> None:
    whole = Crafted([WEIGHTS])
    module = {**whole.model_state(0)["module"], "w": torch.zeros(0)}
    folder = whole.write(tmp_path, mp_rank_00={"module": module})
    (folder / f"{FIRST}_states.pt").unlink()
    with pytest.raises(CorruptError, match=r"w has shape \[0\]"):
        listing_of(folder)


@pytest.mark.parametrize("lost", ["emb.weight/exp_avg.pt", "emb.weight/fp32.pt", "emb.weight", "optimizer_state.pt"])
@pytest.mark.parametrize("case", ["zero1_dp2", "zero3_dp4"])
def test_a_state_that_a_universal_folder_lost_is_named(case: str, lost: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / case / "universal" / TAG, tmp_path / "u"))
    path = folder / "zero" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(MissingError, match=f"zero/{lost}.*: is missing"):
        listing_of(folder)


def test_ties_are_listed_in_time_that_is_linear_in_them(tmp_path: Path) -> None:
    count = 8000
    kept = {f"layers.{number}": torch.full((2,), float(number)) for number in range(count)}
    whole = Crafted([kept])
    module = whole.model_state(0)["module"]
    module |= {f"tied.{number}": module[f"layers.{number}"] for number in range(count)}
    shared = {f"tied.{number}": f"layers.{number}" for number in range(count)}
    folder = whole.write(tmp_path, mp_rank_00={"module": module, "shared_params": shared})
    start = time.process_time()
    found = listing_of(folder)
    assert time.process_time() - start < 10
    assert found.aliases["optimizer.state.tied.7.exp_avg"] == "optimizer.state.layers.7.exp_avg"
    assert len(found.aliases) == count * 4


def test_entries_of_client_state_are_kept_or_it_is_said(tmp_path: Path) -> None:
    found = listing_of(Crafted([WEIGHTS]).write(tmp_path, mp_rank_00={"best": None, "model": 1, "optimizer": 2}))
    assert found.tree.items["best"] is None
    assert any("model of client_state is left out" in remark for remark in found.remarks)
    assert any("optimizer is left out" in remark for remark in found.remarks)


@pytest.mark.parametrize("stage", [1, 3])
def test_model_states_of_another_step_than_the_optimizers_are_told_of(stage: int, tmp_path: Path) -> None:
    whole = Crafted([WEIGHTS], stage=stage)
    name = "mp_rank_00" if stage == 1 else "zero_pp_rank_0_mp_rank_00"
    later = whole.write(tmp_path / "later", **{name: {"global_steps": 1000}})
    assert any("1000 steps" in remark and "counts 7" in remark for remark in listing_of(later).remarks)
    skipped = whole.write(tmp_path / "skipped", **{name: {"global_steps": 9, "skipped_steps": 2}})
    assert not listing_of(skipped).remarks


def test_what_is_left_of_a_checkpoint_is_told(tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / "zero1_dp2" / "ckpt", tmp_path / "root"))
    (root / "latest").write_text("global_step99")
    with pytest.raises(MissingError, match=rf"latest names 'global_step99', .* found {TAG}"):
        holdfast.open_checkpoint(root)
    (root / "latest").unlink()
    with pytest.raises(MissingError, match=rf"no latest .* found {TAG}"):
        holdfast.open_checkpoint(root)
    (root / TAG / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(
        MissingError, match=rf"{FIRST}_states\.pt, {SECOND}_states\.pt, and neither mp_rank_00_model_states"
    ):
        holdfast.open_checkpoint(root / TAG)
    (root / "latest").write_text(TAG)
    with pytest.raises(MissingError, match=rf"{TAG} holds {FIRST}_states\.pt"):
        holdfast.open_checkpoint(root)
    shutil.rmtree(root / TAG)
    with pytest.raises(MissingError, match=r"latest names .* found no tag"):
        holdfast.open_checkpoint(root)
    (root / "latest").unlink()
    with pytest.raises(MissingError, match=rf"no checkpoint at {root}: nothing is there"):
        holdfast.open_checkpoint(root)


def test_weights_beside_a_tag_that_was_removed_are_read(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step500")
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert list(holdfast.open_checkpoint(tmp_path).tensors) == ["model.w"]
