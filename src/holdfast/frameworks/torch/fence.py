"""The fence of lazy saves: what trains waits here before it changes what is still being copied.

One hook for every optimizer's step, torch's own global one, and one on each module and optimizer that is saved lazily,
for `load_state_dict`. They stay: adding and removing hooks would have compiled steps compiled anew. With no save under
way they return at once.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_lock = threading.Lock()
_settling: dict[int, Callable[[], None]] = {}
_process = os.getpid()
_hooked: weakref.WeakSet[torch.nn.Module | torch.optim.Optimizer] = weakref.WeakSet()


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

    def close(self, settle: Callable[[], None]) -> Callable[[], None]:
        """Have `settle` run before any optimizer steps and any of these is loaded, until what is returned is called."""
        global _process
        _hook_every_step()
        for each in self._objects:
            if each not in _hooked:
                _hooked.add(each)
                each.register_load_state_dict_pre_hook(settle_all)
        with _lock:
            if _process != os.getpid():
                _settling.clear()
                _process = os.getpid()
            _settling[id(settle)] = settle

        def open_again() -> None:
            with _lock:
                # Kept alive by this closure, so that its id is nobody else's.
                _settling.pop(id(settle), None)

        return open_again


def settle_all(*_: object) -> None:
    """Wait until nothing more is read from any state; a hook, so that whatever it is called with is of no concern.

    In a forked child nothing is under way: the threads that copy are its parent's, and so is the memory they read.
    """
    if _settling and _process == os.getpid():
        for settle in list(_settling.values()):
            settle()


@cache
def _hook_every_step() -> None:
    register_optimizer_step_pre_hook(settle_all)
