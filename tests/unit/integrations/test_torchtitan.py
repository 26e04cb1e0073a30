"""torchtitan's checkpoint manager, called as torchtitan's training loop calls it, in one process."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import holdfast
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.core.format.names import PACK_SUFFIX
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from tests.support.held_optimizers import HoldsOptimizers
from tests.unit.integrations.torchtitan_shapes import stand_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


class FusedProjection(nn.Module):
    """As torchtitan's: one weight, saved as three copies. Under FSDP2 the hook is a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(4, 12, bias=False)
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.merge)

    @staticmethod
    def split(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        grouped = state.pop(f"{prefix}wqkv.weight").reshape(2, 3, 2, 4)
        for number, name in enumerate("qkv"):
            state[f"{prefix}w{name}.weight"] = grouped[:, number].reshape(-1, 4).contiguous()

    @staticmethod
    def merge(module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
        if f"{prefix}wq.weight" in state:
            parts = [state.pop(f"{prefix}w{name}.weight").reshape(2, 2, 4) for name in "qkv"]
            state[f"{prefix}wqkv.weight"] = torch.stack(parts, dim=1).reshape(12, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = FusedProjection(), nn.Linear(12, 4)
        self.register_buffer("bias_of_experts", torch.zeros(3))
        self.register_buffer("rope", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention.wqkv(x))


class Container(HoldsOptimizers):
    """As torchtitan's: one optimizer for each part; no manager may call its `state_dict`, which may step."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.model_parts = parts
        self.optimizers = [torch.optim.AdamW(list(part.named_parameters()), lr=0.1) for part in parts]
        super().__init__([each for part in parts for each in part.parameters()], {})

    def state_dict(self) -> dict[str, Any]:
        for optimizer in self.optimizers:
            optimizer.step()
        raise AssertionError("the container stepped")


class Kept:
    """An object with a state dict: trainer, schedulers and data loader."""

    def __init__(self, **values: object) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


class Training:
    """What torchtitan's trainer does around a checkpoint manager."""

    def __init__(self, place: Path, *, seed: int = 0, states: dict[str, object] | None = None, **config: Any) -> None:
        from holdfast.integrations.torchtitan import HoldfastManager

        torch.manual_seed(seed)
        self.parts: list[nn.Module] = [Block()]
        self.optimizers = Container(self.parts)
        self.schedulers, self.loader = Kept(last_epoch=0), Kept(dp_rank_0=b"at 0", world_size=1)
        self.trainer = Kept(step=0, ntokens_seen=0)
        defaults: dict[str, Any] = {"enable": True, "interval": 2, "keep_latest_k": 0, "last_save_model_only": False}
        self.manager = HoldfastManager.Config(**defaults | config).build(
            dataloader=self.loader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.trainer, **(states or {})},
            sd_adapter=Adapter(),
            base_folder=str(place),
        )

    @property
    def step(self) -> int:
        return self.trainer.values["step"]  # type: ignore[return-value]

    def train(self, until: int, steps: int = 1000) -> None:
        for step in range(self.step + 1, until + 1):
            self.parts[0](torch.full((2, 4), float(step))).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.trainer.values = {"step": step, "ntokens_seen": 8 * step}
            self.schedulers.values = {"last_epoch": step}
            self.loader.values = {"dp_rank_0": f"at {step}".encode(), "world_size": 1}
            self.manager.save(step, last_step=step == steps)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: each.detach().clone() for name, each in self.parts[0].named_parameters()}
        for name, parameter in self.parts[0].named_parameters():
            moments = self.optimizers.optimizers[0].state.get(parameter, {})
            found |= {f"{name}.{key}": value.clone() for key, value in moments.items()}
        return found

    def close(self) -> None:
        self.manager.close()


class Adapter:
    """As torchtitan's between its names and those of Hugging Face."""

    hf_assets_path = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state.items() if name != "bias_of_experts"}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in state.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def trained(tmp_path: Path) -> Training:
    """A training that saved steps 2 and 4."""
    training = Training(tmp_path)
    assert not training.manager.load()
    training.train(4)
    training.close()
    return training


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_training_goes_on_where_it_was_saved(tmp_path: Path, mode: str) -> None:
    first = Training(tmp_path, async_mode=mode)
    first.train(5)
    first.close()
    whole = Training(tmp_path / "whole")
    whole.train(4)
    again = Training(tmp_path, seed=1)
    assert again.manager.load()
    assert (again.step, again.schedulers.values, again.loader.values["dp_rank_0"]) == (4, {"last_epoch": 4}, b"at 4")
    assert equal(again.tensors(), whole.tensors())
    again.train(6)
    whole.train(6)
    assert equal(again.tensors(), whole.tensors())
    again.close()
    whole.close()
    assert [record.step for record in holdfast.api.list_steps(tmp_path / "checkpoint").steps] == [2, 4, 6]


@pytest.mark.parametrize("mode", ["DISABLED", "ASYNC_with_pinned_MEM"])
def test_a_mode_may_be_written_in_any_case(tmp_path: Path, mode: str) -> None:
    training = Training(tmp_path, async_mode=mode)
    training.train(2)
    training.close()
    assert training.manager._config.async_mode == mode.lower()
    assert [record.step for record in holdfast.api.list_steps(tmp_path / "checkpoint").steps] == [2]


def test_a_step_that_is_not_there_is_named_with_its_option(trained: Training, tmp_path: Path) -> None:
    for place, said in ((tmp_path, "committed, newest first: 4, 2"), (tmp_path / "new", "no root of a run")):
        training = Training(place)
        with pytest.raises(FileNotFoundError, match=rf"--checkpoint.load_step=3 is not found: .*{said}"):
            training.manager.load(step=3)
        training.close()
    again = Training(tmp_path)
    assert again.manager.load(step=2) and again.step == 2
    again.close()


def test_an_initial_path_that_is_not_there_is_no_step(tmp_path: Path) -> None:
    training = Training(tmp_path, initial_load_path=str(tmp_path / "absent"))
    with pytest.raises(MissingError, match="absent") as missing:
        training.manager.load()
    assert "load_step" not in str(missing.value)
    training.close()


def test_parameters_are_saved_under_their_own_names(trained: Training, tmp_path: Path) -> None:
    stored = holdfast.open_checkpoint(tmp_path / "checkpoint", step=4)
    model = {name for name in stored.tensors if name.startswith("model.")}
    assert model == {"model.attention.wqkv.weight", "model.out.weight", "model.out.bias", "model.bias_of_experts"}
    assert "optimizer.state.attention.wqkv.weight.exp_avg" in stored.tensors


def test_steps_are_saved_to_a_url(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/checkpoint"
    training = Training(tmp_path, folder=url)
    assert not training.manager.load()
    training.train(2)
    training.close()
    again = Training(tmp_path, seed=1, folder=url)
    assert again.manager.load()
    assert again.step == 2
    again.close()


def test_only_steps_that_are_due_are_saved(tmp_path: Path) -> None:
    training = Training(tmp_path, interval=3, enable_first_step_checkpoint=True)
    training.train(5, steps=5)
    training.close()
    assert [record.step for record in holdfast.api.list_steps(tmp_path / "checkpoint").steps] == [1, 3, 5]
    reader = Training(tmp_path, load_only=True)
    assert reader.manager.load()
    reader.train(6, steps=6)
    reader.close()
    assert holdfast.open_checkpoint(tmp_path / "checkpoint", step="latest").step == 5


def test_nothing_happens_where_checkpoints_are_not_enabled(tmp_path: Path) -> None:
    training = Training(tmp_path, enable=False)
    assert not training.manager.load()
    assert not training.manager.save(2)
    training.manager.maybe_wait_for_staging()
    training.close()
    assert not (tmp_path / "checkpoint").exists()


def test_the_newest_steps_are_kept(tmp_path: Path) -> None:
    training = Training(tmp_path, keep_latest_k=2, settings=holdfast.Settings(collect_grace_seconds=0))
    training.train(8)
    training.close()
    assert [record.step for record in holdfast.api.list_steps(tmp_path / "checkpoint").steps] == [6, 8]


def test_a_step_is_loaded_by_its_number(trained: Training, tmp_path: Path) -> None:
    again = Training(tmp_path, seed=1)
    assert again.manager.load(step=2)
    assert again.step == 2
    with pytest.raises(MissingError, match="3"):
        again.manager.load(step=3)
    again.close()


def test_a_step_is_missing_where_there_is_no_folder(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with pytest.raises(MissingError):
        training.manager.load(step=7)
    training.close()


def test_a_damaged_step_is_passed_over(trained: Training, tmp_path: Path) -> None:
    damage(tmp_path / "checkpoint" / "step-000000000004")
    again = Training(tmp_path, seed=1)
    assert again.manager.load()
    assert again.step == 2
    with pytest.raises(CorruptError):
        again.manager.load(step=4)
    again.close()


def damage(step: Path) -> None:
    for pack in step.glob("*/*.safetensors"):
        content = bytearray(pack.read_bytes())
        content[-1] ^= 1
        pack.write_bytes(content)


def test_keys_are_excluded_from_loading(trained: Training, tmp_path: Path) -> None:
    again = Training(tmp_path, seed=1, exclude_from_loading=["optimizer", "dataloader"])
    assert again.manager.load()
    assert (again.step, again.loader.values["dp_rank_0"]) == (4, b"at 0")
    assert not again.optimizers.optimizers[0].state
    again.close()
    with pytest.raises(InvalidError, match=r"exclude_from_loading: optimiser; expected some of .*optimizer"):
        Training(tmp_path, exclude_from_loading=["optimiser"])


def test_the_last_step_holds_the_model_alone(tmp_path: Path) -> None:
    training = Training(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    training.train(5, steps=5)
    training.close()
    last = holdfast.open_checkpoint(tmp_path / "checkpoint", step=5)
    assert set(last.tensors) == {
        f"model.{name}" for name in [*dict(training.parts[0].named_parameters()), "bias_of_experts"]
    }
    assert {tensor.dtype for tensor in last.tensors.values()} == {"bfloat16"}

    again = Training(tmp_path, seed=1)
    with pytest.raises(InvalidError, match=r"step 5 holds the model alone.*set load_step=4 .*initial_load_path"):
        again.manager.load()
    assert again.manager.load(step=4)
    again.close()

    path = str(tmp_path / "checkpoint" / "step-000000000005")
    other = Training(tmp_path / "other", seed=1, initial_load_path=path)
    assert other.manager.load()
    assert other.step == 0
    assert torch.equal(other.parts[0].out.weight, training.parts[0].out.weight.bfloat16().float())
    other.close()


def test_a_seed_gives_the_weights_alone(tmp_path: Path) -> None:
    seed = Training(tmp_path, seed=1, last_save_model_only=True)
    seed.manager.save(0, last_step=True)
    seed.close()
    training = Training(tmp_path, seed=2)
    assert training.manager.load()
    assert training.step == 0
    assert equal(training.tensors(), seed.tensors())
    training.train(2)
    training.close()

    # The only whole step is damaged: the seed below it holds less.
    damage(tmp_path / "checkpoint" / "step-000000000002")
    again = Training(tmp_path, seed=3)
    assert again.manager.load()
    assert again.step == 0
    assert equal(again.tensors(), seed.tensors())
    again.close()


def test_a_training_begins_from_another_run(trained: Training, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint" / "step-000000000002")
    model = Training(tmp_path / "model", seed=1, initial_load_path=path)
    assert model.manager.load()
    assert (model.step, len(model.optimizers.optimizers[0].state)) == (0, 0)
    model.close()
    whole = Training(tmp_path / "whole", seed=1, initial_load_path=path, initial_load_model_only=False)
    assert whole.manager.load()
    assert whole.step == 2
    whole.train(4)
    assert equal(whole.tensors(), trained.tensors())
    whole.close()

    # The folder has a step now: it comes first.
    again = Training(tmp_path / "whole", seed=1, initial_load_path=str(tmp_path / "nowhere"))
    assert again.manager.load()
    assert again.step == 4
    again.close()


def flat(training: Training) -> dict[str, Any]:
    """As torchtitan's CheckpointManager saves: the model's own state dict at the top, an optimizer by names, flat."""
    state: dict[str, Any] = {}
    for name, parameter in training.parts[0].named_parameters():
        moments = training.optimizers.optimizers[0].state[parameter]
        state |= {f"state.{name}.{key}": value for key, value in moments.items()}
        group = training.optimizers.optimizers[0].param_groups[0]
        state |= {f"param_groups.{name}.{key}": group[key] for key in group if not key.startswith("param")}
    kept = {"train_state": training.trainer, "lr_scheduler": training.schedulers, "dataloader": training.loader}
    values = {key: value.state_dict() for key, value in kept.items()}
    return {**training.parts[0].state_dict(), "optimizer": state, **values}


def test_a_training_goes_on_from_torchtitans_own_checkpoint(trained: Training, tmp_path: Path) -> None:
    own = tmp_path / "own" / "checkpoint" / "step-4"
    dcp.save(flat(trained), checkpoint_id=own, no_dist=True)
    for model_only, step in ((True, 0), (False, 4)):
        again = Training(
            tmp_path / f"from {step}", seed=1, initial_load_path=str(own), initial_load_model_only=model_only
        )
        assert again.manager.load()
        assert again.step == step
        assert torch.equal(again.parts[0].attention.wqkv.weight, trained.parts[0].attention.wqkv.weight)
        if step:
            assert again.loader.values["dp_rank_0"] == b"at 4"
            assert equal(again.tensors(), trained.tensors())
        again.close()

    beside = Training(tmp_path / "own")
    go_on = rf"holds 1 steps that torchtitan's CheckpointManager saved.*set initial_load_path='{own}' and"
    with pytest.raises(InvalidError, match=go_on):
        beside.manager.load()
    beside.close()


def test_a_training_begins_from_a_hugging_face_folder(trained: Training, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    weights = {name: value.bfloat16() for name, value in Adapter().to_hf(trained.parts[0].state_dict()).items()}
    save_file(weights, folder / "model.safetensors")
    again = Training(tmp_path / "from", seed=1, initial_load_path=str(folder), initial_load_in_hf=True)
    assert again.manager.load()
    fused = trained.parts[0].attention.wqkv.weight
    assert torch.equal(again.parts[0].attention.wqkv.weight, fused.bfloat16().float())
    again.close()

    save_file({name: weights[name] for name in list(weights)[1:]}, folder / "model.safetensors")
    short = Training(tmp_path / "short", seed=1, initial_load_path=str(folder), initial_load_in_hf=True)
    with pytest.raises(InvalidError, match=r"lacks model\.model\."):
        short.manager.load()
    short.close()
    nowhere = Training(tmp_path / "nowhere", initial_load_in_hf=True)
    with pytest.raises(InvalidError, match="neither initial_load_path nor hf_assets_path"):
        nowhere.manager.load()
    nowhere.close()


def test_the_last_step_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    training = Training(tmp_path, last_save_model_only=True, last_save_in_hf=True, export_dtype="bfloat16")
    training.train(3, steps=3)
    training.close()
    weights = load_file(tmp_path / "checkpoint" / "step-3" / "model.safetensors")
    expected = {name: value.bfloat16() for name, value in Adapter().to_hf(training.parts[0].state_dict()).items()}
    assert equal(weights, expected)
    again = Training(tmp_path, seed=1)
    with pytest.raises(InvalidError, match="step 3 holds the model alone, under the names of Hugging Face"):
        again.manager.load()
    again.close()


def test_a_failed_save_is_raised_when_training_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = Kept(fine=1)
    training = Training(tmp_path, states={"extra": extra})
    training.train(2)
    training.manager.maybe_wait_for_saving()
    extra.values["pool"] = object()
    with caplog.at_level(logging.ERROR):
        training.train(4)
        del extra.values["pool"]
        training.train(6)
        with pytest.raises(InvalidError, match="pool"):
            training.close()
    assert "extra" in caplog.text and training.manager.failed_saves == 1
    assert [record.step for record in holdfast.api.list_steps(tmp_path / "checkpoint").steps] == [2, 6]
    training.close()


def test_an_error_of_the_training_is_not_hidden_by_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = Kept(fine=1)
    training = Training(tmp_path, states={"extra": extra})
    training.train(2)
    training.manager.maybe_wait_for_saving()
    extra.values["pool"] = object()
    with pytest.raises(ZeroDivisionError), caplog.at_level(logging.ERROR):
        try:
            training.train(4)
            raise ZeroDivisionError
        except Exception:
            training.close()  # As torchtitan's `main` does.
            raise
    assert "1 saves failed; the first error: " in caplog.text


def test_failed_saves_max_ends_the_training(tmp_path: Path) -> None:
    extra = Kept(fine=1)
    training = Training(tmp_path, states={"extra": extra}, settings=holdfast.Settings(failed_saves_max=2))
    training.train(2)
    training.manager.maybe_wait_for_saving()
    extra.values["pool"] = object()
    training.train(4)
    with pytest.raises(InvalidError, match="pool"):
        training.train(6)
    with pytest.raises(InvalidError, match="pool"):
        training.close()


def test_a_lazy_save_whose_state_changes_fails_without_ending_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The save checks for changes once its last byte is written: a change after the check would do no harm.
    is_changed = threading.Event()
    write = Syscalls.pwrite

    def pwrite(self: Syscalls, fd: int, data: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(PACK_SUFFIX):
            assert is_changed.wait(60.0)
        return write(self, fd, data, offset)

    monkeypatch.setattr(Syscalls, "pwrite", pwrite)
    training = Training(tmp_path, async_mode="async_with_pinned_mem")
    training.train(2)
    with torch.no_grad():
        training.parts[0].out.weight.mul_(2)
    is_changed.set()
    training.manager.maybe_wait_for_staging()
    training.train(4)
    training.manager.maybe_wait_for_staging()
    with pytest.raises(InvalidError, match=r"model\.out\.weight"):
        training.close()
    assert training.manager.failed_saves == 1
    assert holdfast.open_checkpoint(tmp_path / "checkpoint", step="latest").step == 4


def test_the_root_of_another_integration_is_refused(tmp_path: Path) -> None:
    for name, states in (
        ("another", {"holdfast_integration": {"name": "accelerate", "version": "accelerate 1.15", "model": "model_0"}}),
        ("none", {}),
    ):
        with holdfast.CheckpointManager(tmp_path / name / "checkpoint", process_group=False) as manager:
            manager.save(2, {"x": torch.zeros(2), **states})
        training = Training(tmp_path / name)
        with pytest.raises(ConflictError, match="Choose another folder"):
            training.manager.load()
        training.close()


def test_a_checkpoint_of_another_integration_gives_its_model_alone(tmp_path: Path) -> None:
    mark = {"name": "accelerate", "version": "accelerate 1.15", "model": "model"}
    path = tmp_path / "other"
    holdfast.save(path, {"model": dict(Block().named_parameters()), "holdfast_integration": mark}, process_group=False)
    training = Training(tmp_path, initial_load_path=str(path), initial_load_model_only=False)
    with pytest.raises(InvalidError, match=r"holdfast\.integrations\.accelerate wrote this checkpoint"):
        training.manager.load()
    training.close()


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    from holdfast.integrations.torchtitan.model import TitanModel

    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 1}

    with pytest.raises(InvalidError, match=r"0 \(1 modules\) keep extra state"):
        TitanModel([nn.Sequential(Counting(2, 2))])
    with pytest.raises(InvalidError, match=r"states: counts: a load could not set this value"):
        Training(tmp_path, states={"counts": {"seen": 3}})


def test_names_are_those_without_wrappers() -> None:
    from holdfast.integrations.torchtitan.model import TitanModel

    part = nn.ModuleDict(
        {"layer": nn.ModuleDict({"_checkpoint_wrapped_module": nn.ModuleDict({"w": nn.Linear(2, 2)})})}
    )
    assert set(TitanModel([part]).tensors()) == {"layer.w.weight", "layer.w.bias"}
    twice = [nn.ModuleDict({"w": nn.Linear(2, 2)}), nn.ModuleDict({"_orig_mod": nn.ModuleDict({"w": nn.Linear(2, 2)})})]
    with pytest.raises(InvalidError, match=r"w\.weight and _orig_mod\.w\.weight are both saved as w\.weight"):
        TitanModel(twice).tensors()


def test_positions_go_by_data_parallel_rank() -> None:
    from holdfast.integrations.torchtitan.positions import position_of

    loader = Kept()
    resize: Any = position_of(loader).resize
    saved = [
        {"dp_rank_0": b"a", "world_size": 2},
        {"dp_rank_0": b"a", "world_size": 2},
        {"dp_rank_1": b"b", "world_size": 2},
    ]
    assert resize(saved, 1, 2) == {"dp_rank_0": b"a", "dp_rank_1": b"b", "world_size": 2}
    with pytest.raises(InvalidError, match=r"different positions under 'at'.*exclude_from_loading"):
        resize([{"at": 1}, {"at": 2}], 0, 1)
    with pytest.raises(InvalidError, match="rank 0 saved int"):
        resize([3], 0, 1)
    loader.dp_world_size = 4  # type: ignore[attr-defined]
    with pytest.raises(InvalidError, match="split for 2 data-parallel ranks, and are for 4 now"):
        resize(saved, 0, 4)
    same = torch.ones(2)
    assert resize([{"at": same}, {"at": torch.ones(2)}], 0, 1)["at"] is same


def test_a_wrong_config_is_refused() -> None:
    from holdfast.integrations.torchtitan import HoldfastManager

    with pytest.raises(InvalidError, match=r"async_mode='sync'; expected one of disabled, async"):
        HoldfastManager.Config(async_mode="sync")
    with pytest.raises(InvalidError, match=r"settings='fast'; expected holdfast\.Settings"):
        HoldfastManager.Config(settings="fast")
    with pytest.raises(InvalidError, match="does not dequantize"):
        HoldfastManager.Config(initial_load_path="/llama", initial_load_in_hf=True, initial_load_in_hf_quantized=True)
    with pytest.raises(ValueError):
        HoldfastManager.Config(keep_latest_k=1)
