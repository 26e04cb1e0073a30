"""FQNs: stable under wrappers, unique, and fit to be a key of a pack."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.fsdp1 import state_entries

_WRAPPER_SEGMENTS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile, activation checkpointing and FSDP1 put into names; no user gives such names."""


def require_fqn(fqn: str) -> None:
    """Refuse names that a pack cannot carry as a key.

    Raises:
        InvalidError: Empty, reserved, or not text.
    """
    if not fqn or fqn == "__metadata__" or "\0" in fqn:
        raise InvalidError(f"{fqn!r} cannot be the name of a tensor; rename the key of the state")
    if fqn.isascii():
        return
    try:
        fqn.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidError(f"{fqn!r} cannot be the name of a tensor: it is not valid Unicode; rename it") from error


def module_entries(module: torch.nn.Module, path: str) -> Iterator[tuple[str, str, object]]:
    """Yield the entries of a module's state dict: name without wrapper prefixes, key in the state dict, value.

    Tensors are the module's own objects (parameters, buffers, DTensors), so that filling them fills the module.
    Calling `state_dict` lets FSDP2 bring its parameters back to their sharded form first.
    """
    inner_ddp = [_unwrapped(name) for name, each in module.named_modules() if isinstance(each, DistributedDataParallel)]
    prefixes = sorted((f"{name}.module." if name else "module." for name in inner_ddp), key=len, reverse=True)
    seen: dict[str, str] = {}
    for key, value in state_entries(module).items():
        fqn = _unwrapped(key)
        for prefix in prefixes:
            if fqn.startswith(prefix):
                fqn = prefix.removesuffix("module.") + fqn.removeprefix(prefix)
        if fqn in seen:
            raise InvalidError(
                f"{path}: {seen[fqn]} and {key} both become {fqn} once wrapper prefixes are stripped; rename one"
            )
        seen[fqn] = key
        yield fqn, key, value


def extra_state_owners(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that take extra state, by the FQN of its entry."""
    owners = {}
    for name, each in module.named_modules():
        if type(each).set_extra_state is not torch.nn.Module.set_extra_state:
            prefix = _unwrapped(name)
            owners[f"{prefix}._extra_state" if prefix else "_extra_state"] = each
    return owners


def _unwrapped(name: str) -> str:
    for segment in _WRAPPER_SEGMENTS:
        name = name.replace(segment, "")
        if name == segment[:-1] or name.endswith("." + segment[:-1]):
            name = name[: -len(segment)] if name != segment[:-1] else ""
    return name
