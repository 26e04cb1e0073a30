"""FQNs of an optimizer's parameters: those of the modules and dicts that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.optimizers.parts import ParameterPart, PartsByMemory
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError, first_three

Parts = dict[int, tuple[ParameterPart, ...]]
"""Parts of parameters, by the identity of the parameter."""


@dataclass(frozen=True)
class StateNames:
    """The names of the tensors in modules and dicts of a state.

    What all optimizers of a state need is found once: a state may have one optimizer for each parameter.
    """

    modules: Mapping[str, torch.nn.Module]
    """Modules by path."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    """Tensors by FQN in the state dict of each module, by the module's path."""

    loose: Mapping[int, tuple[str, str]]
    """Top-level key (empty at the top) and name below it of each tensor in dicts of the state, by identity."""

    declared: Mapping[int, Sharded]
    """Layouts declared by the user or read off FSDP1, by the identity of the local tensor."""

    @cached_property
    def known(self) -> Mapping[int, tuple[str, str]]:
        """First path and name below it of each tensor, by identity."""
        known = dict(self.loose)
        for module_path, tensors in self.tensors.items():
            for fqn, tensor in tensors.items():
                known.setdefault(id(tensor), (module_path, fqn))
        return known

    @cached_property
    def by_memory(self) -> PartsByMemory:
        """Finds the parts of parameters that modules store in parts."""
        return PartsByMemory(self.tensors)

    @cached_property
    def tied(self) -> Mapping[int, Sequence[Sequence[str]]]:
        """Of each tensor with several names in one module, by identity: these names, of each such module."""
        tied: dict[int, list[list[str]]] = {}
        for tensors in self.tensors.values():
            names: dict[int, list[str]] = {}
            for fqn, tensor in tensors.items():
                names.setdefault(id(tensor), []).append(fqn)
            for identity, fqns in names.items():
                if len(fqns) > 1:
                    tied.setdefault(identity, []).append(fqns)
        return tied


def named_parameters_of(
    optimizer: torch.optim.Optimizer, path: str, state: StateNames
) -> tuple[dict[torch.Tensor, str], Parts, str]:
    """Return the FQN of every parameter of an optimizer, the parts of those that a module stores in parts, and a path.

    The path is that of the module, if the names are relative to it; else empty.

    A name is the FQN inside the module. If the optimizer has parameters of several modules, the module's path precedes
    it. A dict of tensors counts as a module: in `{"model": {"w": …}}` the name is `w`.

    Args:
        optimizer: The optimizer.
        path: Its path in the state.
        state: The names of the state.
    Raises:
        InvalidError: A parameter is not in the state, or its module stores copies of it under other names.
    """
    names: dict[torch.Tensor, tuple[str, str]] = {}
    parts: Parts = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            named = state.known.get(id(parameter))
            if named is None:
                found = None if id(parameter) in state.declared else state.by_memory.parts_of(parameter)
                if found is None:
                    raise _unnamed(parameter, f"parameter {position} of group {number}", path, state)
                module_path, parts[id(parameter)] = found
                named = module_path, found[1][0].name
            names[parameter] = named
    owners = {module_path for module_path, _ in names.values()}
    if len(owners) == 1:
        return {parameter: fqn for parameter, (_, fqn) in names.items()}, parts, owners.pop()
    for parameter, (owner, _) in names.items():
        if id(parameter) in parts:
            parts[id(parameter)] = tuple(replace(part, name=f"{owner}.{part.name}") for part in parts[id(parameter)])
    whole = {parameter: f"{owner}.{fqn}" if owner else fqn for parameter, (owner, fqn) in names.items()}
    return whole, parts, ""


def _unnamed(parameter: torch.Tensor, position: str, path: str, state: StateNames) -> InvalidError:
    """Return the error for a parameter that no entry of the state is, or is a part of."""
    for module_path, module in state.modules.items():
        own = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        if id(parameter) in own:
            made = first_three(name for name, tensor in state.tensors[module_path].items() if id(tensor) not in own)
            sharded = isinstance(parameter, DTensor) or id(parameter) in state.declared
            why = "and the parameter is sharded" if sharded else "copies or other views than its parts"
            return InvalidError(
                f"{path}: {module_path}.{own[id(parameter)]} is not in the module's state_dict(), in which a hook or "
                f"method has {made or 'nothing'} instead, {why}; expected views that split the whole parameter, so "
                "that its state has the same names. Pass dict(module.named_parameters()) in place of the module, have "
                "the hook return views (chunk, split, narrow), or turn it off"
            )
    return InvalidError(
        f"{path}: {position}, shape {tuple(parameter.shape)}, belongs to no module of the state, so it has no name. "
        "Pass the module in the same call, or the tensor itself if no module has it (only= can leave it out)"
    )


def ties_of(names: Mapping[torch.Tensor, str], state: StateNames) -> dict[str, str]:
    """Return further names of an optimizer's parameters in their modules, each with the name that is used.

    State is stored under all names of its parameter. One job may hold embedding and head as one tied tensor; another,
    split into pipeline stages, as two.
    """
    ties: dict[str, str] = {}
    for parameter, name in names.items() if state.tied else ():
        for main, *others in state.tied.get(id(parameter), ()):
            if name.endswith(main):
                ties |= {name.removesuffix(main) + fqn: name for fqn in others}
    return ties
