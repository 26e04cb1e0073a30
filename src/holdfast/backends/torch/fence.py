"""The fence of lazy saves: training waits here before it changes a tensor that is still to be copied.

Two kinds of hooks wait: torch's global hook of every optimizer step, and `load_state_dict` hooks on the modules and
optimizers of a lazy save. They are never removed, because that would recompile compiled steps. Without a lazy save they
return at once.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.backends.torch.private_layout import has_backward_hooks, hooks_before_loading
from holdfast.backends.torch.wrappers import unwrapped

_settling: dict[int, Callable[[], None]] = {}
"""Functions that wait for one save's copies, by identity. No lock, so that a signal handler may save or step at any
time: each access is one atomic operation of the dict."""


def steps_in_backward(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether parameters have hooks that run during backward, as optimizers that step in backward set.

    Such a hook may change a parameter without an optimizer step, so the fence does not see it.
    """
    return any(map(has_backward_hooks, parameters))


def close_fence(objects: Iterable[torch.nn.Module | torch.optim.Optimizer], settle: Callable[[], None]) -> None:
    """Call `settle` before any optimizer steps or any of these objects is loaded, until one call has returned."""
    _hook_every_step()
    for fenced in objects:
        _hook_loading(fenced)
    _settling[id(settle)] = settle


def wait_for_all_copies() -> None:
    """Wait until no lazy save reads from any state."""
    for key, settle in list(_settling.items()):
        settle()
        _settling.pop(key, None)


class _Hook:
    """Waits, whatever its arguments. A single object: copies of a module share it."""

    def __init__(self) -> None:
        self.settle: Callable[[], None] = wait_for_all_copies

    def __call__(self, *_: object) -> None:
        if _settling:
            self.settle()

    def __copy__(self) -> _Hook:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> _Hook:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # A pickled module must load without Holdfast. The hook comes back as the class `operator.itemgetter`: part of
        # the standard library, callable with any arguments, without effect.
        return type, (operator.itemgetter(0),)


_HOOK = _Hook()


@cache
def _hook_every_step() -> None:
    # torch.compile must not trace the wait. Disabled only here, since this call imports the compiler.
    _HOOK.settle = torch.compiler.disable(wait_for_all_copies)  # type: ignore[no-untyped-call]
    handle = register_optimizer_step_pre_hook(_HOOK)
    hooks = handle.hooks_dict_ref()
    if hooks is not None:
        # First of all hooks: the user's hooks may change parameters.
        hooks.move_to_end(handle.id, last=False)


def is_of_fence(hook: object) -> bool:
    """Return whether a hook of `load_state_dict` is the fence's own."""
    return hook is _HOOK


def _hook_loading(fenced: torch.nn.Module | torch.optim.Optimizer) -> None:
    if _hook_once(fenced) and isinstance(fenced, torch.nn.Module):
        # `load_state_dict` of a submodule runs the hooks of that submodule only.
        for part in (*fenced.modules(), *unwrapped(fenced)[0].modules()):
            _hook_once(part)


def _hook_once(fenced: torch.nn.Module | torch.optim.Optimizer) -> bool:
    """Add the hook to an object without it; return whether it was added."""
    hooks = hooks_before_loading(fenced)
    if hooks is None or any(map(is_of_fence, hooks)):
        # An optimizer that wraps another has no hooks, but calls load_state_dict of the inner one.
        return False
    try:
        fenced.register_load_state_dict_pre_hook(_HOOK)
    except RuntimeError:
        return False  # A ScriptModule takes no hooks. Addresses and version counters reveal a load of it.
    return True


os.register_at_fork(after_in_child=_settling.clear)
"""A forked child has no copies to wait for: the copying threads exist in the parent only."""
