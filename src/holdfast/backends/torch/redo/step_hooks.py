"""The hooks and the step of an optimizer, as torch builds them: `Optimizer.profile_hook_step`, since 2.6."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


def put_hook(handle: RemovableHandle, *, last: bool) -> None:
    """Move a hook to the end or the front of those that it was registered among: torch calls them in their order."""
    hooks = handle.hooks_dict_ref()
    assert hooks is not None, "the optimizer is alive"
    hooks.move_to_end(handle.id, last=last)


def is_at_end(handle: RemovableHandle, *, last: bool) -> bool:
    """Return whether a hook is where `put_hook` put it."""
    hooks = handle.hooks_dict_ref() or {}
    return next(reversed(hooks) if last else iter(hooks), None) == handle.id


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """Return the step of an optimizer's class, without hooks and profiling, schedulers and scalers.

    torch replaces the step of the class by a wrapper, with the attribute `hooked`.
    """
    step: Any = type(optimizer).step
    bare: Callable[[torch.optim.Optimizer], object] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare


def has_compiled_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step of an optimizer was replaced by a compiled one, also below the wrapper of a scheduler."""
    step: Any = vars(optimizer).get("step", type(optimizer).step)
    while step is not None and not hasattr(step, "get_compiler_config"):
        step = getattr(step, "__func__", None) or getattr(step, "__wrapped__", None)
    return step is not None
