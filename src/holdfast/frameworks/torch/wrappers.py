"""Modules without their wrappers: DDP and `torch.compile`."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel


def unwrapped(module: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Return the module inside DDP and compile wrappers, and their prefix in the keys of its state dict."""
    prefix = ""
    while True:
        if isinstance(module, DistributedDataParallel):
            module, prefix = module.module, f"{prefix}module."
        elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module, prefix = inner, f"{prefix}_orig_mod."
        else:
            return module, prefix
