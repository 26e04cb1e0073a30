"""Entries of a module's state dict that its own hooks and methods make, and that only they can load again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from holdfast.backends.torch.fence import is_of_fence
from holdfast.backends.torch.private_layout import (
    EXTRA_STATE,
    has_entry,
    hooks_before_loading,
    is_wrapper,
    loads_in_code,
)
from holdfast.backends.torch.state.naming import extra_state_owners
from holdfast.backends.torch.state.walk import ModuleNode
from holdfast.backends.torch.wrappers import unwrapped
from holdfast.errors import InvalidError, first_three


def require_loadable(node: ModuleNode, fqns: Sequence[str]) -> None:
    """Refuse to save entries that a load of the same module would refuse: nothing in it loads them.

    Args:
        node: The module.
        fqns: Names of the entries that are neither parameters nor buffers.
    Raises:
        InvalidError: Names the entries.
    """
    if not fqns:
        return
    if any(map(is_wrapper, node.module.modules())):
        loaded = extra_state_owners(node.module)
        lost = [fqn for fqn in fqns if fqn not in loaded]
        advice = "FSDP1 gathers parameters in the hooks that would; use fully_shard (FSDP2)"
    else:
        # Hooks of a module run only if its own load_state_dict is called, not that of a wrapper around it.
        module, prefix = unwrapped(node.module)
        if _overrides(module, "load_state_dict"):
            return
        modules = dict(module.named_modules(remove_duplicate=False))
        lost = [fqn for fqn in fqns if not _is_loaded(node.keys[fqn].removeprefix(prefix), modules)]
        advice = "Use get_extra_state and set_extra_state"
    if lost:
        raise InvalidError(
            f"{node.path}: state_dict() of {type(node.module).__name__} makes {first_three(lost)}, which no hook or "
            f"method of it loads again, so a load would be refused; expected both. {advice}, or leave it out with skip="
        )


def _is_loaded(key: str, modules: Mapping[str, torch.nn.Module]) -> bool:
    """Return whether a module's own code may load an entry of its state dict: that of its owner or of one above it."""
    ends = [at for at, letter in enumerate(key) if letter == "."]
    above = [path for path in ("", *(key[:at] for at in ends)) if path in modules]
    owner, name = modules[above[-1]], key.removeprefix(f"{above[-1]}.") if above[-1] else key
    if has_entry(owner, name):
        return True
    if name == EXTRA_STATE and _overrides(owner, "set_extra_state"):
        return True
    return any(
        loads_in_code(module) or not all(map(is_of_fence, hooks_before_loading(module) or ()))
        for module in map(modules.__getitem__, above)
    )


def _overrides(module: torch.nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(torch.nn.Module, method)


def own_loading(node: ModuleNode, fqn: str) -> str:
    """Return what a message says of a tensor of another shape, if the module has code that may take it; else nothing.

    A load fills parameters and buffers in place, and calls no code that could make a tensor of another shape.
    """
    module, _ = unwrapped(node.module)
    if _overrides(module, "load_state_dict"):
        return f" ({type(module).__name__}.load_state_dict is not called: a load fills tensors in place)"
    with suppress(AttributeError):  # A key that is no path of modules.
        owner = node.module.get_submodule(node.keys[fqn].rpartition(".")[0])
        if loads_in_code(owner) and not type(owner).__module__.startswith("torch.nn."):
            name = f"{type(owner).__name__}._load_from_state_dict"
            return f" ({name} is not called: a load fills tensors in place)"
    return ""


def load_extra_entries(node: ModuleNode, entries: dict[str, object]) -> None:
    """Pass a module the entries that only its own hooks and methods can load.

    Raises:
        InvalidError: They raise, or none of them takes an entry.
    """
    left: Sequence[str] = ()
    try:
        if any(map(is_wrapper, node.module.modules())):
            # Not by `load_state_dict`, whose FSDP1 hooks would gather parameters.
            owners = extra_state_owners(node.module)
            for fqn, value in entries.items():
                if fqn not in owners:
                    raise InvalidError(
                        f"{fqn}: was made by a state-dict hook inside {type(node.module).__name__}, which cannot load "
                        "it under FSDP1; leave it out with skip=, or use fully_shard (FSDP2)"
                    )
                owners[fqn].set_extra_state(value)
        else:
            # Hooks of a module run only if its own load_state_dict is called, not that of a wrapper around it.
            module, prefix = unwrapped(node.module)
            keys = {node.keys[fqn].removeprefix(prefix): value for fqn, value in entries.items()}
            left = getattr(module.load_state_dict(keys, strict=False), "unexpected_keys", ())
            if left:
                # Some modules (8-bit layers of bitsandbytes) look at an entry only beside their own parameters.
                keys |= _beside(left, node, prefix)
                left = getattr(module.load_state_dict(keys, strict=False), "unexpected_keys", ())
    except Exception as error:
        raise InvalidError(f"{node.path}: {type(node.module).__name__} refused its extra state: {error}") from error
    if left:
        raise InvalidError(
            f"{node.path}: {type(node.module).__name__} took nothing of {first_three(left)}, which state_dict() made; "
            "expected its load_state_dict() to load what state_dict() returns at the same depth. Use "
            "get_extra_state/set_extra_state, or leave it out with skip="
        )


def _beside(keys: Sequence[str], node: ModuleNode, prefix: str) -> dict[str, object]:
    """Return the tensors, filled already, of the modules that own some keys of a state dict, by key."""
    owners = {key.rpartition(".")[0] for key in keys}
    tensors = {node.keys[fqn].removeprefix(prefix): tensor.detach() for fqn, tensor in node.tensors.items()}
    return {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] in owners and key not in keys}
