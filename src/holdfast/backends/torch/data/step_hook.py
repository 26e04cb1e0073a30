"""Reports every optimizer step to the positions of data that move with it.

The hook is torch's global one, after each step of any optimizer. It stays, because its removal would recompile compiled
steps, and returns at once where no position listens.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener(Protocol):
    """A position that moves with optimizer steps."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step that any optimizer has taken."""
        ...


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def listen(listener: Listener) -> None:
    """Report every later optimizer step to a listener, as long as it lives."""
    _hook_every_step()
    _listeners.add(listener)


def _report(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for listener in list(_listeners):
        listener.optimizer_stepped(optimizer)


@cache
def _hook_every_step() -> None:
    # torch.compile must not trace the positions. Disabled only here, since this call imports the compiler.
    register_optimizer_step_post_hook(torch.compiler.disable(_report))  # type: ignore[no-untyped-call]
