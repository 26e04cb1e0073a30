"""The nodes of a state: found once, used by collecting and by restoring alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.containers import holds_tensor
from holdfast.frameworks.torch.held import tensors_of
from holdfast.frameworks.torch.naming import module_entries
from holdfast.frameworks.torch.optimizers import OptimizerView, named_parameters_of
from holdfast.spec.per_rank import PerRank, RngState
from holdfast.spec.sharded import Sharded


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state as a dict and takes it back."""

    def state_dict(self) -> dict[str, object]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take a state back."""
        ...


@dataclass(slots=True)
class ModuleNode:
    """A module: tensors by FQN, and values such as extra state."""

    path: str
    module: torch.nn.Module
    tensors: dict[str, torch.Tensor]
    values: dict[str, object]


@dataclass(slots=True)
class OptimizerNode:
    """An optimizer whose parameters have names."""

    path: str
    view: OptimizerView


@dataclass(slots=True)
class StatefulNode:
    """An object with `state_dict` and `load_state_dict`."""

    path: str
    stateful: Stateful


@dataclass(slots=True)
class TensorNode:
    """A tensor that stands in a dict of the state."""

    path: str
    tensor: torch.Tensor
    declared: Sharded | None = None


@dataclass(slots=True)
class ValueNode:
    """Anything else: a plain value or a container, tensors inside included."""

    path: str
    value: object


@dataclass(slots=True)
class DictNode:
    """A dict of the state with string keys."""

    path: str
    mapping: Mapping[str, object]
    children: dict[str, Node] = field(default_factory=dict)


Node = ModuleNode | OptimizerNode | StatefulNode | TensorNode | ValueNode | DictNode


def walk(state: Mapping[str, object]) -> DictNode:
    """Return the nodes of a state.

    Raises:
        InvalidError: Names collide, an optimizer's parameter has no name, or the state is not a dict of names.
    """
    root = DictNode("", state)
    optimizers: list[tuple[DictNode, str, torch.optim.Optimizer]] = []
    modules: dict[str, ModuleNode] = {}
    loose: dict[str, torch.Tensor] = {}
    declared: dict[int, Sharded] = {}
    _fill(root, optimizers, modules, loose, declared, set())
    for parent, key, optimizer in optimizers:
        path = _joined(parent.path, key)
        names = named_parameters_of(optimizer, path, {each: node.tensors for each, node in modules.items()}, loose)
        parent.children[key] = OptimizerNode(path, OptimizerView(optimizer, path, names, declared))
    return root


def _fill(
    node: DictNode,
    optimizers: list[tuple[DictNode, str, torch.optim.Optimizer]],
    modules: dict[str, ModuleNode],
    loose: dict[str, torch.Tensor],
    declared: dict[int, Sharded],
    above: set[int],
) -> None:
    if id(node.mapping) in above:
        raise InvalidError(f"{node.path}: the dict holds itself; a state must be a tree")
    for key, value in node.mapping.items():
        if not isinstance(key, str):
            raise InvalidError(
                f"{node.path or 'state'}: key {key!r} is {type(key).__name__}; expected names (str) for whatever "
                "holds modules, optimizers or tensors"
            )
        path = _joined(node.path, key)
        if isinstance(value, torch.optim.Optimizer):
            optimizers.append((node, key, value))
            # Keeps the order of the dict: the node is put in once every parameter has its name.
            node.children[key] = ValueNode(path, None)
        elif isinstance(value, torch.nn.Module):
            modules[path] = module_node(path, value)
            node.children[key] = modules[path]
        elif isinstance(value, torch.Tensor):
            loose[path] = value
            node.children[key] = TensorNode(path, value)
        elif isinstance(value, Sharded):
            tensor = tensors_of(value, path)[0]
            loose[path] = tensor
            declared[id(tensor)] = value
            node.children[key] = TensorNode(path, tensor, value)
        elif isinstance(value, dict) and _is_branch(value):
            child = DictNode(path, value)
            _fill(child, optimizers, modules, loose, declared, above | {id(node.mapping)})
            node.children[key] = child
        elif not isinstance(value, type) and isinstance(value, Stateful):
            node.children[key] = StatefulNode(path, value)
        else:
            node.children[key] = ValueNode(path, value)


def module_node(path: str, module: torch.nn.Module) -> ModuleNode:
    """Return a module's entries; DDP and compile wrappers around it leave no trace.

    Raises:
        InvalidError: FSDP1, which is not supported yet, or colliding names.
    """
    for name, each in module.named_modules():
        if type(each).__name__ == "FullyShardedDataParallel":
            raise InvalidError(
                f"{_joined(path, name)}: FullyShardedDataParallel (FSDP1) is not supported yet; use fully_shard (FSDP2)"
            )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, object] = {}
    for fqn, value in module_entries(module, path):
        if isinstance(value, torch.Tensor):
            tensors[fqn] = value
        else:
            values[fqn] = value
    return ModuleNode(path, unwrapped(module), tensors, values)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP and compile wrappers, whose `load_state_dict` knows names without prefixes."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), torch.nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _is_branch(value: dict[object, object]) -> bool:
    """Return whether a dict is part of the state's own tree rather than one plain value."""
    if not all(isinstance(key, str) for key in value):
        return False
    return any(
        isinstance(each, torch.Tensor | torch.nn.Module | torch.optim.Optimizer | Sharded | PerRank | RngState)
        or (isinstance(each, dict) and _is_branch(each))
        or (isinstance(each, list | tuple) and holds_tensor(each))
        or (not isinstance(each, type) and isinstance(each, Stateful))
        for each in value.values()
    )


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
