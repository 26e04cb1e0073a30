"""Loads a training whose own folder has no step yet: from another run, torchtitan's DCP folder, or Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast import PerRank
from holdfast.api import Checkpoint
from holdfast.errors import InvalidError
from holdfast.integrations.host import mark_of
from holdfast.integrations.torchtitan.framework import HOST
from holdfast.integrations.torchtitan.model import TitanModel
from holdfast.settings import Settings

_DCP_STEP = re.compile(r"step-(\d+)")


def load_elsewhere(path: str, model: TitanModel, rest: Mapping[str, object], settings: Settings) -> None:
    """Fill a training from a checkpoint of Holdfast, or one that torchtitan's own CheckpointManager wrote.

    Args:
        path: The checkpoint, of any layout and number of ranks.
        model: The model; filled from other dtypes too.
        rest: Optimizers and everything else to fill, by key; empty for the model alone.
        settings: How to load.
    Raises:
        InvalidError: The checkpoint does not fit the training.
        MissingError: There is no checkpoint.
    """
    checkpoint = holdfast.open_checkpoint(path, settings=settings)
    if rest and mark_of(checkpoint) is not None:
        HOST.require_own(checkpoint)
    prefix, tensors, are_converted = _targets(checkpoint, model)
    holdfast.load(path, {"model": tensors} if prefix else dict(tensors), cast=True, settings=settings)
    if are_converted:
        model.load_state_dict(tensors)
    if not rest:
        return
    if mark_of(checkpoint) is None:
        # torchtitan keeps the positions of all ranks in one dict, and each loader looks up its own.
        rest = {key: value.value if isinstance(value, PerRank) else value for key, value in rest.items()}
    # The optimizer finds the names of its state by the parameters.
    named: dict[str, object] = {"model": model.tensors()} if prefix else dict(model.tensors())
    holdfast.load(path, {**named, **rest}, only=sorted(rest), settings=settings)


def load_hugging_face(path: str, model: TitanModel, adapter: Any, settings: Settings) -> None:
    """Fill the model from a folder of Hugging Face, read in place; torchtitan's adapter translates the names.

    Raises:
        InvalidError: The folder lacks tensors that the adapter asks for, or has them in other shapes.
        MissingError: There is no checkpoint.
    """
    if adapter is None:
        raise InvalidError(
            "initial_load_in_hf: torchtitan has no adapter between this model and Hugging Face; expected a model with "
            "a state_dict_adapter. Load a checkpoint of Holdfast or torchtitan"
        )
    wanted = adapter.to_hf(model.state_dict())
    report = holdfast.load(path, {"model": wanted}, cast=True, strict=False, settings=settings)
    if report.missing:
        raise InvalidError(
            f"{path}: lacks {', '.join(report.missing[:3])} ({len(report.missing)} tensors), which the model has; "
            "expected the weights of the same architecture. Choose another initial_load_path"
        )
    model.load_state_dict(adapter.from_hf(wanted))


def require_no_other_steps(folder: str) -> None:
    """Refuse to begin anew in a local folder that holds steps of torchtitan's own CheckpointManager.

    Behind a URL nothing is looked for: it would take torchtitan's client and its credentials beside ours.

    Raises:
        InvalidError: Names the newest of them, and how to go on from it.
    """
    if "://" in folder:
        return
    names = (path.parent.name for path in Path(folder).glob("step-*/.metadata"))
    steps = sorted(int(match[1]) for name in names if (match := _DCP_STEP.fullmatch(name)))
    if steps:
        newest = Path(folder, f"step-{steps[-1]}").absolute()
        raise InvalidError(
            f"{folder}: holds {len(steps)} steps that torchtitan's CheckpointManager saved, and none of Holdfast. "
            f"To go on from the newest, set initial_load_path={str(newest)!r} and initial_load_model_only=False. "
            "To begin anew, choose another folder"
        )


def _targets(checkpoint: Checkpoint, model: TitanModel) -> tuple[str, dict[str, torch.Tensor], bool]:
    """Return the prefix of the model's names in a checkpoint, the tensors to fill, and whether hooks made them.

    torchtitan saves what `state_dict()` returns, at the top; Holdfast saves the parameters, below `model`.
    """
    stored = {*checkpoint.tensors, *checkpoint.aliases}
    direct = model.tensors()
    for prefix in ("model.", ""):
        if all(f"{prefix}{name}" in stored for name in direct):
            return prefix, direct, False
    converted = model.state_dict()
    for prefix in ("model.", ""):
        if all(f"{prefix}{name}" in stored for name in converted):
            return prefix, converted, True
    missing = [name for name in converted if f"model.{name}" not in stored and name not in stored]
    raise InvalidError(
        f"{checkpoint.url}: lacks {', '.join(missing[:3]) or 'names'} ({len(missing)} tensors), which the model has; "
        "expected a checkpoint of the same model. For weights of Hugging Face, set initial_load_in_hf=True"
    )
