"""The values of a state that are no tensor shards, at the price of these values alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import cast

import torch

from holdfast.backends.torch.containers import small_tensor, take_apart
from holdfast.backends.torch.local_shards import tensors_of
from holdfast.backends.torch.redo.gap import GapError
from holdfast.backends.torch.redo.stepped import Stepped, SteppedState
from holdfast.backends.torch.state.collect import collect
from holdfast.backends.torch.state.saved_values import children_of
from holdfast.backends.torch.state.walk import (
    DictNode,
    ModuleNode,
    Node,
    Stateful,
    StatefulNode,
    TensorNode,
    ValueNode,
    walk,
)
from holdfast.backends.torch.ties import storage_key
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.ports.framework import Collected, Selection
from holdfast.base.types.values import Value

_NOTHING = object()

_NUMEL_MAX = 1 << 16
"""Elements of the largest tensor in the state of an object that becomes a value."""


class StateValues:
    """Takes the values of one state, boundary by boundary, and sees whether its tensors are still the same objects."""

    def __init__(self, state: Mapping[str, object], selection: Selection, stepped: SteppedState) -> None:
        self._state, self._ranks = state, stepped.ranks
        self._selection = replace(selection, grads=False)
        self._root = stepped.root
        self._optimizers: dict[str, list[Stepped]] = {}
        for each in stepped.optimizers:
            self._optimizers.setdefault(each.view.path, []).append(each)
        self._tensors = {node.path: _tensors_of(node.module) for node in stepped.modules}
        self._made = {
            node.path
            for node in stepped.modules
            if node.values or not {*map(id, node.tensors.values())} <= {*self._tensors[node.path]}
        }
        """Paths of the modules that make values or tensors when they are asked for their state."""

    def collected(self, state: Mapping[str, object] | None = None) -> Collected:
        """Return tree and values of this rank as `collect` does, and the shards of tensors in lists of the state.

        In the place of an optimizer stand the hyperparameters of its groups: a list for each optimizer inside. Small
        tensors in the state of an object are values: an object may make them for each answer.

        Args:
            state: The state as it is passed now; None if it is the same as before.
        Raises:
            GapError: A module, an optimizer or a tensor of the state was replaced.
        """
        self._state = self._state if state is None else state
        return collect(self._values_in(self._root, self._state), self._selection, self._ranks)

    def groups(self, tree: Value) -> list[tuple[Stepped, Value]]:
        """Return the groups of each optimizer, as a tree of values has them."""
        found: list[tuple[Stepped, Value]] = []

        def visit(node: DictNode, saved: Value) -> None:
            items = children_of(saved)
            for key, child in node.children.items():
                if isinstance(child, DictNode):
                    visit(child, items.get(key))
                elif child.path in self._optimizers:
                    inside, groups = self._optimizers[child.path], items.get(key)
                    assert isinstance(groups, list), "recorded by `collected`"
                    found.extend(zip(inside, groups, strict=True))

        visit(self._root, tree)
        return found

    def _values_in(self, node: DictNode, mapping: Mapping[str, object]) -> dict[str, object]:
        for key, child in node.children.items():
            if key not in mapping and not isinstance(child, ValueNode):
                raise GapError(f"{child.path}: is no longer in the state")
        values = ((key, self._value_of(node.children.get(key), value)) for key, value in mapping.items())
        return {key: value for key, value in values if value is not _NOTHING}

    def _value_of(self, child: Node | None, value: object) -> object:
        match child:
            case TensorNode():
                tensor = tensors_of(value, "")[0] if isinstance(value, Sharded) else value
                # `state_dict()` of a module makes other objects of the same memory at each call.
                if not isinstance(tensor, torch.Tensor) or storage_key(tensor) != storage_key(child.tensor):
                    _require_same(child.path, child.tensor, tensor)
                return _NOTHING
            case DictNode() if isinstance(value, Mapping):
                return self._values_in(child, value)
            case DictNode() if isinstance(value, list | tuple):
                return self._values_in(child, {str(number): item for number, item in enumerate(value)})
            case ModuleNode():
                _require_same(child.path, child.module, value)
                if _tensors_of(child.module) != self._tensors[child.path]:
                    self._require_same_tensors(child)
                return child.module if child.path in self._made else _NOTHING
            case StatefulNode() if isinstance(value, Stateful):
                return _SmallState(value, child.path)
        if child is not None and child.path in self._optimizers:
            inside = self._optimizers[child.path]
            _require_same(child.path, inside[0].view.optimizer, value)
            return [list(each.groups()) for each in inside]
        return value

    def _require_same_tensors(self, node: ModuleNode) -> None:
        """Refuse a module with other tensors. FSDP2 shows gathered ones for a while; a walk makes it shard them."""
        ((_, found),) = walk({node.path: node.module}, self._ranks.rank_of_global).children.items()
        assert isinstance(found, ModuleNode)
        for fqn, tensor in node.tensors.items():
            if id(tensor) in self._tensors[node.path]:
                _require_same(f"{node.path}.{fqn}", tensor, found.tensors.get(fqn))
        if found.tensors.keys() != node.tensors.keys():
            raise GapError(f"{node.path}: has tensors that were not there before")


def _tensors_of(module: torch.nn.Module) -> list[int]:
    return list(map(id, chain(module.parameters(), module.buffers())))


def _require_same(path: str, before: object, now: object) -> None:
    if now is not before:
        raise GapError(f"{path}: was replaced by another object")


class _SmallState:
    """An object of the state, whose tensors are values."""

    def __init__(self, stateful: Stateful, path: str) -> None:
        self._stateful, self._path = stateful, path

    def state_dict(self) -> dict[str, object]:
        """Return the state with values in place of tensors."""
        return cast(
            "dict[str, object]",
            take_apart(self._stateful.state_dict(), self._path, partial(small_tensor, numel_max=_NUMEL_MAX)),
        )

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Not called: `collect` loads nothing."""
        raise NotImplementedError
