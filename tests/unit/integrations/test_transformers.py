"""`HoldfastMixin` over the recorded shape of Trainer."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.integrations.host import MARK, mark_of
from holdfast.integrations.transformers import HoldfastMixin
from holdfast.integrations.transformers.exports import Complete, ModelFolders
from holdfast.integrations.transformers.resuming import ResumeStep, find, say_other_ranks
from tests.support.file_modes import require_modes, umask
from tests.support.gloo_worlds import Case, run_world
from tests.unit.integrations.recorded_trainer import RecordedArguments, RecordedTrainer, fail_at_no_step

SETTINGS = holdfast.Settings(collect_grace_seconds=0)


class MyTrainer(HoldfastMixin, RecordedTrainer):
    """The change that a user makes."""


class Patience:
    """A callback with a state."""

    def __init__(self, waited: int = 0) -> None:
        self.waited = waited

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Patience:
        return cls(**state["args"])

    def state(self) -> dict[str, Any]:
        return {"args": {"waited": self.waited}, "attributes": {}}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of these tests has no Transformers."""
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.23.0")


def made(
    folder: Path,
    *,
    losses: Mapping[int, float] | None = None,
    callbacks: list[object] | None = None,
    on_step: Callable[[int], None] = fail_at_no_step,
    model: torch.nn.Module | None = None,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> MyTrainer:
    torch.manual_seed(1)
    return MyTrainer(
        torch.nn.Linear(4, 2) if model is None else model,
        RecordedArguments(str(folder), **arguments),
        callbacks=callbacks,
        losses=losses,
        on_step=on_step,
        **{"settings": SETTINGS, **(options or {})},
    )


def root_of(folder: Path) -> Path:
    return folder / "_holdfast"


def steps_in(folder: Path) -> list[int]:
    return [record.step for record in holdfast.api.list_steps(root_of(folder)).steps if record.committed]


def tags_in(folder: Path) -> dict[str, int]:
    return {tag.name: tag.step for tag in holdfast.api.list_steps(root_of(folder)).tags}


def weights(trainer: MyTrainer) -> list[torch.Tensor]:
    moments = [trainer.optimizer.state[parameter]["exp_avg"] for parameter in trainer.model.parameters()]
    return [*(parameter.detach() for parameter in trainer.model.parameters()), *moments]


def same(one: MyTrainer, other: MyTrainer) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def fail_at(step: int) -> Callable[[int], None]:
    def fail(at: int) -> None:
        if at == step:
            raise KeyboardInterrupt

    return fail


def train_until_killed(folder: Path, step: int, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        made(folder, on_step=fail_at(step), **options).train()


def flip_a_byte(step_folder: Path) -> None:
    pack = next(step_folder.glob("*/*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", max_steps=6)
    assert whole.train() == "trained"
    train_until_killed(tmp_path / "stopped", 5, max_steps=6)
    resumed = made(tmp_path / "stopped", max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert steps_in(tmp_path / "stopped") == [2, 4, 6]
    assert same(whole, resumed) and resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    assert resumed.own_calls == [], "a method of Trainer saved or loaded too"


def test_a_step_holds_the_mark_and_what_trainer_notes(tmp_path: Path) -> None:
    trainer = made(tmp_path, losses={2: 0.5}, callbacks=[Patience(3)], max_steps=2)
    trainer.on_step = lambda step: trainer.state.log_history.append({"$odd": 1.0, "lr": float("nan"), "step": step})
    trainer.train()
    checkpoint = holdfast.open_checkpoint(root_of(tmp_path), step="latest")
    mark = mark_of(checkpoint)
    assert mark == {"name": "transformers", "version": "transformers 5.23.0", "model": "model"}
    record = checkpoint.objects["trainer"]
    assert isinstance(record, dict) and record["parts"] == ["model", "optimizer", "scheduler", "rng"]
    state = json.loads(record["state"])
    assert state["global_step"] == 2 and state["stateful_callbacks"]["Patience"]["args"] == {"waited": 3}
    assert json.loads(record["arguments"])["max_steps"] == 2
    assert checkpoint.manifest.metrics["eval_loss"] == 0.5 and set(checkpoint.manifest.metrics) == {"eval_loss", "lr"}


def test_two_callbacks_of_one_class_keep_their_newest_states(tmp_path: Path) -> None:
    callbacks = [Patience(1), Patience(2)]

    def wait(step: int) -> None:
        for callback in callbacks:
            callback.waited += 10

    made(tmp_path, callbacks=[*callbacks], on_step=wait).train()
    record: Any = holdfast.open_checkpoint(root_of(tmp_path), step="latest").objects["trainer"]
    states = json.loads(record["state"])["stateful_callbacks"]["Patience"]
    assert [state["args"]["waited"] for state in states] == [41, 42]


def test_a_callback_whose_state_is_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"TrainerState: .*set.*Patience"):
        made(tmp_path, callbacks=[Patience({1})]).train()  # type: ignore[arg-type]


def test_a_damaged_newest_step_is_passed_over_with_its_state(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", max_steps=6)
    whole.train()
    train_until_killed(tmp_path / "hurt", 5, max_steps=6)
    flip_a_byte(root_of(tmp_path / "hurt") / "step-000000000004")
    begun: list[int] = []
    resumed = made(tmp_path / "hurt", on_step=begun.append, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert begun == [3, 4, 5, 6], "Trainer's own count must be that of the older step"
    assert same(whole, resumed)


def test_a_damaged_step_that_was_named_is_an_error(tmp_path: Path) -> None:
    made(tmp_path).train()
    flip_a_byte(root_of(tmp_path) / "step-000000000004")
    with pytest.raises(CorruptError):
        made(tmp_path).train(resume_from_checkpoint=4)


@pytest.mark.parametrize("wanted", [2, "2", "keep", "path"])
def test_a_step_is_named_by_number_tag_or_path(tmp_path: Path, wanted: object) -> None:
    made(tmp_path).train()
    holdfast.api.tag(root_of(tmp_path), 2, "keep")
    begun: list[int] = []
    trainer = made(tmp_path, on_step=begun.append)
    path = str(root_of(tmp_path) / "step-000000000002")
    trainer.train(resume_from_checkpoint=path if wanted == "path" else wanted)
    assert begun == [3, 4]
    assert steps_in(tmp_path) == [2, 4]


def test_a_training_goes_on_from_a_step_of_another_folder(tmp_path: Path) -> None:
    made(tmp_path / "first").train()
    begun: list[int] = []
    trainer = made(tmp_path / "second", on_step=begun.append, max_steps=6)
    trainer.train(resume_from_checkpoint=str(root_of(tmp_path / "first") / "step-000000000004"))
    assert begun == [5, 6] and steps_in(tmp_path / "second") == [6]
    straight = made(tmp_path / "third", max_steps=6)
    straight.train()
    assert same(straight, trainer)


def test_nothing_to_resume_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no step is saved in .*Begin without resume_from_checkpoint"):
        made(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(InvalidError, match=r"resume_from_checkpoint=3\.5; expected True"):
        made(tmp_path).train(resume_from_checkpoint=3.5)


def test_a_training_that_begins_beside_older_steps_is_refused_at_once(tmp_path: Path) -> None:
    made(tmp_path).train()
    begun: list[int] = []
    with pytest.raises(InvalidError, match=r"holds step 4 of an earlier training.*start_over=True"):
        made(tmp_path, on_step=begun.append).train()
    assert begun == []
    with pytest.raises(MissingError):
        made(tmp_path, options={"start_over": True}).train(resume_from_checkpoint="absent")
    assert steps_in(tmp_path) == [2, 4]
    made(tmp_path, options={"start_over": True}, max_steps=6).train(resume_from_checkpoint=True)
    assert steps_in(tmp_path) == [2, 4, 6], "a resume begins nothing anew"
    made(tmp_path, options={"start_over": True}, max_steps=2).train()
    assert steps_in(tmp_path) == [2]


def plain_folder(output_dir: Path, step: int, *, finished: bool = True) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")
    if finished:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def test_a_folder_of_trainer_itself_is_resumed_by_trainer(tmp_path: Path) -> None:
    plain_folder(tmp_path, 2)
    plain_folder(tmp_path, 3, finished=False)
    trainer = made(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.own_calls == [
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_load_scaler",
        "_load_rng_state",
    ]
    assert steps_in(tmp_path) == [4]
    begun: list[int] = []
    made(tmp_path, on_step=begun.append, max_steps=6).train(resume_from_checkpoint=True)
    assert begun == [5, 6], "the newer step is ours"


def test_a_newer_folder_of_trainer_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    made(tmp_path).train()
    newer = plain_folder(tmp_path, 9)
    with pytest.raises(ConflictError, match="checkpoint-9: Trainer saved this without Holdfast, after step 4"):
        made(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(InvalidError, match="begins elsewhere"):
        made(tmp_path).train(resume_from_checkpoint=str(newer))


def test_a_folder_that_trainer_did_not_finish_is_refused_by_name(tmp_path: Path) -> None:
    half = plain_folder(tmp_path, 3, finished=False)
    with pytest.raises(InvalidError, match=r"checkpoint-3: has no trainer_state\.json"):
        made(tmp_path).train(resume_from_checkpoint=str(half))


def test_a_root_of_another_integration_is_refused(tmp_path: Path) -> None:
    mark = {"name": "lightning", "version": "lightning 2.6.6", "model": "state_dict"}
    with holdfast.CheckpointManager(root_of(tmp_path), process_group=False) as manager:
        manager.save(1, {MARK: mark}).wait()
    for start_over in (False, True):
        with pytest.raises(ConflictError, match=r"integrations\.lightning saved here"):
            made(tmp_path, options={"start_over": start_over}).train()
    with pytest.raises(InvalidError, match=r"integrations\.lightning wrote this checkpoint"):
        made(tmp_path).train(resume_from_checkpoint=True)


def test_the_limit_keeps_the_newest_steps_and_the_best(tmp_path: Path) -> None:
    losses = {2: 0.3, 4: 0.9, 6: 0.8, 8: 0.7}
    trainer = made(tmp_path, losses=losses, max_steps=8, save_total_limit=1, load_best_model_at_end=True)
    best: list[torch.Tensor] = []
    trainer.on_step = lambda step: best.append(trainer.model.weight.detach().clone()) if step == 2 else None
    trainer.train()
    assert steps_in(tmp_path) == [2, 8] and tags_in(tmp_path) == {"best": 2}
    assert torch.equal(trainer.model.weight, best[0])
    assert trainer.state.best_model_checkpoint == str(root_of(tmp_path) / "step-000000000002")
    assert Path(trainer.state.best_model_checkpoint).is_dir()
    assert trainer.args.save_total_limit == 1 and trainer.own_calls == []


def test_the_best_step_is_known_after_a_resume(tmp_path: Path) -> None:
    train_until_killed(tmp_path, 5, losses={2: 0.3, 4: 0.9}, max_steps=6, load_best_model_at_end=True)
    trainer = made(tmp_path, losses={6: 0.8}, max_steps=6, load_best_model_at_end=True)
    trainer.train(resume_from_checkpoint=True)
    stored = holdfast.open_checkpoint(root_of(tmp_path), step=2).read("model.weight", framework="torch")
    assert torch.equal(trainer.model.weight, stored) and tags_in(tmp_path) == {"best": 2}


def test_going_back_takes_the_best_step_of_then(tmp_path: Path) -> None:
    made(tmp_path, losses={2: 0.5, 4: 0.1}, max_steps=4).train()
    assert tags_in(tmp_path) == {"best": 4}
    trainer = made(tmp_path, losses={4: 0.9, 6: 0.8}, max_steps=6, load_best_model_at_end=True)
    trainer.train(resume_from_checkpoint=2)
    assert tags_in(tmp_path) == {"best": 2} and trainer.state.best_global_step == 2


def test_a_step_that_is_evaluated_after_its_save_is_the_best(tmp_path: Path) -> None:
    trainer = made(tmp_path, max_steps=8, save_total_limit=1)

    def evaluate(step: int) -> None:
        if step == 3:  # As at the end of an epoch.
            trainer.state.best_metric, trainer.state.best_global_step = 0.1, 2

    trainer.on_step = evaluate
    trainer.train()
    assert steps_in(tmp_path) == [2, 8] and tags_in(tmp_path) == {"best": 2}


def test_the_best_step_of_another_run_is_none_of_this_one(tmp_path: Path) -> None:
    made(tmp_path / "first", losses={2: 0.1}, max_steps=4).train()
    made(tmp_path / "second", max_steps=4).train()
    trainer = made(tmp_path / "second", options={"start_over": True}, max_steps=6, load_best_model_at_end=True)
    trainer.train(resume_from_checkpoint=str(root_of(tmp_path / "first") / "step-000000000004"))
    assert tags_in(tmp_path / "second") == {} and steps_in(tmp_path / "second") == [6]


def test_without_the_best_step_the_one_before_it_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = made(tmp_path, losses={2: 0.3, 4: 0.1}, load_best_model_at_end=True)

    def spoil(step: int) -> None:
        if step == 4:
            trainer.lr_scheduler.spoiled = object()  # its state_dict() returns it, and it cannot be saved

    trainer.on_step = spoil
    with caplog.at_level(logging.WARNING), pytest.raises(InvalidError, match="spoiled"):
        trainer.train()
    stored = holdfast.open_checkpoint(root_of(tmp_path), step=2).read("model.weight", framework="torch")
    assert torch.equal(trainer.model.weight, stored), "the training ends, then the failure is raised"
    assert "step 4 had the best metric, and is not stored" in caplog.text


def test_the_best_step_of_another_training_is_not_loaded(tmp_path: Path) -> None:
    made(tmp_path, losses={2: 0.1}).train()
    trainer = made(tmp_path, losses={4: 0.3}, load_best_model_at_end=True, options={"start_over": True})

    def spoil(step: int) -> None:
        if step == 4:
            trainer.lr_scheduler.spoiled = object()

    trainer.on_step = spoil
    with pytest.raises(MissingError, match=r"step 4 had the best metric.*Stored steps: \[2\]") as failed:
        trainer.train()
    assert "spoiled" in failed.value.__notes__[0], "why step 4 is not stored"


def test_rank_0_says_which_step_is_the_best(tmp_path: Path) -> None:
    case = Case("tests.unit.integrations.trainer_cases:other_metrics", {"folder": str(tmp_path / "out")})
    for best in run_world(2, [case], tmp_path).values("other_metrics"):
        assert best == str(root_of(tmp_path / "out") / "step-000000000004")
    record: Any = holdfast.open_checkpoint(root_of(tmp_path / "out"), step=4).objects["trainer"]
    assert record["best_step"] == 4 and tags_in(tmp_path / "out") == {"best": 4}


def test_failed_saves_end_the_training_at_their_limit(tmp_path: Path) -> None:
    settings = holdfast.Settings(failed_saves_max=2, collect_grace_seconds=0)
    trainer = made(tmp_path, options={"settings": settings}, max_steps=20)

    def spoil(step: int) -> None:
        if step == 4:
            trainer.lr_scheduler.spoiled = object()

    trainer.on_step = spoil
    with pytest.raises(holdfast.CheckpointError):
        trainer.train()
    assert trainer.state.global_step < 20 and steps_in(tmp_path) == [2]


def test_a_save_that_is_not_in_the_background_is_committed_when_it_returns(tmp_path: Path) -> None:
    found: dict[int, list[int]] = {}
    trainer = made(tmp_path, options={"background": False})
    trainer.on_step = lambda step: found.__setitem__(step, steps_in(tmp_path) if step > 2 else [])
    trainer.train()
    assert found[3] == [2] and steps_in(tmp_path) == [2, 4]
    assert trainer._holdfast_options.settings == SETTINGS


def test_a_failed_save_ends_a_training_that_waits_for_it(tmp_path: Path) -> None:
    def spoil(step: int) -> None:
        if step == 4:
            trainer.lr_scheduler.spoiled = object()

    trainer = made(tmp_path, on_step=spoil, options={"background": False}, max_steps=8)
    with pytest.raises(InvalidError, match="spoiled"):
        trainer.train()
    assert trainer.state.global_step == 4 and steps_in(tmp_path) == [2], "as Trainer's own save would end it"


def test_a_failed_save_that_is_counted_lets_a_training_go_on(tmp_path: Path) -> None:
    def spoil(step: int) -> None:
        if step == 4:
            trainer.lr_scheduler.spoiled = object()
        if step == 5:
            del trainer.lr_scheduler.spoiled

    settings = holdfast.Settings(failed_saves_max=2, collect_grace_seconds=0)
    trainer = made(tmp_path, on_step=spoil, options={"background": False, "settings": settings}, max_steps=6)
    with pytest.raises(InvalidError, match="spoiled"):
        trainer.train()
    assert trainer.state.global_step == 6 and steps_in(tmp_path) == [2, 6], "raised once the training is over"


def test_the_model_alone_is_saved_and_the_rest_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path, save_only_model=True).train()
    names = set(holdfast.open_checkpoint(root_of(tmp_path), step=4).tensors)
    assert names == {"model.weight", "model.bias"}
    begun: list[int] = []
    trainer = made(tmp_path, on_step=begun.append, max_steps=6)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert begun == [5, 6] and "does not hold optimizer, scheduler, rng; they begin anew" in caplog.text


def test_another_model_is_refused_with_a_way_out_that_works(tmp_path: Path) -> None:
    made(tmp_path).train()
    larger = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
    first = torch.nn.Sequential(torch.nn.Linear(4, 2))
    made(tmp_path / "other", model=first).train()
    root = root_of(tmp_path / "other")
    for wanted, step in ((True, 4), (2, 2)):
        with pytest.raises(InvalidError, match=r"missing.*train\(\) takes none of these.*strict=False\)") as refused:
            made(tmp_path / "other", model=larger).train(resume_from_checkpoint=wanted)
        assert f"holdfast.load('{root}', {{\"model\": model}}, step={step}, strict=False)" in str(refused.value)
    holdfast.load(root, {"model": larger}, step=4, strict=False)
    assert torch.equal(larger[0].weight, first[0].weight)
    made(tmp_path / "other", model=larger, options={"start_over": True}).train()


def test_a_folder_of_another_training_is_named_with_its_own_root(tmp_path: Path) -> None:
    made(tmp_path / "one").train()
    wanted = f"{tmp_path / 'one'}/../one/checkpoint-4"
    with pytest.raises(MissingError, match=r"pass resume_from_checkpoint='(.*)'") as missing:
        made(tmp_path / "two").train(resume_from_checkpoint=wanted)
    begun: list[int] = []
    way_out = str(missing.value).partition("resume_from_checkpoint='")[2].removesuffix("'")
    made(tmp_path / "two", on_step=begun.append, max_steps=6).train(resume_from_checkpoint=way_out)
    assert begun == [5, 6]
    for absent in (tmp_path / "one" / "checkpoint-7", tmp_path / "three" / "checkpoint-4"):
        with pytest.raises(MissingError, match=r"is not there; .*Holdfast does not have the step either: ") as missing:
            made(tmp_path / "four").train(resume_from_checkpoint=str(absent))
        assert str(absent.parent / "_holdfast") in str(missing.value) and "resume_from_checkpoint=" not in str(
            missing.value
        )


def test_a_folder_of_trainers_that_is_not_there_is_named_with_the_step(tmp_path: Path) -> None:
    made(tmp_path).train()
    for wanted in ("checkpoint-4", str(tmp_path / "checkpoint-4")):
        with pytest.raises(MissingError, match=r"checkpoint-4: is not there.*pass resume_from_checkpoint=4 or True"):
            made(tmp_path).train(resume_from_checkpoint=wanted)
    with pytest.raises(MissingError, match=r"checkpoint-3: is not.*no committed step 3; committed, newest first: 4, 2"):
        made(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    holdfast.api.tag(root_of(tmp_path), 2, "checkpoint-4")
    begun: list[int] = []
    made(tmp_path, on_step=begun.append).train(resume_from_checkpoint="checkpoint-4")
    assert begun == [3, 4], "a tag of that name is one"


def test_an_exported_model_is_no_unfinished_folder_of_trainer(tmp_path: Path) -> None:
    made(tmp_path).train()
    exported = tmp_path / "_hf" / "checkpoint-4"
    exported.mkdir(parents=True)
    with pytest.raises(
        InvalidError, match=r"is an exported model.*resume_from_checkpoint=4 in its training"
    ) as refused:
        made(tmp_path).train(resume_from_checkpoint=str(exported))
    assert "Remove" not in str(refused.value)


def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path) -> None:
    made(tmp_path).train()
    with made(tmp_path)._opened_run(None) as run:
        assert run.find(True) is not None
        with pytest.raises(UnavailableError, match=r"gone/trainer_state\.json: cannot be written.*TMPDIR"):
            run.write_state_file(tmp_path / "gone")


def test_another_batch_or_number_of_ranks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path).train()
    with caplog.at_level(logging.WARNING):
        made(tmp_path, max_steps=6, gradient_accumulation_steps=1).train(resume_from_checkpoint=True)
        assert "samples" not in caplog.text and "random generators" not in caplog.text
        made(tmp_path, max_steps=8, gradient_accumulation_steps=3).train(resume_from_checkpoint=True)
    assert "step-000000000006: a step was of 8 samples, and is of 24 now" in caplog.text
    caplog.clear()
    found = find(str(root_of(tmp_path)), str(tmp_path), True, SETTINGS)
    assert isinstance(found, ResumeStep)
    with caplog.at_level(logging.WARNING):
        say_other_ranks(found, json.dumps({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}), 4)
    assert "ranks: 1 saved it, and 4 go on" in caplog.text and "samples" not in caplog.text


def test_a_scaler_is_saved_where_there_is_one(tmp_path: Path) -> None:
    class Scaler:
        scale = 2.0

        def state_dict(self) -> dict[str, float]:
            return {"scale": self.scale}

        def load_state_dict(self, state: Mapping[str, float]) -> None:
            self.scale = state["scale"]

    first = made(tmp_path)
    first.accelerator.scaler = Scaler()
    first.accelerator.scaler.scale = 64.0
    first.train()
    second = made(tmp_path, max_steps=6)
    second.accelerator.scaler = Scaler()
    second.train(resume_from_checkpoint=4)
    assert second.accelerator.scaler.scale == 64.0
    made(tmp_path, max_steps=8).train(resume_from_checkpoint=True)  # in full precision


class Adapted(torch.nn.Module):
    """A frozen base with an adapter, named as peft names them."""

    peft_config = {"default": None}  # noqa: RUF012 - as peft has it

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 2).requires_grad_(False)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
        self.other = torch.nn.Linear(2, 2, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.other(self.base(rows) + self.lora_A["default"](rows))
        return hidden


def test_of_a_model_with_adapters_what_is_trained_is_saved(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", model=Adapted(), max_steps=6)
    initial = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.train()
    model = Adapted()
    model.load_state_dict(initial)
    train_until_killed(tmp_path / "stopped", 5, model=model, max_steps=6)
    checkpoint = holdfast.open_checkpoint(root_of(tmp_path / "stopped"), step=4)
    assert [name for name in checkpoint.tensors if name.startswith("model.")] == [
        "model.lora_A.default.weight",
        "model.other.weight",
    ]
    assert "optimizer.state.lora_A.default.weight.exp_avg" in checkpoint.tensors
    fresh = Adapted()
    fresh.base.load_state_dict({"weight": initial["base.weight"], "bias": initial["base.bias"]})
    resumed = made(tmp_path / "stopped", model=fresh, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(resumed.model.lora_A["default"].weight, whole.model.lora_A["default"].weight)


class Described(torch.nn.Linear):
    """A model with `save_pretrained`, as far as it is called."""

    def __init__(self) -> None:
        super().__init__(4, 2)

    def save_pretrained(self, folder: Path, state_dict: object = None) -> None:
        assert state_dict == {}, "the weights come from the step"
        Path(folder, "config.json").write_text("{}")


def test_each_kept_step_has_a_folder_of_save_pretrained(tmp_path: Path) -> None:
    trainer = made(tmp_path, model=Described(), options={"save_hf": True}, max_steps=6, save_total_limit=2)
    trainer.train()
    assert steps_in(tmp_path) == [4, 6] and tags_in(tmp_path) == {}
    folders = sorted(path.name for path in (tmp_path / "_hf").glob("checkpoint-*"))
    assert folders == ["checkpoint-4", "checkpoint-6"]
    exported = holdfast.open_checkpoint(tmp_path / "_hf" / "checkpoint-6").read("model.weight", framework="torch")
    assert torch.equal(exported, trainer.model.weight)
    assert (tmp_path / "_hf" / "checkpoint-6" / "config.json").is_file()


@pytest.mark.parametrize(("mode", "file_mode", "folder_mode"), ((None, 0o644, 0o755), (0o600, 0o600, 0o700)))
def test_all_files_of_a_model_folder_have_the_mode_of_the_run(
    tmp_path: Path, mode: int | None, file_mode: int, folder_mode: int
) -> None:
    with umask(0o022):
        # The second training has no setting.
        for number, settings in enumerate((replace(SETTINGS, file_mode=mode), SETTINGS), start=1):
            options = {"save_hf": True, "settings": settings}
            trainer = made(tmp_path, model=Described(), options=options, max_steps=2 * number)
            trainer.train(resume_from_checkpoint=number > 1)
    for step in (2, 4):
        folder = tmp_path / "_hf" / f"checkpoint-{step}"
        assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
        require_modes(folder, file_mode, folder_mode)


def test_a_folder_that_a_kill_prevented_is_made_by_the_next_training(tmp_path: Path) -> None:
    made(tmp_path, model=Described(), max_steps=6).train()
    holdfast.api.tag(root_of(tmp_path), 2, "hf-2")  # as the save of a training that was killed before the export
    # Step 6 is that of a training that was killed before the tag.
    made(tmp_path, model=Described(), options={"save_hf": True}, max_steps=8).train(resume_from_checkpoint=True)
    folders = sorted(path.name for path in (tmp_path / "_hf").glob("checkpoint-*"))
    assert folders == ["checkpoint-2", "checkpoint-6", "checkpoint-8"] and tags_in(tmp_path) == {}


def test_a_model_folder_of_another_training_stays(tmp_path: Path) -> None:
    made(tmp_path, model=Described(), options={"save_hf": True, "root": str(tmp_path / "one")}).train()
    options = {"save_hf": True, "root": str(tmp_path / "other")}
    made(tmp_path, model=Described(), options=options, max_steps=3, save_steps=1, save_total_limit=1).train()
    folders = sorted(path.name for path in (tmp_path / "_hf").glob("checkpoint-*"))
    assert folders == ["checkpoint-3", "checkpoint-4"], "of the other training, step 3 alone is kept"


def folders_of(tmp_path: Path, complete: Complete) -> ModelFolders:
    made(tmp_path).train()
    holdfast.api.tag(root_of(tmp_path), 4, "hf-4")
    root, parent = str(root_of(tmp_path)), tmp_path / "_hf"
    return ModelFolders(root, parent, complete, lambda: [2, 4], weights=True, settings=SETTINGS)


def test_the_end_waits_for_the_folder_of_a_save_in_flight(tmp_path: Path) -> None:
    folders, committed = folders_of(tmp_path, lambda folder, step: None), Future[holdfast.api.SaveReport]()
    folders.make_when_committed(4, committed)
    end = threading.Thread(target=folders.finish)
    end.start()
    assert end.is_alive(), "the save has not ended"
    committed.set_result(None)  # type: ignore[arg-type]
    end.join()
    assert (tmp_path / "_hf" / "checkpoint-4").is_dir() and tags_in(tmp_path) == {}


def test_no_folder_appears_once_a_training_has_ended_by_an_error(tmp_path: Path) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def complete(folder: Path, step: int) -> None:
        begun.set()
        stopped.wait()

    folders = folders_of(tmp_path, complete)
    folders.make(4)
    begun.wait()
    folders.stop()
    stopped.set()
    folders.finish()
    assert not (tmp_path / "_hf" / "checkpoint-4").exists()
    assert tags_in(tmp_path) == {"hf-4": 4}, "the next training makes it"


def test_an_export_that_fails_is_raised_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = made(tmp_path, model=Described(), options={"save_hf": True})

    def block(step: int) -> None:
        if step == 3:
            assert trainer._holdfast is not None
            trainer._holdfast.settle()
            shutil.rmtree(tmp_path / "_hf")
            (tmp_path / "_hf").write_text("in the way")

    trainer.on_step = block
    with pytest.raises(UnavailableError, match=r"checkpoint-4: the model of step 4 was not exported.*step is saved"):
        trainer.train()
    assert steps_in(tmp_path) == [2, 4] and "the model of step 4 was not exported" in caplog.text


def test_what_is_pushed_is_the_export(tmp_path: Path) -> None:
    trainer = made(tmp_path, model=Described(), push_to_hub=True)
    trainer.train()
    folder, step, files = trainer.pushed[-1]
    assert (Path(folder).name, step, files) == ("checkpoint-4", 4, ["config.json", "model.safetensors"])
    assert trainer.state.global_step == 4
    with pytest.raises(InvalidError, match=r"hub_strategy='all_checkpoints'.*expected 'every_save' or 'end'"):
        made(tmp_path / "all", push_to_hub=True, hub_strategy="all_checkpoints")


def test_the_just_in_time_checkpoint_of_a_saved_step_is_no_second_save(tmp_path: Path) -> None:
    trainer = made(tmp_path)

    def again(step: int) -> None:
        if step == 3:
            trainer.state.global_step = 2
            (tmp_path / "checkpoint-2").mkdir()
            trainer._save_checkpoint(trainer.model, None)
            trainer.state.global_step = 3
            trainer._save_checkpoint(trainer.model, None)
            (tmp_path / "checkpoint-3").mkdir()

    trainer.on_step = again
    trainer.args.max_steps = 3
    trainer.train()
    assert steps_in(tmp_path) == [2, 3]
    assert not (tmp_path / "checkpoint-3").exists(), "a plain Trainer would resume from the empty folder"


def test_a_second_try_with_a_smaller_batch_supersedes_the_first(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    tries = []

    def run_out_once(step: int) -> None:
        tries.append(step)
        if tries.count(3) == 1 and step == 3:
            raise MemoryError

    trainer.on_step = run_out_once
    loop = trainer._inner_training_loop

    def twice(*arguments: Any, **keywords: Any) -> Any:
        try:
            return loop(*arguments, **keywords)
        except MemoryError:
            return loop(*arguments, **keywords)

    trainer._inner_training_loop = twice  # type: ignore[method-assign]
    trainer.train()
    assert tries == [1, 2, 3, 1, 2, 3, 4] and steps_in(tmp_path) == [2, 4]


def test_saving_outside_of_a_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="saves only while it trains"):
        made(tmp_path)._save_checkpoint(None, None)


def test_what_is_not_covered_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="save_on_each_node=True"):
        made(tmp_path, save_on_each_node=True)

    class Engine(RecordedTrainer):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.is_deepspeed_enabled = True

    class EngineTrainer(HoldfastMixin, Engine):
        pass

    with pytest.raises(InvalidError, match="DeepSpeed engine"):
        EngineTrainer(args=RecordedArguments(str(tmp_path)))


def test_the_order_of_the_classes_is_checked() -> None:
    with pytest.raises(InvalidError, match=r"expected class Wrong\(HoldfastMixin, RecordedTrainer\)"):

        class Wrong(RecordedTrainer, HoldfastMixin):
            pass


def test_a_missing_or_untested_framework_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.22.0")
    with pytest.raises(InvalidError, match=r"transformers 5\.22\.0 is outside the tested range"):
        made(tmp_path)

    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(InvalidError, match=r"pip install 'holdfast\[transformers\]'"):
        made(tmp_path)
