"""Holdfast under Accelerate's verbs: the real Accelerate, alone and on two processes.

Accelerate is imported in the tests: every process of the suite imports this file, and Accelerate takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.integrations.host import MARK, Host, mark_of
from tests.support.gloo_worlds import Case, Results, run_world

if TYPE_CHECKING:
    import accelerate

CASES = "tests.unit.integrations.accelerate_cases"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have Accelerate begin anew: its state is one for the whole process."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    begin_anew()
    yield
    begin_anew()


def begin_anew() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Counter:
    """An object of a script, with a state."""

    def __init__(self, value: object = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.value = state["value"]


class Job:
    """A training script under an Accelerator."""

    def __init__(
        self,
        kind: type | None = None,
        *,
        wrap: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
        **how: object,
    ) -> None:
        from holdfast.integrations.accelerate import Accelerator

        begin_anew()
        torch.manual_seed(0)
        self.accelerator = (kind or Accelerator)(cpu=True, **how)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model if wrap is None else wrap(model), optimizer, scheduler
        )

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = (self.model(torch.randn(3, 4)) - random.random() - np.random.rand()).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def numbered(root: Path, **how: object) -> Job:
    """A job whose checkpoints are named automatically."""
    return Job(project_config=naming_in(root, **how))


def naming_in(root: Path, **how: object) -> accelerate.utils.ProjectConfiguration:
    from accelerate.utils import ProjectConfiguration

    return ProjectConfiguration(project_dir=str(root), automatic_checkpoint_naming=True, **how)


def kept(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir())


# ------------------------------------------------------------------------------------------------- one process


def test_a_resume_goes_on_as_if_uninterrupted(tmp_path: Path) -> None:
    job, counter = Job(), Counter()
    job.accelerator.register_for_checkpointing(counter)
    job.train(3)
    counter.value = 3
    assert job.accelerator.save_state(tmp_path / "c") == tmp_path / "c"
    expected = job.train(3)

    other, fresh = Job(), Counter()
    other.accelerator.register_for_checkpointing(fresh)
    other.accelerator.load_state(tmp_path / "c")
    assert fresh.value == 3
    assert other.scheduler.get_last_lr() == [pytest.approx(0.01)]
    assert other.train(3) == expected


def test_names_are_those_of_the_plain_model(tmp_path: Path) -> None:
    job = Job(wrap=lambda model: torch.compile(model, backend="eager"))
    job.train(1)
    job.accelerator.save_state(tmp_path / "c")
    checkpoint = holdfast.open_checkpoint(tmp_path / "c")
    moments = [
        f"optimizer.state.{name}.{key}" for name in ("bias", "weight") for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert set(checkpoint.tensors) == {"model.bias", "model.weight", *moments}
    assert mark_of(checkpoint) == {
        "name": "accelerate",
        "version": f"accelerate {importlib.metadata.version('accelerate')}",
        "model": "model",
    }
    plain = torch.nn.Linear(4, 2)
    holdfast.load(tmp_path / "c", {"model": plain}, process_group=False)
    assert torch.equal(plain.weight, job.model.weight)


def test_a_folder_is_overwritten_also_beside_files_of_the_script(tmp_path: Path) -> None:
    job = Job()
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "config.json").write_text("{}")
    for _ in range(2):
        job.train(1)
        job.accelerator.save_state(tmp_path / "last")
    expected = job.train(1)
    job.accelerator.load_state(tmp_path / "last")
    assert job.train(1) == expected
    assert (tmp_path / "last" / "config.json").read_text() == "{}"


def test_the_scaler_and_the_count_of_micro_steps_are_kept(tmp_path: Path) -> None:
    job = Job()
    job.accelerator.scaler, job.accelerator.step = torch.amp.GradScaler("cpu", init_scale=8.0), 5
    job.accelerator.save_state(tmp_path / "c")
    other = Job()
    other.accelerator.scaler = torch.amp.GradScaler("cpu")
    other.accelerator.load_state(tmp_path / "c")
    assert other.accelerator.step == 5
    assert other.accelerator.scaler.state_dict()["scale"] == 8.0


def test_checkpoints_are_numbered_and_the_oldest_go_after_the_commit(tmp_path: Path) -> None:
    job = numbered(tmp_path, total_limit=2)
    for number in range(3):
        job.train(1)
        assert job.accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{number}"
    assert kept(tmp_path) == ["checkpoint_1", "checkpoint_2"]
    expected = job.train(2)
    again = numbered(tmp_path, total_limit=2)
    again.accelerator.load_state()
    assert again.train(2) == expected
    again.accelerator.save_state()
    assert kept(tmp_path) == ["checkpoint_2", "checkpoint_3"]


def test_the_checkpoint_just_saved_never_goes(tmp_path: Path) -> None:
    job = numbered(tmp_path, total_limit=1, iteration=7)
    job.accelerator.save_state()
    job.accelerator.project_configuration.iteration = 3
    job.accelerator.save_state()
    assert kept(tmp_path) == ["checkpoint_3", "checkpoint_7"]


def test_what_a_killed_save_left_is_passed_over_and_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = numbered(tmp_path, total_limit=5)
    for _ in range(2):
        job.train(1)
        job.accelerator.save_state()
    left = tmp_path / "checkpoints" / "checkpoint_1"
    (left / "manifest.json").unlink()
    other = numbered(tmp_path, total_limit=5)
    with caplog.at_level(logging.WARNING):
        other.accelerator.load_state()
    assert f"{left}: no whole checkpoint, and passed over" in caplog.text
    assert other.accelerator.save_state() == left
    assert len([path for path in left.iterdir() if len(path.name) == 16]) == 1, "what was left is cleared away"
    with pytest.raises(MissingError, match="no whole checkpoint; expected one of save_state"):
        other.accelerator.load_state(tmp_path / "checkpoints")


def flip(folder: Path) -> None:
    pack = next(folder.glob("*/*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)


def lose(folder: Path) -> None:
    next(folder.glob("*/*.safetensors")).unlink()


def cut(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])


@pytest.mark.parametrize("damage", [flip, lose, cut])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    job = numbered(tmp_path)
    job.train(1)
    job.accelerator.save_state()
    expected = job.train(1)
    job.accelerator.save_state()
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    damage(newest)
    other = numbered(tmp_path)
    with pytest.raises(CorruptError):
        other.accelerator.load_state(newest)
    other.accelerator.load_state()
    assert "checkpoint_1: damaged, and passed over" in caplog.text
    assert other.train(1) == expected
    assert other.accelerator.save_state().name == "checkpoint_2", "the damaged one stays"


def test_a_checkpoint_that_was_not_loaded_is_not_saved_over(tmp_path: Path) -> None:
    numbered(tmp_path).accelerator.save_state()
    with pytest.raises(InvalidError, match=r"is a checkpoint already.*Call load_state\(\) before"):
        numbered(tmp_path).accelerator.save_state()


def test_a_new_training_in_a_used_project_is_refused_and_leaves_it_alone(tmp_path: Path) -> None:
    job = numbered(tmp_path, total_limit=2)
    for _ in range(3):
        job.accelerator.save_state()
    before = kept(tmp_path)
    assert before == ["checkpoint_1", "checkpoint_2"]
    new = numbered(tmp_path, total_limit=2)
    for iteration, wait in ((0, True), (0, False), (1, True), (2, True)):
        new.accelerator.project_configuration.iteration = iteration
        with pytest.raises(InvalidError, match=r"Call load_state\(\) before the first save"):
            new.accelerator.save_state(wait=wait)
    assert kept(tmp_path) == before


def test_a_new_training_in_a_used_project_may_count_on_from_the_old_one(tmp_path: Path) -> None:
    job = numbered(tmp_path, iteration=5)
    job.train(1)
    job.accelerator.save_state()
    new = numbered(tmp_path, total_limit=1)
    with pytest.raises(InvalidError, match=r"set accelerator.project_configuration.iteration = 6"):
        new.accelerator.save_state()
    new.accelerator.project_configuration.iteration = 6
    new.accelerator.save_state()
    assert kept(tmp_path) == ["checkpoint_6"]
    expected = new.train(2)
    again = numbered(tmp_path)
    again.accelerator.load_state()
    assert again.train(2) == expected, "the newest save is that of the new training"


def test_a_checkpoint_from_elsewhere_begins_a_training_in_a_used_project(tmp_path: Path) -> None:
    numbered(tmp_path / "other").accelerator.save_state()
    job = numbered(tmp_path / "used", iteration=4)
    job.accelerator.save_state()
    new = numbered(tmp_path / "used")
    new.accelerator.load_state(tmp_path / "other" / "checkpoints" / "checkpoint_0")
    assert new.accelerator.save_state().name == "checkpoint_5"


def test_what_accelerate_itself_saved_is_an_earlier_training_too(tmp_path: Path) -> None:
    import accelerate

    Job(accelerate.Accelerator, project_config=naming_in(tmp_path, iteration=2)).accelerator.save_state()
    with pytest.raises(
        InvalidError, match="holds checkpoint_2 of an earlier training, and this one has loaded nothing"
    ):
        numbered(tmp_path).accelerator.save_state()


# ------------------------------------------------------------------------------------------------ what differs


def test_other_objects_than_were_saved_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.accelerator.register_for_checkpointing(Counter(), Counter(2))
    job.train(1)
    job.accelerator.save_state(tmp_path / "c")
    weight = job.model.weight.detach().clone()

    other = Job()
    with pytest.raises(InvalidError, match=r"holds 2 of the kind 'custom'.*has 0.*skip=\['custom', 'custom_1'\]"):
        other.accelerator.load_state(tmp_path / "c")
    other.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(InvalidError, match=r"holds 0 of the kind 'scaler'.*has 1.*skip=\['scaler'\]"):
        other.accelerator.load_state(tmp_path / "c", skip="custom*")
    other.accelerator.load_state(tmp_path / "c", skip=["custom", "custom_1", "scaler"])
    assert torch.equal(other.model.weight, weight)

    reading = Job().accelerator
    reading.free_memory()  # A script that evaluates prepares the model alone.
    model = reading.prepare(torch.nn.Linear(4, 2))
    reading.load_state(tmp_path / "c", skip="custom*")
    assert torch.equal(model.weight, weight)
    assert "optimizer is in the checkpoint and not loaded" in caplog.text


def test_a_checkpoint_of_another_integration_or_of_none_is_refused(tmp_path: Path) -> None:
    other = Host(
        integration="lightning",
        package="pytest",
        extra="x",
        tested_from=(0, 0, 0),
        tested_to=(9, 9, 9),
        model_key="net",
    )
    holdfast.save(tmp_path / "other", {MARK: other.mark(), "net": torch.zeros(2)}, process_group=False)
    holdfast.save(tmp_path / "none", {"net": torch.zeros(2)}, process_group=False)
    job = Job()
    with pytest.raises(InvalidError, match=r'integrations\.lightning wrote.*load\(path, \{"net": model\}'):
        job.accelerator.load_state(tmp_path / "other")
    with pytest.raises(InvalidError, match="no integration wrote this checkpoint"):
        job.accelerator.load_state(tmp_path / "none")
    for name in ("other", "none"):
        with pytest.raises(ConflictError, match=r"saved here; expected a root of holdfast\.integrations\.accelerate"):
            job.accelerator.save_state(tmp_path / name)


def test_what_accelerate_itself_wrote_is_loaded_by_it_and_never_replaced(tmp_path: Path) -> None:
    import accelerate

    plain = Job(accelerate.Accelerator, project_config=naming_in(tmp_path))
    plain.train(2)
    plain.accelerator.save_state()
    expected = plain.train(2)
    job = numbered(tmp_path)
    with pytest.raises(InvalidError, match=r"Accelerate itself wrote it.*skip=\['optimizer'\]"):
        job.accelerator.load_state(skip="optimizer")
    job.accelerator.load_state()
    assert job.train(2) == expected
    assert job.accelerator.save_state().name == "checkpoint_1"
    with pytest.raises(InvalidError, match="holds a checkpoint that Accelerate itself wrote"):
        Job().accelerator.save_state(tmp_path / "checkpoints" / "checkpoint_0")


# ------------------------------------------------------------------------------------------------------- hooks


def test_a_model_that_a_hook_saves_is_not_saved_again(tmp_path: Path) -> None:
    job = Job()
    job.train(1)
    seen = []

    def save(models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        seen.append(sorted(weights[0]))
        save_file(models[0].state_dict(), Path(folder) / "adapter.safetensors")
        weights.pop()

    job.accelerator.register_save_state_pre_hook(save)
    job.accelerator.save_state(tmp_path / "c")
    assert seen == [["bias", "weight"]]
    names = holdfast.open_checkpoint(tmp_path / "c").tensors
    assert not [name for name in names if name.startswith("model.")] and "optimizer.state.weight.exp_avg" in names
    expected = job.train(2)

    other = Job()
    with pytest.raises(InvalidError, match=r"pre_hook saved model, so the checkpoint lacks it.*skip='model'"):
        other.accelerator.load_state(tmp_path / "c")

    def load(models: list[torch.nn.Module], folder: str) -> None:
        models.pop().load_state_dict(load_file(Path(folder) / "adapter.safetensors"))

    other.accelerator.register_load_state_pre_hook(load)
    other.accelerator.load_state(tmp_path / "c")
    assert other.train(2) == expected


def test_a_hook_that_leaves_weights_leaves_the_model_to_us(tmp_path: Path) -> None:
    job = Job()
    job.accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: (Path(folder) / "config.json").write_text("{}")
    )
    for _ in range(2):
        job.accelerator.save_state(tmp_path / "c")
    assert "model.weight" in holdfast.open_checkpoint(tmp_path / "c").tensors


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda weights: weights[0].pop("bias"), "changed 'bias' of model"),
        (lambda weights: weights.__setitem__(0, {"weight": torch.zeros(2)}), "put other weights in their place"),
    ],
)
def test_weights_that_a_hook_changed_are_refused(
    tmp_path: Path, change: Callable[[list[dict[str, torch.Tensor]]], object], what: str
) -> None:
    job = Job()
    job.accelerator.register_save_state_pre_hook(lambda models, weights, folder: change(weights))
    with pytest.raises(InvalidError, match=what):
        job.accelerator.save_state(tmp_path / "c")
    with pytest.raises(MissingError):
        job.accelerator.load_state(tmp_path / "c")


# ------------------------------------------------------------------------------------------------- wrong calls


def test_a_save_between_micro_steps_is_refused(tmp_path: Path) -> None:
    job = Job(gradient_accumulation_steps=2)
    with job.accelerator.accumulate(job.model):
        job.train(1)
    with pytest.raises(InvalidError, match=r"gradient accumulation \(every 2 steps\).*sync_gradients is true"):
        job.accelerator.save_state(tmp_path / "c")
    with job.accelerator.accumulate(job.model):
        job.train(1)
    job.accelerator.save_state(tmp_path / "c")


def test_a_save_in_a_graph_capture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    job = Job()
    with pytest.raises(InvalidError, match="captures a CUDA graph"):
        job.accelerator.save_state(tmp_path / "c")


def test_calls_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    job = Job()
    with pytest.raises(InvalidError, match=r"save_state\(exclude_frozen_parameters=…\)"):
        job.accelerator.save_state(tmp_path / "c", exclude_frozen_parameters=True)
    with pytest.raises(InvalidError, match=r"save_state\(output_dir=None\): expected a folder"):
        job.accelerator.save_state()
    job.accelerator.save_state(tmp_path / "c")
    with pytest.raises(InvalidError, match=r"load_state\(strict=…\)"):
        job.accelerator.load_state(tmp_path / "c", strict=False)
    job.accelerator.load_state(tmp_path / "c", map_location="cpu", load_kwargs={"weights_only": True})
    with pytest.raises(InvalidError, match="load_state\\(\\): no folder"):
        job.accelerator.load_state()
    for call in (job.accelerator.save_state, job.accelerator.load_state):
        with pytest.raises(InvalidError, match=r"s3://bucket/run: expected a folder, not a URL"):
            call("s3://bucket/run")
    with pytest.raises(InvalidError, match="total_limit=0"):
        numbered(tmp_path, total_limit=0).accelerator.save_state()
    with pytest.raises(InvalidError, match="save_on_each_node=True"):
        numbered(tmp_path, save_on_each_node=True).accelerator.save_state()
    with pytest.raises(MissingError, match="Begin without load_state"):
        numbered(tmp_path).accelerator.load_state()


def test_a_mode_whose_state_would_be_lost_is_refused() -> None:
    from accelerate import DistributedType

    from holdfast.integrations.accelerate import Accelerator

    class Elsewhere(Accelerator):
        distributed_type = property(lambda self: DistributedType.DEEPSPEED)

    with pytest.raises(InvalidError, match="distributed type DEEPSPEED on cpu; expected NO, MULTI_CPU"):
        Elsewhere(cpu=True)


# -------------------------------------------------------------------------------------------------- background


def test_a_save_in_the_background_ends_with_the_training(tmp_path: Path) -> None:
    job = numbered(tmp_path, total_limit=1)
    for _ in range(3):
        job.train(1)
        job.accelerator.save_state(wait=False)
    expected = job.train(1)
    job.accelerator.load_state()
    assert job.train(1) == expected
    job.accelerator.end_training()
    assert kept(tmp_path) == ["checkpoint_2"]


def test_a_failed_save_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    job, counter = Job(), Counter()
    job.accelerator.register_for_checkpointing(counter)
    job.accelerator.save_state(tmp_path / "1")
    for name, call in {
        "2": lambda: job.accelerator.save_state(tmp_path / "3"),
        "4": lambda: job.accelerator.load_state(tmp_path / "1"),
        "5": job.accelerator.wait_for_saves,
        "6": job.accelerator.end_training,
    }.items():
        counter.value = object()
        job.accelerator.save_state(tmp_path / name, wait=False)
        counter.value = 0
        with pytest.raises(InvalidError, match=r"custom.*object"):
            call()
        job.accelerator.wait_for_saves()
    job.accelerator.save_state(tmp_path / "3")


def test_a_lazy_save_ends_without_another_step(tmp_path: Path) -> None:
    job = Job(settings=holdfast.Settings(staging="lazy"))
    job.train(1)
    job.accelerator.save_state(tmp_path / "c", wait=False)
    expected = job.train(1)
    job.accelerator.save_state(tmp_path / "d", wait=False)
    job.accelerator.wait_for_saves()
    job.accelerator.load_state(tmp_path / "c")
    assert job.train(1) == expected


def test_a_background_save_that_fails_costs_no_older_checkpoint(tmp_path: Path) -> None:
    job, counter = numbered(tmp_path), Counter()
    job.train(1)
    job.accelerator.save_state()
    expected = job.train(1)
    job.accelerator.save_state()
    flip(tmp_path / "checkpoints" / "checkpoint_1")
    other = numbered(tmp_path, total_limit=1)
    other.accelerator.load_state()
    counter.value = object()
    other.accelerator.register_for_checkpointing(counter)
    other.accelerator.save_state(wait=False)
    with pytest.raises(InvalidError, match=r"custom.*object"):
        other.accelerator.wait_for_saves()
    again = numbered(tmp_path)
    again.accelerator.load_state()
    assert again.train(1) == expected, "the only whole checkpoint is still there"


def test_two_saves_in_the_background_to_one_folder_follow_each_other(tmp_path: Path) -> None:
    job = Job()
    for _ in range(2):
        job.train(1)
        job.accelerator.save_state(tmp_path / "last", wait=False)
    expected = job.train(1)
    job.accelerator.load_state(tmp_path / "last")
    assert job.train(1) == expected


def test_failed_saves_max_counts_failures_of_the_background(tmp_path: Path) -> None:
    job, counter = Job(settings=holdfast.Settings(failed_saves_max=3)), Counter()
    job.accelerator.register_for_checkpointing(counter)
    job.accelerator.save_state(tmp_path / "1")
    counter.value = object()
    job.accelerator.save_state(tmp_path / "2", wait=False)
    job.accelerator.save_state(tmp_path / "3", wait=False)
    with pytest.raises(InvalidError, match=r"custom.*object"):
        job.accelerator.save_state(tmp_path / "4", wait=False)
    with pytest.raises(InvalidError, match=r"custom.*object"):
        job.accelerator.end_training()


# -------------------------------------------------------------------------------------------------------- data


def loaders(accelerator: accelerate.Accelerator) -> tuple[torch.utils.data.DataLoader, torch.utils.data.DataLoader]:
    examples = torch.arange(12.0).reshape(12, 1)
    both = [torch.utils.data.DataLoader(examples, batch_size=2, shuffle=True) for _ in range(2)]
    return accelerator.prepare(*both)


def test_the_order_of_samples_goes_on(tmp_path: Path) -> None:
    from accelerate import DataLoaderConfiguration

    config = DataLoaderConfiguration(use_seedable_sampler=True)
    job = Job(dataloader_config=config)
    first, _ = loaders(job.accelerator)
    list(first)
    list(first)
    job.accelerator.save_state(tmp_path / "c")
    expected = [batch.tolist() for batch in first]

    other = Job(dataloader_config=config)
    torch.manual_seed(7)  # Another script may draw before it makes its data loaders.
    fresh, _ = loaders(other.accelerator)
    other.accelerator.load_state(tmp_path / "c")
    skipped = other.accelerator.skip_first_batches(fresh, 2)
    assert [batch.tolist() for batch in skipped] == expected[2:]
    assert [batch.tolist() for batch in fresh] == expected


def test_a_data_loader_that_the_checkpoint_lacks_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Job().accelerator.save_state(tmp_path / "c")
    job = Job()
    loaders(job.accelerator)
    job.accelerator.load_state(tmp_path / "c")
    assert "dataloader, dataloader_1 begins anew, since the checkpoint lacks its position" in caplog.text


class StatefulLoader:
    """What a prepared data loader over torchdata's shows to a save: the names that the real one has."""

    use_stateful_dataloader = True

    def __init__(self, position: Mapping[str, object]) -> None:
        self.iteration, self.dl_state_dict = 0, position

    def get_sampler(self) -> object:
        return None

    def state_dict(self) -> Mapping[str, object]:
        return self.dl_state_dict

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.loaded = state


@pytest.mark.parametrize(
    "position",
    [
        {"_num_yielded": 3, "_iterator_finished": True},
        {"_num_yielded": 0, "_iterator_finished": False},
        {"_snapshot": {"_snapshot_step": 0}},
    ],
)
def test_a_position_between_epochs_fits_another_number_of_processes(position: Mapping[str, object]) -> None:
    from holdfast.integrations.accelerate.data import LoaderPosition, position_of

    loader = StatefulLoader(position)
    saved = [LoaderPosition(loader).state_dict()] * 2
    resize = position_of("dataloader", loader).resize
    assert callable(resize)
    LoaderPosition(loader).load_state_dict(resize(saved, 2, 3))
    assert loader.loaded == loader.state_dict() == position


@pytest.mark.parametrize("position", [{"_num_yielded": 3}, {"_snapshot": {"_snapshot_step": 2}}])
def test_a_position_within_an_epoch_fits_no_other_number_of_processes(position: Mapping[str, object]) -> None:
    from holdfast.integrations.accelerate.data import LoaderPosition, position_of

    loader = StatefulLoader(position)
    resize = position_of("dataloader_1", loader).resize
    assert callable(resize)
    with pytest.raises(InvalidError, match=r"dataloader_1: .*by 2 processes, and 1 load it.*skip='dataloader_1'"):
        resize([LoaderPosition(loader).state_dict()] * 2, 0, 1)


# ---------------------------------------------------------------------------------------------- two processes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Results:
    scratch = tmp_path_factory.mktemp("accelerate")
    names = ("replicas", "background", "hooks", "data", "damaged", "unknown", "late")
    cases = [Case(f"{CASES}:{name}", {"folder": str(scratch / "saved" / name)}) for name in names]
    return run_world(2, cases, scratch)


def test_an_end_that_one_process_does_not_know_keeps_all_in_step(world: Results) -> None:
    assert world.values("unknown") == [
        ["UnavailableError: process 1: the outcome is unknown", ""],
        ["UnavailableError: the outcome is unknown", ""],
    ]


def test_all_processes_pass_over_what_one_finds_damaged(world: Results) -> None:
    assert world.values("damaged") == [[1234.5, 2], [1235.5, 2]]


def test_two_processes_resume_as_if_uninterrupted(world: Results) -> None:
    for value in world.values("replicas"):
        assert value["first"] == value["again"] and value["alike"]


def test_one_process_loads_what_two_have_saved(world: Results, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.accelerator.register_for_checkpointing(torch.nn.BatchNorm1d(3))
    job.accelerator.load_state(world.scratch / "saved" / "replicas")
    assert "2 processes saved it, and 1 load it: the random states of process 1 are not used" in caplog.text
    assert job.scheduler.scheduler.last_epoch == 6, "two processes count twice as many steps"


def test_a_failure_on_one_process_is_raised_on_all(world: Results) -> None:
    failed = [value[0] for value in world.values("hooks")]
    assert failed == ["UnavailableError: process 1: OSError: no room", "OSError: no room"]
    for value in world.values("background"):
        assert "its file is gone" in value[0] and value[1] == ""


def test_what_the_main_process_takes_out_of_weights_counts_for_all(world: Results) -> None:
    for value in world.values("hooks"):
        assert value[1:] == []


def test_data_loaders_of_two_processes_go_on(world: Results) -> None:
    for value in world.values("data"):
        assert value["shuffled"] == value["shuffled again"] and value["shuffled"][0] != value["shuffled"][1]
        assert value["dispatched"] == value["dispatched again"] and value["epochs"] == [1, 1]


def test_processes_that_do_not_meet_are_told_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.integrations.accelerate import ranks

    def broken(values: object) -> object:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(ranks, "gather_object", broken)
    with pytest.raises(
        UnavailableError, match=r"did not meet: Connection closed by peer; expected save_state.*on every"
    ):
        ranks.agreed(lambda: 1)


@pytest.mark.parametrize(
    ("saved", "loading", "said"),
    [
        (1, 2, "1 process saved it, and 2 load it: the random generators of process 1 are seeded anew"),
        (2, 5, "2 processes saved it, and 5 load it: the random generators of processes 2 to 4 are seeded anew"),
        (4, 2, "4 processes saved it, and 2 load it: the random states of processes 2 to 3 are not used"),
        (3, 3, ""),
    ],
)
def test_random_states_of_other_numbers_of_processes_are_named(
    tmp_path: Path, saved: int, loading: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from holdfast.integrations.accelerate.state import SavedRecord, say_other_processes

    record = {"step": 0, "processes": saved, "kept": {}, "by_hooks": []}
    holdfast.save(tmp_path / "c", {"accelerate": record}, process_group=False)
    say_other_processes(SavedRecord(holdfast.open_checkpoint(tmp_path / "c")), loading)
    assert said in caplog.text and bool(said) == bool(caplog.text)


@pytest.mark.parametrize("record", [None, {}, {"step": "x", "processes": 1, "kept": {}, "by_hooks": []}, {"step": 1}])
def test_a_record_that_is_none_is_refused(tmp_path: Path, record: object) -> None:
    from holdfast.integrations.accelerate.state import SavedRecord

    holdfast.save(tmp_path / "c", {"accelerate": record}, process_group=False)
    with pytest.raises(InvalidError, match="its record 'accelerate' is not one of holdfast"):
        SavedRecord(holdfast.open_checkpoint(tmp_path / "c"))


def test_a_process_that_waits_for_the_others_says_so(world: Results) -> None:
    assert world.values("late") == [True, True]


def test_a_loader_over_batches_of_holdfast_keeps_one_position(tmp_path: Path) -> None:
    import holdfast.integrations.accelerate as integration

    def prepared() -> tuple[accelerate.Accelerator, Any, holdfast.data.Batches, torch.optim.Optimizer]:
        begin_anew()
        accelerator = integration.Accelerator(cpu=True)
        batches = holdfast.data.Batches(22, global_batch=4, seed=3)
        loader = torch.utils.data.DataLoader(list(range(22)), batch_sampler=batches)  # type: ignore[arg-type]
        model = torch.nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        return accelerator, loader, batches, optimizer

    accelerator, loader, batches, optimizer = prepared()
    seen = []
    for number, batch in enumerate(loader, 1):
        seen += batch.tolist()
        if number % 4 == 0:
            optimizer.step()
        if number == 8:
            break
    accelerator.save_state(tmp_path / "run")
    accelerator, loader, batches, optimizer = prepared()
    accelerator.load_state(tmp_path / "run")
    assert batches.samples == 8
    assert sorted(seen + [int(each) for batch in loader for each in batch]) == list(range(22))
