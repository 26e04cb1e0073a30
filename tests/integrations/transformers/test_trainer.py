"""Trainer with `HoldfastMixin`, for real, on one process: what its options leave and load."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")

import transformers.trainer as trainer_module  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

import holdfast  # noqa: E402
from tests.integrations.transformers.training import HoldfastTrainer, arguments, examples, small_llama  # noqa: E402

SETTINGS = holdfast.Settings(collect_grace_seconds=0)


class StopAt(TrainerCallback):
    """Ends a training as a kill between two steps would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def small_mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return MixtralForCausalLM(config)


def made(
    folder: Path,
    model: torch.nn.Module | None = None,
    *,
    steps: int = 4,
    every: int = 2,
    callbacks: list[Any] | None = None,
    evaluates: bool = False,
    save_hf: bool = False,
    background: bool = True,
    **options: Any,
) -> HoldfastTrainer:
    if evaluates:
        options |= {"eval_strategy": "steps", "eval_steps": every, "metric_for_best_model": "loss"}
    return HoldfastTrainer(
        model or small_llama(),
        arguments(folder, steps=steps, every=every, **options),
        train_dataset=examples(),
        eval_dataset=examples()[:4] if evaluates else None,
        callbacks=callbacks,
        settings=SETTINGS,
        save_hf=save_hf,
        background=background,
    )


def stopped(folder: Path, step: int, model: torch.nn.Module | None = None, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        made(folder, model, callbacks=[StopAt(step), *options.pop("callbacks", [])], **options).train()


def steps_in(folder: Path) -> list[int]:
    return [record.step for record in holdfast.api.list_steps(folder / "_holdfast").steps if record.committed]


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_stopped_training_ends_like_one_that_was_not(tmp_path: Path, accumulated: int) -> None:
    options = {"steps": 6, "gradient_accumulation_steps": accumulated}
    whole = made(tmp_path / "whole", **options)
    whole.train()
    stopped(tmp_path / "stopped", 5, **options)
    resumed = made(tmp_path / "stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    plain = Trainer(
        small_llama(),
        arguments(tmp_path / "plain", every=2, **options),
        train_dataset=examples(),
    )
    plain.train()
    assert same(resumed.model, whole.model) and same(resumed.model, plain.model)
    assert resumed.state.log_history[:-1] == whole.state.log_history[:-1], "the history goes on where it was"


def test_a_callback_finds_the_step_that_was_not_saved_in_the_background(tmp_path: Path) -> None:
    found: dict[int, list[int]] = {}

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            found[state.global_step] = steps_in(tmp_path)

    made(tmp_path, callbacks=[Look()], background=False).train()
    assert found == {2: [2], 4: [2, 4]}


def test_a_training_that_ends_in_a_later_epoch_resumes_there(tmp_path: Path) -> None:
    options = {"steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16, "every": 4}
    whole = made(tmp_path / "whole", **options)
    whole.train()
    assert whole.state.global_step == 12
    stopped(tmp_path / "stopped", 9, **options)
    resumed = made(tmp_path / "stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    assert same(resumed.model, whole.model) and steps_in(tmp_path / "stopped") == [4, 8, 12]


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("build", [small_llama, small_mixtral])
def test_the_exported_folder_has_the_logits_of_the_model(tmp_path: Path, build: Any) -> None:
    trainer = made(tmp_path, build(), save_hf=True, save_total_limit=1)
    trainer.train()
    assert [path.name for path in (tmp_path / "_hf").iterdir()] == ["checkpoint-4"]
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "_hf" / "checkpoint-4", output_loading_info=True)
    rows = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(trainer.model.eval()(rows).logits, loaded.eval()(rows).logits)
    assert not any(info.values()), info
    trainer.model.save_pretrained(tmp_path / "plain", save_original_format=False)
    assert names_in(tmp_path / "_hf" / "checkpoint-4") == names_in(tmp_path / "plain")
    assert {"config.json", "generation_config.json"} <= set(os.listdir(tmp_path / "_hf" / "checkpoint-4"))


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    patience = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = made(
        tmp_path,
        steps=40,
        evaluates=True,
        callbacks=[patience],
        load_best_model_at_end=True,
        save_total_limit=1,
        greater_is_better=True,  # the loss falls, so that the first step is the best
    )
    trainer.train()
    assert trainer.state.global_step == 6 and steps_in(tmp_path) == [2, 6]
    best = holdfast.read(tmp_path / "_holdfast", step="best", only="model")["model"]
    assert all(torch.equal(tensor, best[name]) for name, tensor in trainer.model.named_parameters())
    assert trainer.state.best_model_checkpoint == str(tmp_path / "_holdfast" / "step-000000000002")


def test_callbacks_get_their_states_back(tmp_path: Path) -> None:
    options = {"steps": 12, "evaluates": True, "load_best_model_at_end": True, "greater_is_better": True}
    stopped(tmp_path, 5, callbacks=[EarlyStoppingCallback(early_stopping_patience=3)], **options)
    resumed = made(
        tmp_path,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        restore_callback_states_from_checkpoint=True,
        **options,
    )
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8, "one evaluation without a better metric was before the stop"


def test_a_plain_trainer_takes_nothing_of_ours_for_its_own(tmp_path: Path) -> None:
    made(tmp_path, save_hf=True).train()
    assert get_last_checkpoint(tmp_path) is None
    plain = Trainer(small_llama(), arguments(tmp_path, steps=6, every=3, save_total_limit=1), train_dataset=examples())
    plain.train()
    assert steps_in(tmp_path) == [2, 4], "its rotation removes none of our steps"
    with pytest.raises(holdfast.ConflictError, match="checkpoint-6: Trainer saved this without Holdfast, after step 4"):
        made(tmp_path).train(resume_from_checkpoint=True)


def test_a_folder_of_a_plain_trainer_is_resumed(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", steps=6)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        Trainer(
            small_llama(),
            arguments(tmp_path / "moved", steps=6, every=2),
            train_dataset=examples(),
            callbacks=[StopAt(5)],
        ).train()
    resumed = made(tmp_path / "moved", steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert same(resumed.model, whole.model) and steps_in(tmp_path / "moved") == [6]
    assert (tmp_path / "moved" / "checkpoint-4").is_dir()


def test_sigterm_saves_once_more_and_ends(tmp_path: Path) -> None:
    class Terminate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            if state.global_step == 3:
                signal.raise_signal(signal.SIGTERM)
                # What its timer would do after three seconds.
                manager = trainer.callback_handler.callbacks[jit].jit_manager
                manager.is_checkpoint_requested = True

    before = signal.getsignal(signal.SIGTERM)
    trainer = made(tmp_path / "ended", steps=20, every=10, enable_jit_checkpoint=True, callbacks=[Terminate()])
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    jit = names.index("JITCheckpointCallback")
    trainer.train()
    assert signal.getsignal(signal.SIGTERM) is before
    # Trainer ends with the step that it has begun, after the checkpoint.
    assert steps_in(tmp_path / "ended") == [3] and trainer.state.global_step == 4
    assert sorted(os.listdir(tmp_path / "ended")) == ["_holdfast"], "no empty folder checkpoint-3"
    resumed = made(tmp_path / "ended", steps=6, every=10)
    resumed.train(resume_from_checkpoint=True)
    whole = made(tmp_path / "whole", steps=6, every=10)
    whole.train()
    assert same(resumed.model, whole.model)


def test_the_model_alone_is_resumed_with_a_fresh_optimizer(tmp_path: Path) -> None:
    made(tmp_path, save_only_model=True).train()
    trainer = made(tmp_path, steps=6)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


def test_a_model_of_its_own_class_is_saved_and_exported(tmp_path: Path) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small_llama()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return self.model(input_ids=input_ids, labels=labels)

    trainer = made(tmp_path, Own(), save_hf=True)
    trainer.train()
    assert sorted(os.listdir(tmp_path / "_hf" / "checkpoint-4")) == ["model.safetensors"]


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], lora_dropout=0.1)
    torch.manual_seed(3)
    return peft.get_peft_model(small_llama(), config)


def test_lora_saves_what_is_trained_and_resumes(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", adapted(), steps=6)
    whole.train()
    stopped(tmp_path / "stopped", 5, adapted(), steps=6)
    checkpoint = holdfast.open_checkpoint(tmp_path / "stopped" / "_holdfast", step=4)
    stored = [name for name in checkpoint.tensors if name.startswith("model.")]
    assert stored and all("lora_" in name or "modules_to_save" in name for name in stored)
    resumed = made(tmp_path / "stopped", adapted(), steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert same(resumed.model, whole.model)


def test_the_export_of_an_adapter_is_a_folder_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = made(tmp_path, adapted(), save_hf=True, evaluates=True, load_best_model_at_end=True)
    trainer.train()
    folder = tmp_path / "_hf" / "checkpoint-4"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(folder))
    loaded = peft.PeftModel.from_pretrained(small_llama(), folder).eval()
    rows = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(trainer.model.eval()(rows).logits, loaded(rows).logits)


class Hub:
    """The calls of `HfApi` that Trainer makes, with what it would upload."""

    def __init__(self) -> None:
        self.uploads: list[tuple[str, set[str]]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path: str, commit_message: str, ignore_patterns: Any = (), **options: Any) -> Any:
        from concurrent.futures import Future

        from huggingface_hub.utils import filter_repo_objects

        files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        self.uploads.append((commit_message, set(filter_repo_objects(files, ignore_patterns=list(ignore_patterns)))))
        done: Future[str] = Future()
        done.set_result("pushed")
        return done if options.get("run_as_future") else "pushed"


def test_the_model_is_pushed_and_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr(trainer_module, "hf_api", lambda: hub)
    trainer = made(tmp_path, push_to_hub=True)
    monkeypatch.setattr(trainer, "create_model_card", lambda **options: None)
    trainer.train()
    trainer.push_to_hub()
    message, files = hub.uploads[-2]
    assert message == "Training in progress, step 4"
    assert {"config.json", "model.safetensors"} <= files
    for _, pushed in hub.uploads:
        assert not any(name.startswith("_") for name in pushed)
    state = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in trainer.model.state_dict().items())


def test_what_a_step_holds_is_read_without_trainer(tmp_path: Path) -> None:
    made(tmp_path, evaluates=True).train()
    content = holdfast.read(tmp_path / "_holdfast", step="latest")
    other = small_llama()
    other.load_state_dict(content["model"])
    record: Any = content["trainer"]
    assert json.loads(record["state"])["global_step"] == 4
    assert json.loads(record["arguments"])["max_steps"] == 4
    assert "eval_loss" in holdfast.open_checkpoint(tmp_path / "_holdfast", step=4).manifest.metrics
