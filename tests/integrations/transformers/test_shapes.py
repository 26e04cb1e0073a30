"""The recorded shape of Trainer, compared with the real one."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

transformers = pytest.importorskip("transformers")

from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl  # noqa: E402

from holdfast.integrations.transformers import HoldfastMixin  # noqa: E402
from holdfast.integrations.transformers.framework import HOST  # noqa: E402
from tests.unit.integrations.recorded_trainer import (  # noqa: E402
    RecordedArguments,
    RecordedControl,
    RecordedHandler,
    RecordedState,
    RecordedTrainer,
)

OURS = {"train_one_step", "__init__"}
"""Methods of the recorded trainer that stand for a part of a longer method of the real one."""


def methods_of(kind: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(value) for name, value in vars(kind).items() if inspect.isfunction(value)}


def test_the_installed_version_is_a_tested_one() -> None:
    assert HOST.require() == transformers.__version__


def test_every_recorded_method_is_one_of_trainer_with_the_same_arguments() -> None:
    real = methods_of(transformers.Trainer)
    for name, recorded in methods_of(RecordedTrainer).items():
        if name not in OURS:
            assert list(recorded.parameters) == list(real[name].parameters), name


def test_every_replaced_method_is_recorded() -> None:
    replaced = methods_of(HoldfastMixin).keys() & methods_of(transformers.Trainer).keys()
    assert replaced <= methods_of(RecordedTrainer).keys()
    assert "_save_checkpoint" in replaced and "_load_best_model" in replaced


def test_every_recorded_field_is_one_of_the_real_state_and_arguments() -> None:
    for recorded, real in (
        (RecordedState, transformers.TrainerState),
        (RecordedArguments, transformers.TrainingArguments),
    ):
        names = {field.name for field in dataclasses.fields(real)}
        assert {field.name for field in dataclasses.fields(recorded)} <= names
    assert callable(transformers.TrainingArguments.to_json_string)


def test_callbacks_with_a_state_are_those_with_from_state() -> None:
    assert issubclass(TrainerControl, ExportableState) and hasattr(ExportableState, "from_state")
    assert not hasattr(transformers.TrainerCallback, "from_state")
    assert methods_of(RecordedControl).keys() <= set(dir(TrainerControl))
    assert "callbacks" in inspect.signature(CallbackHandler).parameters
    assert list(inspect.signature(RecordedHandler).parameters) == ["callbacks"]
