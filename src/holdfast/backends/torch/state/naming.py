"""FQNs of a module's tensors: without wrapper prefixes, unique, and valid as a key in a pack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.backends.torch.fsdp1 import state_entries
from holdfast.backends.torch.private_layout import EXTRA_STATE, WRAPPER_SEGMENTS
from holdfast.errors import InvalidError


def require_fqn(fqn: str) -> None:
    """Refuse names that cannot be a key in a pack.

    Raises:
        InvalidError: The name is empty, reserved, or not valid Unicode.
    """
    if not fqn or fqn == "__metadata__" or "\0" in fqn:
        raise InvalidError(
            f"{fqn!r} cannot be the name of a tensor: it is empty or reserved; rename the key of the state"
        )
    if fqn.isascii():
        return
    try:
        fqn.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidError(f"{fqn!r} cannot be the name of a tensor: it is not valid Unicode; rename it") from error


def module_entries(module: torch.nn.Module, path: str) -> dict[str, tuple[str, object]]:
    """Return key and value of each entry of a module's state dict, by its name without wrapper prefixes.

    Tensors are the module's own objects (parameters, buffers, DTensors), so that filling them fills the module.
    The call of `state_dict` makes FSDP2 reshard its parameters first.
    """
    prefixes = _ddp_prefixes(module)
    entries: dict[str, tuple[str, object]] = {}
    for key, value in state_entries(module).items():
        fqn = _without_prefixes(key, prefixes)
        if fqn in entries:
            raise InvalidError(
                f"{path}: {entries[fqn][0]} and {key} are both {fqn} without wrapper prefixes; rename one"
            )
        entries[fqn] = key, value
    return entries


def metric_paths(module: torch.nn.Module) -> list[str]:
    """Return the names of the metrics in a module, without wrapper prefixes; empty text for the module itself."""
    return list(named_metrics(module))


def named_metrics(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the metrics in a module by name, without wrapper prefixes; empty text for the module itself."""
    prefixes = _ddp_prefixes(module)
    named = ((name, child) for name, child in module.named_modules() if is_metric(child))
    return {_without_prefixes(f"{name}.", prefixes)[:-1]: child for name, child in named}


def is_metric(value: object) -> bool:
    """Return whether an object is a metric of torchmetrics, torcheval or ignite: each has a base class `Metric`."""
    return any(kind.__name__ == "Metric" for kind in type(value).__mro__)


def is_extra_state(fqn: str) -> bool:
    """Return whether a name is that of what `get_extra_state` of a module returns."""
    return fqn.rpartition(".")[2] == EXTRA_STATE


def extra_state_owners(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules with `set_extra_state`, by the FQN of their extra state."""
    owners = {}
    for name, child in module.named_modules():
        if type(child).set_extra_state is not torch.nn.Module.set_extra_state:
            prefix = _unwrapped(name)
            owners[f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE] = child
    return owners


def _ddp_prefixes(module: torch.nn.Module) -> list[str]:
    wrapped = [_unwrapped(name) for name, child in module.named_modules() if isinstance(child, DistributedDataParallel)]
    return sorted((f"{name}.module." if name else "module." for name in wrapped), key=len, reverse=True)


def _without_prefixes(key: str, prefixes: Sequence[str]) -> str:
    fqn = _unwrapped(key)
    for prefix in prefixes:
        if fqn.startswith(prefix):
            fqn = prefix.removesuffix("module.") + fqn.removeprefix(prefix)
    return fqn


def _unwrapped(name: str) -> str:
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)
