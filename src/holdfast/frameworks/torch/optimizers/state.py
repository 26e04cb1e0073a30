"""Optimizer state by FQN, over `optimizer.state` and `param_groups` alone.

PyTorch's own state-dict helpers run `optimizer.step()` on an unstepped optimizer, fail on partly filled state
and let one group's learning rate win when groups differ; so none of them is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.containers import small_tensor, take_apart
from holdfast.frameworks.torch.held import declared_like
from holdfast.geometry.sharded import Sharded
from holdfast.types.values import Group, Value


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """An optimizer and the FQNs of its parameters."""

    optimizer: torch.optim.Optimizer
    """The optimizer."""

    path: str
    """Where it stands in the state."""

    names: Mapping[torch.Tensor, str]
    """FQN by parameter, in the order of the groups."""

    declared: Mapping[int, Sharded]
    """Layouts stated by hand or read off FSDP1, by the identity of the local tensor."""

    elsewhere: frozenset[int] = frozenset()
    """Parameters of which FSDP1 left this rank nothing, by identity: their state is other ranks' alone."""

    ties: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied parameters, and the name each goes by here."""

    def declared_for(self, parameter: torch.Tensor, state: torch.Tensor) -> Sharded | None:
        """Return the layout that a parameter's declaration gives a tensor of its state, or None."""
        declared = self.declared.get(id(parameter))
        return None if declared is None else declared_like(declared, state)

    def local_shape(self, parameter: torch.Tensor, global_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a state tensor of `global_shape` has in this process's hands."""
        declared = self.declared.get(id(parameter))
        if declared is not None and tuple(declared.global_shape) == global_shape and global_shape:
            return tuple(parameter.shape)
        return global_shape

    def state_fqn(self, name: str, key: str) -> str:
        """Return the FQN of one entry of a parameter's state."""
        return f"{self.path}.state.{name}.{key}"


def named_parameters_of(
    optimizer: torch.optim.Optimizer,
    path: str,
    modules: Mapping[str, Mapping[str, torch.Tensor]],
    loose: Mapping[str, tuple[str, torch.Tensor]],
) -> dict[torch.Tensor, str]:
    """Return the FQN of every parameter of an optimizer.

    Names are those inside the module; with parameters of several modules each is led by its module's path. Tensors
    that stand in a dict of the state are named as if that dict were the module: `{"model": {"w": …}}` holds `w`.

    Args:
        optimizer: The optimizer.
        path: Where it stands in the state.
        modules: By path, the tensors of each module of the state by FQN.
        loose: Tensors that stand in the state by themselves, by path: each with the key of the state under which
            its dict stands, which is empty for one that stands at the top.
    Raises:
        InvalidError: A parameter belongs to nothing in the state.
    """
    known: dict[int, tuple[str, str]] = {}
    for loose_path, (branch, each) in loose.items():
        known[id(each)] = (branch, loose_path.removeprefix(f"{branch}.") if branch else loose_path)
    for module_path, tensors in modules.items():
        for fqn, tensor in tensors.items():
            known.setdefault(id(tensor), (module_path, fqn))
    found: dict[torch.Tensor, tuple[str, str]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise InvalidError(
                    f"{path}: parameter {at} of group {number}, shape {tuple(parameter.shape)}, belongs to no module "
                    "of the state, so it has no name. Pass the module in the same call (only= can leave it out)"
                )
            found[parameter] = known[id(parameter)]
    owners = {module_path for module_path, _ in found.values()}
    if len(owners) == 1:
        return {parameter: fqn for parameter, (_, fqn) in found.items()}
    return {parameter: f"{owner}.{fqn}" if owner else fqn for parameter, (owner, fqn) in found.items()}


def ties_of(names: Mapping[torch.Tensor, str], modules: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, str]:
    """Return the further names that an optimizer's parameters have in their modules, and the name of each.

    State is stored under all names of its parameter, as the parameter is: one copy may hold an embedding and a head
    as one tensor, and another, cut into pipeline stages, as two.
    """
    known = {id(parameter): name for parameter, name in names.items()}
    ties: dict[str, str] = {}
    for tensors in modules.values():
        first: dict[int, str] = {}
        for fqn, tensor in tensors.items():
            name = known.get(id(tensor))
            main = first.setdefault(id(tensor), fqn)
            if name is not None and fqn != main and name.endswith(main):
                ties[name.removesuffix(main) + fqn] = name
    return ties


OnState = Callable[[str, torch.Tensor, Sharded | None], Value]
"""Called for each tensor of the state: its FQN, itself, and the layout stated by hand for it, if any."""


def collect_optimizer(view: OptimizerView, on_state: OnState) -> Group:
    """Return the non-tensor part of an optimizer, calling `on_state` for every tensor of its state.

    Hyperparameters go by FQN; equal ones are kept once under a key made of their content, so that what
    several ranks hold joins without renumbering. A state nobody made yet stays absent.

    Raises:
        InvalidError: Something in it has no place in a checkpoint.
    """
    hyperparameters: dict[str, Value] = {}
    members: dict[str, Value] = {}
    state: dict[str, Value] = {}
    known = set(view.names)
    further = _by_name(view.ties)
    for key in view.optimizer.state:
        if key not in known:
            raise InvalidError(
                f"{view.path}: state under {str(key)[:80]!r} belongs to no parameter of its groups; "
                "expected state by parameter only"
            )
    for group in view.optimizer.param_groups:
        values = {
            name: take_apart(value, f"{view.path}.param_groups.{name}", small_tensor)
            for name, value in group.items()
            if name != "params"
        }
        content = hashlib.blake2b(repr(values).encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
        hyperparameters[content] = values
        for parameter in group["params"]:
            name = view.names[parameter]
            for each in (name, *further.get(name, ())):
                members[each] = content
                kept = _collect_state(view, each, parameter, on_state)
                if kept:
                    state[each] = kept
    return Group("optimizer", {"hyperparameters": hyperparameters, "param_groups": members, "state": state})


def _by_name(ties: Mapping[str, str]) -> dict[str, list[str]]:
    further: dict[str, list[str]] = {}
    for each, name in ties.items():
        further.setdefault(name, []).append(each)
    return further


def _collect_state(view: OptimizerView, name: str, parameter: torch.Tensor, on_state: OnState) -> dict[str, Value]:
    """Return what a parameter's state holds besides tensors that stand in it directly."""
    kept: dict[str, Value] = {}

    def on_tensor(fqn: str, tensor: torch.Tensor) -> Value:
        return on_state(fqn, tensor, view.declared_for(parameter, tensor))

    if id(parameter) in view.elsewhere:
        return kept
    for key, value in view.optimizer.state.get(parameter, {}).items():
        if not isinstance(key, str) or "." in key:
            raise InvalidError(f"{view.path}.state.{name}: key {key!r}; expected a name without dots")
        neutral = take_apart(value, view.state_fqn(name, key), on_tensor)
        if not isinstance(value, torch.Tensor):
            kept[key] = neutral
    return kept


def new_state_tensor(
    parameter: torch.Tensor, group: Mapping[str, object], key: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return room for a state tensor that the optimizer has not made yet.

    What it holds is whatever the memory held: all of it is filled before the optimizer gets it, and zeroing a gigabyte
    first takes longer than to read it. A tensor shaped like the parameter lies as the parameter does. One of another
    shape is what `new_empty` of the parameter makes, as in Adafactor: of a DTensor a replicated one. A step count lies
    in host memory unless the group is capturable or fused, everything else where the parameter does, as in
    `Optimizer.load_state_dict`.
    """
    counts_steps = key == "step" and not shape
    if tuple(parameter.shape) == shape and not counts_steps:
        return torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    if shape and isinstance(parameter, DTensor):
        return parameter.detach().new_empty(shape, dtype=dtype)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    on_host = counts_steps and not group.get("capturable") and not group.get("fused")
    return torch.empty(shape, dtype=dtype, device="cpu" if on_host else local.device)
