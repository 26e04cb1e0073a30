"""The fence of lazy saves: what trains waits here before it changes what is still being copied.

One hook for every optimizer's step, torch's own global one, and hooks on the modules and optimizers that are saved
lazily, for `load_state_dict`. They stay: adding and removing them would have compiled steps compiled anew. With no save
under way they return at once.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.frameworks.torch.wrappers import unwrapped

_settling: dict[int, Callable[[], None]] = {}
"""By identity, what waits for one save's copies. Without a lock, so that a signal handler may save or step at any time:
each use is one operation of the dict."""


def steps_in_backward(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether parameters have hooks that run in the midst of backward, as optimizers that step there set.

    Such a hook may write to a parameter without an optimizer's step that the fence could see.
    """
    return any(getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters)


class FencedObjects:
    """The modules and optimizers of one state."""

    def __init__(self) -> None:
        self._objects: list[torch.nn.Module | torch.optim.Optimizer] = []

    def add(self, fenced: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Add one."""
        self._objects.append(fenced)

    def close(self, settle: Callable[[], None]) -> None:
        """Have `settle` run before any optimizer steps and any of these is loaded, until it has run to its end once."""
        _hook_every_step()
        for each in self._objects:
            _hook_loading(each)
        _settling[id(settle)] = settle


def wait_for_all_copies() -> None:
    """Wait until nothing more is read from any state."""
    for key, settle in list(_settling.items()):
        settle()
        _settling.pop(key, None)


class _Hook:
    """Settles, whatever it is called with; one object, which copies and pickles of a module do not multiply."""

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
        # A module that is pickled whole must load where Holdfast is not installed: what comes back does nothing,
        # whatever it is called with.
        return type, (operator.itemgetter(0),)


_HOOK = _Hook()


@cache
def _hook_every_step() -> None:
    # A compiled step is not to trace the waiting, nor what tells of changes. Only now, since it loads the compiler.
    _HOOK.settle = torch.compiler.disable(wait_for_all_copies)  # type: ignore[no-untyped-call]
    handle = register_optimizer_step_pre_hook(_HOOK)
    hooks = handle.hooks_dict_ref()
    if hooks is not None:
        # Before the user's own, which may change parameters.
        hooks.move_to_end(handle.id, last=False)


def _hook_loading(each: torch.nn.Module | torch.optim.Optimizer) -> None:
    if isinstance(each, torch.optim.Optimizer):
        _hook_once(each, getattr(each, "_optimizer_load_state_dict_pre_hooks", None))
        return
    if _hook_once(each, each._load_state_dict_pre_hooks):
        # `load_state_dict` of a part, or of what a wrapper holds, asks the hooks of that part alone.
        for part in (*each.modules(), *unwrapped(each)[0].modules()):
            _hook_once(part, part._load_state_dict_pre_hooks)


def _hook_once(each: torch.nn.Module | torch.optim.Optimizer, hooks: Mapping[int, object] | None) -> bool:
    """Hook an object that has no such hook yet; return whether it was."""
    if hooks is None or any(getattr(hook, "hook", hook) is _HOOK for hook in hooks.values()):
        # An optimizer that wraps another has no hooks of its own, but passes the loading on.
        return False
    try:
        each.register_load_state_dict_pre_hook(_HOOK)
    except RuntimeError:
        return False  # A ScriptModule takes none. Addresses and counters tell when it was loaded.
    return True


os.register_at_fork(after_in_child=_settling.clear)
"""In a child nothing is under way: the threads that copy are its parent's, and so is the memory they read."""
