"""What a step of Trainer holds: which objects, under which keys, and Trainer's own record of the training."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

import holdfast
from holdfast.errors import InvalidError
from holdfast.integrations.host import MARK
from holdfast.integrations.transformers.framework import HOST, is_first_rank, on_first_rank

logger = logging.getLogger(__name__)

RECORD = "trainer"
"""Key of Trainer's own record: `state` and `arguments` as JSON texts, `parts`, and `best_step`."""


_SPEEDS = ("_runtime", "_per_second")
"""Ends of the names of numbers that say nothing about the model."""


def state_to_save(trainer: Any, best_step: int | None) -> dict[str, object]:
    """Return the state of a training between two optimizer steps. Every rank calls.

    Args:
        trainer: The trainer.
        best_step: The saved step with the best metric so far.
    Raises:
        InvalidError: The state of a callback is no JSON.
    """
    parts = ["model"] if trainer.args.save_only_model else list(_objects(trainer))
    state_text, arguments_text = on_first_rank(lambda: (_state_text(trainer), trainer.args.to_json_string()))
    record = {"state": state_text, "arguments": arguments_text, "parts": parts, "best_step": best_step}
    objects = _objects(trainer)
    return {**{part: objects[part] for part in parts}, RECORD: record, MARK: HOST.mark()}


def state_to_fill(trainer: Any, record: Mapping[str, Any], url: str) -> dict[str, object]:
    """Return the state that a load fills: the parts that the step holds and the trainer has.

    Args:
        trainer: The trainer.
        record: Trainer's record in the step.
        url: The step, for messages.
    """
    objects = _objects(trainer)
    stored = record["parts"]
    absent = [part for part in objects if part not in stored]
    unused = [part for part in stored if part not in objects]
    if absent and is_first_rank():
        logger.warning("%s does not hold %s; they begin anew", url, ", ".join(absent))
    if unused and is_first_rank():
        logger.warning("%s holds %s, which this training has not; they are left out", url, ", ".join(unused))
    return {**{part: objects[part] for part in objects if part in stored}, RECORD: {}, MARK: {}}


def model_to_keep(trainer: Any) -> object:
    """Return the model, or of a model with adapters of peft the tensors that belong to them or are trained, by name."""
    model = trainer.model
    adapters = set(getattr(model, "peft_config", None) or ())
    if not adapters:
        return model
    groups = trainer.optimizer.param_groups
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    return {
        name.replace("_orig_mod.", ""): tensor
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.requires_grad or id(tensor) in stepped or not adapters.isdisjoint(name.split("."))
    }


def has_adapters(model: Any) -> bool:
    """Return whether a model has adapters of peft, so that its base is not saved."""
    return bool(getattr(model, "peft_config", None))


def metrics_at(state: Any) -> dict[str, float]:
    """Return the numbers that Trainer logged at the current step, by name; without how fast it was."""
    metrics: dict[str, float] = {}
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            break
        for name, value in entry.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name != "step" and not name.endswith(_SPEEDS) and _is_metric_name(name):
                metrics.setdefault(name, value)
    return metrics


def _is_metric_name(name: str) -> bool:
    """Return whether a step may have a metric of this name; a script logs under any."""
    return 0 < len(name) <= 200 and name.isprintable() and not name.startswith("$")


def _objects(trainer: Any) -> dict[str, object]:
    """Return what Trainer saves beside its record, by key."""
    objects: dict[str, object] = {
        "model": model_to_keep(trainer),
        "optimizer": trainer.optimizer,
        "scheduler": trainer.lr_scheduler,
        "rng": holdfast.RngState(),
    }
    scaler = getattr(trainer.accelerator, "scaler", None)
    return objects if scaler is None else {**objects, "scaler": scaler}


def _state_text(trainer: Any) -> str:
    """Return what Trainer would write as `trainer_state.json`."""
    # Trainer appends to a list that it began with the training, so of two callbacks of one class it would restore the
    # first states.
    states: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if hasattr(type(callback), "from_state"):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    trainer.state.stateful_callbacks = {name: each if len(each) > 1 else each[0] for name, each in states.items()}
    # Not `asdict`, nor indented: both are slow in a long history, and training waits.
    fields = {field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)}
    try:
        return json.dumps(fields)
    except TypeError as error:
        raise InvalidError(
            f"TrainerState: {error}; expected numbers, texts, lists and dicts in log_history and in what state() of "
            f"{', '.join(sorted(states))} returns. Return plain values there"
        ) from error
