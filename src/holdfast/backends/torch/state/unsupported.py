"""Refuses objects that keep their state where this room does not find it: by class name, without importing them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.backends.torch.optimizers.members import directly_inside
from holdfast.errors import InvalidError

_KEPT_INSIDE = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")
"""Optimizers of torch whose state is in an optimizer inside them, split over ranks by whole parameters."""

_OF_DEEPSPEED = {"DeepSpeedEngine": "engine", "DeepSpeedOptimizer": "optimizer"}
"""Base classes of DeepSpeed that split or replace the state of the module and the optimizer they were made of."""


def require_supported(value: object, path: str) -> None:
    """Refuse an object whose state cannot be read or filled by parameter.

    Raises:
        InvalidError: Names the class and what to pass instead.
    """
    if isinstance(value, torch.optim.Optimizer):
        _require_made(value, path)
    for kind in type(value).__mro__:
        if kind.__name__ in _KEPT_INSIDE:
            raise InvalidError(
                f"{path}: {kind.__name__} keeps its state in an optimizer inside it; expected state by parameter. Use "
                "fully_shard, or pass the optimizer inside it"
            )
        if kind.__name__ in _OF_DEEPSPEED:
            raise InvalidError(
                f"{path}: {type(value).__name__} is DeepSpeed's {_OF_DEEPSPEED[kind.__name__]}, which keeps state "
                f"that Holdfast does not see; expected a module and a torch optimizer. {_ADVICE}"
            )


def _require_made(optimizer: torch.optim.Optimizer, path: str) -> None:
    """Refuse an optimizer without the attributes by which its state is found, as of a class that skips the base class.

    Raises:
        InvalidError: Names the class, the attribute, and what to pass instead.
    """
    holds_others = any(True for _ in directly_inside(optimizer))
    for name in ("param_groups",) if holds_others else ("param_groups", "state"):
        try:
            getattr(optimizer, name)
        except Exception as error:
            kind = type(optimizer).__name__
            raise InvalidError(
                f"{path}: {kind}.{name} raised {type(error).__name__}: {error}; expected what Optimizer.__init__ of "
                f"torch makes. Call super().__init__ in {kind}, or pass the optimizers inside it one by one, in a dict"
            ) from error


def require_whole(tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Refuse parameters that DeepSpeed's ZeRO-3 splits: they have the shape [0] and no elements on any rank.

    Raises:
        InvalidError: Names the first such parameter.
    """
    for fqn, tensor in tensors.items():
        if hasattr(tensor, "ds_id"):
            name = f"{path}.{fqn}" if path else fqn
            raise InvalidError(
                f"{name}: DeepSpeed's ZeRO-3 holds this parameter (it has a ds_id), here with shape "
                f"{tuple(tensor.shape)}; expected a parameter that holds its elements. {_ADVICE}"
            )


_ADVICE = (
    "Save with engine.save_checkpoint(), which holdfast.load and holdfast.import_checkpoint read; or train with "
    "fully_shard"
)
