"""Modules without their wrappers: DDP and `torch.compile`."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.backends.torch.private_layout import COMPILED, original_of


def unwrapped(module: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Return the module inside DDP and compile wrappers, and their prefix in the keys of its state dict."""
    prefix = ""
    while True:
        if isinstance(module, DistributedDataParallel):
            module, prefix = module.module, f"{prefix}module."
        elif (inner := original_of(module)) is not None:
            module, prefix = inner, f"{prefix}{COMPILED}."
        else:
            return module, prefix
