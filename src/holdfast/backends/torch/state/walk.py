"""Walks a state and returns its nodes, for `collect.py` and `restore.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from holdfast.backends.torch.containers import holds_tensor
from holdfast.backends.torch.fsdp1 import declarations, holds_any
from holdfast.backends.torch.local_shards import RankOfGlobal, coordinates_of, tensors_of
from holdfast.backends.torch.optimizers.members import OptimizerMembers
from holdfast.backends.torch.optimizers.names import StateNames, named_parameters_of, ties_of
from holdfast.backends.torch.optimizers.state import OptimizerView
from holdfast.backends.torch.state.naming import module_entries
from holdfast.backends.torch.state.unsupported import require_supported, require_whole
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.types.per_rank import PerRank, RngState
from holdfast.errors import InvalidError


@runtime_checkable
class Stateful(Protocol):
    """Any object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, object]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Load a state."""
        ...


@dataclass(slots=True)
class ModuleNode:
    """A module: tensors by FQN, and values such as extra state."""

    path: str
    module: torch.nn.Module
    tensors: dict[str, torch.Tensor]
    values: dict[str, object]
    keys: dict[str, str]
    """Key of each entry in the module's own state dict, with wrapper prefixes, by FQN."""

    declared: dict[int, Sharded]
    """Layouts of tensors that carry none themselves (FSDP1), by identity."""


@dataclass(slots=True)
class StatefulNode:
    """An object with `state_dict` and `load_state_dict`."""

    path: str
    stateful: Stateful


@dataclass(slots=True)
class TensorNode:
    """A tensor in a dict of the state."""

    path: str
    tensor: torch.Tensor
    declared: Sharded | None = None


@dataclass(slots=True)
class ValueNode:
    """Anything else: a plain value, or a container that may hold tensors."""

    path: str
    value: object


@dataclass(slots=True)
class DictNode:
    """A dict of the state with string keys; or a list or tuple that holds objects, as a dict of its items by number."""

    path: str
    mapping: Mapping[str, object]
    children: dict[str, Node] = field(default_factory=dict)
    sequence: list[object] | tuple[object, ...] | None = None
    """The list or tuple that stands here in the state; `mapping` is then a copy of it, by number."""


Node = ModuleNode | OptimizerView | StatefulNode | TensorNode | ValueNode | DictNode


def walk(state: Mapping[str, object], rank_of_global: RankOfGlobal) -> DictNode:
    """Return the nodes of a state.

    Args:
        state: The state.
        rank_of_global: Returns the rank in the saving or loading group for a global rank.
    Raises:
        InvalidError: Names collide, an optimizer's parameter has no name, or the state is not a dict of names.
    """
    root = DictNode("", state)
    known = _NamedNodes(rank_of_global)
    _fill(root, known, {id(state)})
    if not known.optimizers:
        return root
    names_of_state = StateNames(known.module_objects, known.modules, dict(_loose(root)), known.declared)
    for parent, key, optimizer in known.optimizers:
        known.locate(optimizer, _joined(parent.path, key))
    for parent, key, optimizer in known.optimizers:
        path = _joined(parent.path, key)
        _require_unlisted(optimizer, path, known.listed)
        names, parts, owner = named_parameters_of(optimizer, path, names_of_state)
        ties = ties_of(names, names_of_state)
        members, elsewhere = OptimizerMembers(optimizer), frozenset(known.elsewhere)
        parent.children[key] = OptimizerView(
            optimizer, path, names, known.declared, members, elsewhere, ties, parts, owner
        )
    return root


def _require_unlisted(optimizer: torch.optim.Optimizer, path: str, listed: Mapping[int, str]) -> None:
    """Refuse a parameter that shares its name with others: the layout of its state is not known."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in listed:
                raise InvalidError(
                    f"{path}: holds a tensor of {listed[id(parameter)]}, which Sharded declares as a list; expected "
                    "one tensor for each parameter of an optimizer. Pass its moments as Sharded too, and leave it out"
                )


@dataclass(slots=True)
class _NamedNodes:
    """What optimizer nodes need to know of the other nodes."""

    rank_of_global: RankOfGlobal
    optimizers: list[tuple[DictNode, str, torch.optim.Optimizer]] = field(default_factory=list)
    modules: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors by FQN of each module, by the module's path."""
    module_objects: dict[str, torch.nn.Module] = field(default_factory=dict)
    declared: dict[int, Sharded] = field(default_factory=dict)
    elsewhere: set[int] = field(default_factory=set)
    listed: dict[int, str] = field(default_factory=dict)
    """Path of the declaration that lists a tensor among several, by the tensor's identity."""

    def locate(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        """Take note of the parameters that carry their coordinates: most of their state carries none itself."""
        where = f"{path}: a parameter"
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            located = None if id(parameter) in self.declared else coordinates_of(parameter, where)
            if located is not None:
                self.declared[id(parameter)] = located
                self.elsewhere |= {id(parameter)} if located.is_empty else set()


def leaves(node: DictNode) -> Iterator[Node]:
    """Yield every node below a dict at any depth, except dicts."""
    for child in node.children.values():
        if isinstance(child, DictNode):
            yield from leaves(child)
        else:
            yield child


def _loose(node: DictNode, branch: str = "") -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield identity of every tensor in a dict, its top-level key (empty at the top), and its name below that key."""
    for key, child in node.children.items():
        if isinstance(child, TensorNode):
            yield id(child.tensor), (branch, child.path.removeprefix(f"{branch}.") if branch else child.path)
        elif isinstance(child, DictNode):
            yield from _loose(child, branch or key)


def _fill(node: DictNode, known: _NamedNodes, above: set[int]) -> None:
    """Make the nodes below a dict.

    Args:
        node: The dict; gets its children.
        known: Gets what optimizers need to know.
        above: Identities of the containers around the children, the dict's own included.
    """
    prefix = f"{node.path}." if node.path else ""
    for key, value in node.mapping.items():
        if not isinstance(key, str):
            raise InvalidError(
                f"{node.path or 'state'}: key {key!r} is {type(key).__name__}; expected str for dicts that "
                "hold modules, optimizers or tensors. Rename it"
            )
        path = f"{prefix}{key}" if prefix else key
        if isinstance(value, torch.Tensor):  # First, since most are.
            if type(value) is torch.nn.Parameter:
                require_whole({key: value}, node.path)
            node.children[key] = TensorNode(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            require_supported(value, path)
            known.optimizers.append((node, key, value))
            # A placeholder that keeps the order of the dict, until every parameter has its name.
            node.children[key] = ValueNode(path, None)
        elif isinstance(value, torch.nn.Module):
            require_supported(value, path)
            child = _module_node(path, value, known.rank_of_global)
            known.modules[path], known.module_objects[path] = child.tensors, value
            known.declared |= child.declared
            known.elsewhere |= {identity for identity, shard in child.declared.items() if not holds_any(shard)}
            node.children[key] = child
        elif isinstance(value, Sharded):
            tensors = tensors_of(value, path)
            tensor = tensors[0]
            if isinstance(value.tensor, list | tuple):
                known.listed |= dict.fromkeys(map(id, tensors), path)
            known.declared[id(tensor)] = value
            node.children[key] = TensorNode(path, tensor, value)
        elif (branch := _branch_of(path, value)) is not None:
            if id(value) in above:
                raise InvalidError(
                    f"{path}: the {type(value).__name__} contains itself; expected a tree. Remove the cycle"
                )
            _fill(branch, known, above | {id(value)})
            node.children[key] = branch
        elif not isinstance(value, type) and isinstance(value, Stateful):
            require_supported(value, path)
            node.children[key] = StatefulNode(path, value)
        else:
            node.children[key] = ValueNode(path, value)


def _module_node(path: str, module: torch.nn.Module, rank_of_global: RankOfGlobal) -> ModuleNode:
    """Return a module's entries, without the prefixes of DDP, FSDP1 and compile wrappers.

    Raises:
        InvalidError: Two entries have one name, an FSDP1 wrapper keeps parameters without names, or DeepSpeed splits
            them.
    """
    declared = declarations(module, path, rank_of_global)
    entries = module_entries(module, path)
    tensors = {fqn: value for fqn, (_, value) in entries.items() if isinstance(value, torch.Tensor)}
    require_whole(tensors, path)
    values = {fqn: value for fqn, (_, value) in entries.items() if fqn not in tensors}
    keys = {fqn: key for fqn, (key, _) in entries.items()}
    return ModuleNode(path, module, tensors, values, keys, declared)


def _branch_of(path: str, value: object) -> DictNode | None:
    """Return the node of a container that is part of the state's tree; None for a plain value."""
    if isinstance(value, dict) and _is_branch(value, set()):
        return DictNode(path, value)
    if (type(value) is list or type(value) is tuple) and _holds_object(value, set()):
        return DictNode(path, {str(number): item for number, item in enumerate(value)}, sequence=value)
    return None


def _is_branch(value: dict[object, object], seen: set[int]) -> bool:
    """Return whether a dict is part of the state's tree, not a plain value."""
    if id(value) in seen or not all(isinstance(key, str) for key in value):
        return False
    seen.add(id(value))
    return any(
        isinstance(entry, torch.Tensor | Sharded)
        or (isinstance(entry, list | tuple) and holds_tensor(entry))
        or (_is_branch(entry, seen) if isinstance(entry, dict) else _holds_object(entry, set()))
        for entry in value.values()
    )


_PLAIN = {int, float, str, bool, type(None), bytes, torch.Tensor, torch.nn.Parameter}
"""Types of most items of long lists. They are no objects of the state, and to ask a protocol about them is slow."""


def _holds_object(value: object, seen: set[int]) -> bool:
    """Return whether a value is or contains an object that is saved and filled by its own kind, not as a plain value.

    A list or tuple of tensors holds none: it is one value with references to its tensors. So is one of `Sharded`, which
    is refused later.
    """
    if type(value) in _PLAIN:
        return False
    if isinstance(value, dict):
        items: Iterable[object] = value.values() if all(isinstance(key, str) for key in value) else ()
    elif type(value) is list or type(value) is tuple:
        items = value
    elif isinstance(value, torch.nn.Module | torch.optim.Optimizer | PerRank | RngState):
        return True
    else:
        return not isinstance(value, type) and isinstance(value, Stateful)
    if id(value) in seen:
        return False
    seen.add(id(value))
    return not {*map(type, items)} <= _PLAIN and any(_holds_object(item, seen) for item in items)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
