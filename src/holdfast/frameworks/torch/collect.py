"""A state taken apart: shards with their bytes, and everything else as a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.containers import take_apart
from holdfast.frameworks.torch.naming import require_fqn
from holdfast.frameworks.torch.optimizers import collect_optimizer
from holdfast.frameworks.torch.tensors import (
    RankOfGlobal,
    TorchSource,
    dtype_name,
    held_box,
    layout_of,
    require_storable,
    storage_key,
)
from holdfast.frameworks.torch.walk import (
    DictNode,
    ModuleNode,
    Node,
    OptimizerNode,
    StatefulNode,
    TensorNode,
    ValueNode,
    walk,
)
from holdfast.ports.framework import Collected, LocalShard, Selection
from holdfast.spec.dtype import DTYPES
from holdfast.spec.tensor import Role, Shard, TensorSpec
from holdfast.spec.values import Group, Skipped, TensorRef, Value


def selected(selection: Selection, name: str) -> bool:
    """Return whether a name takes part: a pattern speaks of the names it matches and of all that stands under them."""
    names = [name, *(name[:at] for at, letter in enumerate(name) if letter == ".")]

    def spoken_of(patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(each, pattern) for pattern in patterns for each in names)

    return (selection.only is None or spoken_of(selection.only)) and not spoken_of(selection.skip)


def selected_whole(selection: Selection, path: str) -> bool:
    """Return whether something that is saved and loaded as one takes part, by its own name or by what is under it."""
    return selected(selection, f"{path}.")


def collect(state: Mapping[str, object], selection: Selection, rank_of_global: RankOfGlobal) -> Collected:
    """Take a state apart, touching nothing.

    Raises:
        InvalidError: Something in it cannot be saved; the message names its path, type and what to do.
    """
    collector = _Collector(selection, rank_of_global)
    tree = collector.dict_group(walk(state))
    return Collected(collector.shards, tree, collector.aliases, collector.skipped)


class _Collector:
    def __init__(self, selection: Selection, rank_of_global: RankOfGlobal) -> None:
        self._selection, self._rank_of_global = selection, rank_of_global
        self.shards: list[LocalShard] = []
        self.aliases: dict[str, str] = {}
        self.skipped: list[str] = []
        self._names: set[str] = set()
        self._stored: dict[tuple[object, ...], str] = {}

    def dict_group(self, node: DictNode) -> Group:
        items: dict[str, Value] = {}
        for key, child in node.children.items():
            value = self._node(child)
            if value is not None or isinstance(child, ValueNode):
                items[key] = value
        return Group("dict", {key: value for key, value in items.items() if not isinstance(value, Skipped)})

    def _node(self, node: Node) -> Value:
        """Return what of a node goes into the tree; None for a tensor, which the index lists."""
        match node:
            case DictNode():
                return self.dict_group(node)
            case TensorNode():
                self._tensor(node.path, node.tensor, _loose_role(node.tensor))
                return None
            case ModuleNode():
                return self._module(node)
            case OptimizerNode():
                return self._optimizer(node)
            case StatefulNode():
                if not selected_whole(self._selection, node.path):
                    self.skipped.append(node.path)
                    return Skipped(node.path)
                state = take_apart(node.stateful.state_dict(), node.path, self._reference)
                return Group("stateful", {"state": state})
            case ValueNode():
                return self._value(node.path, node.value)

    def _module(self, node: ModuleNode) -> Group:
        for fqn, tensor in node.tensors.items():
            role = Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.BUFFER
            self._tensor(f"{node.path}.{fqn}", tensor, role)
        values = {fqn: self._value(f"{node.path}.{fqn}", value) for fqn, value in node.values.items()}
        return Group("module", {fqn: value for fqn, value in values.items() if not isinstance(value, Skipped)})

    def _optimizer(self, node: OptimizerNode) -> Group:
        def on_state(fqn: str, tensor: torch.Tensor) -> Value:
            return TensorRef(fqn) if self._tensor(fqn, tensor, Role.OPTIMIZER) else Skipped(fqn)

        group = collect_optimizer(node.view, on_state)
        members = group.items["param_groups"]
        assert isinstance(members, dict)
        for name in [name for name in members if not self._takes_part(f"{node.path}.param_groups.{name}")]:
            del members[name]
        return group

    def _value(self, path: str, value: object) -> Value:
        if not self._takes_part(path):
            return Skipped(path)
        return take_apart(value, path, self._reference)

    def _takes_part(self, path: str) -> bool:
        if selected(self._selection, path):
            return True
        self.skipped.append(path)
        return False

    def _reference(self, fqn: str, tensor: torch.Tensor) -> Value:
        return TensorRef(fqn) if self._tensor(fqn, tensor, _loose_role(tensor)) else Skipped(fqn)

    def _tensor(self, fqn: str, tensor: torch.Tensor, role: Role) -> bool:
        """Add a tensor unless it is left out; return whether the checkpoint will have it."""
        if not self._takes_part(fqn):
            return False
        require_fqn(fqn)
        if fqn in self._names:
            raise InvalidError(f"{fqn}: two leaves of the state have this name; rename a key so that names differ")
        self._names.add(fqn)
        require_storable(tensor, fqn)
        if tensor.is_meta:
            raise InvalidError(f"{fqn}: is a meta tensor, it has no bytes to save; materialise it first")
        first = self._stored.setdefault(storage_key(tensor), fqn)
        if first != fqn and tensor.numel():
            self.aliases[fqn] = first
            return True
        layout = layout_of(tensor, fqn, self._rank_of_global) if isinstance(tensor, DTensor) else None
        box = held_box(tensor, layout, fqn)
        if layout is not None and isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            return True
        spec = TensorSpec(fqn, dtype_name(tensor.dtype), tuple(tensor.shape))
        pieces = (box,) if box is not None else ()
        self.shards.append(LocalShard(Shard(spec, layout, role, pieces), TorchSource(tensor, box)))
        return True


def _loose_role(tensor: torch.Tensor) -> Role:
    """Return the role of a tensor that stands in a dict.

    A module's own state dict passed as a dict holds parameters that have lost their type, so floating tensors
    must agree. Others (random states, counters) differ by rank in ordinary runs and count as buffers.
    """
    floating = DTYPES[dtype_name(tensor.dtype)].floating if dtype_name(tensor.dtype) in DTYPES else True
    return Role.PARAMETER if floating else Role.BUFFER
