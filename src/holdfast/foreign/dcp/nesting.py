"""The nested state out of flattened keys, and the tree that Holdfast would have kept of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from holdfast.errors import CorruptError
from holdfast.foreign.dcp.metadata import Path
from holdfast.foreign.dcp.optimizers import NamedOptimizer, flattened_optimizer, nested_optimizer
from holdfast.foreign.optimizers import optimizer_group
from holdfast.types.values import Group, Skipped, TensorRef, Value

_HOLES_MAX = 1 << 16
"""Places of lists, in all, of which nothing was saved: an empty dict in a list leaves one."""

SmallTensor = Callable[[str], Value]
"""Gives a tensor of a few elements, by FQN, as a value that is no longer listed; None where it is not small."""


def nested_of(leaves: Iterable[tuple[Path, Value]], where: str) -> dict[str, Value]:
    """Return the nested dicts and lists that leaves stood in; empty ones were not saved.

    Args:
        leaves: Where each stood, and what it is: a `TensorRef` for a tensor.
        where: The file that tells, for messages.
    Raises:
        CorruptError: Two leaves cannot stand where they are said to.
    """
    root: dict[str | int, object] = {}
    for path, value in leaves:
        node = root
        for key in path[:-1]:
            below = node.setdefault(key, {})
            if isinstance(below, _Leaf):
                raise CorruptError(f"{where}: {_joined(path)} is said to lie inside {key!r}, which is a leaf")
            assert isinstance(below, dict)
            node = below
        if path[-1] in node:
            raise CorruptError(f"{where}: {_joined(path)} is there twice; expected one leaf of this name")
        node[path[-1]] = _Leaf(value)
    holes = [_HOLES_MAX]
    return {str(key): _grown(child, (key,), holes, where) for key, child in root.items()}


class _Leaf:
    """A value that is not looked into, so that a dict that was saved whole is no level of the tree."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


def _grown(node: object, path: Path, holes: list[int], where: str) -> Value:
    """Return a node as dict or, where its keys are places, as list."""
    if isinstance(node, _Leaf):
        return node.value
    assert isinstance(node, dict)
    grown = {key: _grown(child, (*path, key), holes, where) for key, child in node.items()}
    places = [key for key in grown if type(key) is int]
    if not places:
        return grown
    if len(places) < len(grown):
        raise CorruptError(f"{where}: {_joined(path)} is said to be a list and a dict")
    length = max(places) + 1
    holes[0] -= length - len(places)
    if holes[0] < 0:
        raise CorruptError(
            f"{where}: {_joined(path)} is said to be a list of {length}, of which {len(places)} are there"
        )
    return [grown.get(place) for place in range(length)]


def tree_of(nested: Mapping[str, Value], small_tensor: SmallTensor, remarks: list[str]) -> Group:
    """Return the tree of a nested state, as it would be had Holdfast saved it.

    Args:
        nested: The state, with `TensorRef` for tensors.
        small_tensor: Turns hyperparameters that are tensors into values.
        remarks: Takes what a reader should know.
    """
    items: dict[str, Value] = {}
    for key, value in nested.items():
        if key == "model" and _is_module(value):
            assert isinstance(value, dict)
            items[key] = Group("module", {name: each for name, each in value.items() if type(each) is not TensorRef})
        elif not isinstance(value, TensorRef | Skipped):
            items[key] = _node(value, key, small_tensor, remarks)
    return Group("dict", items)


def _is_module(value: Value) -> bool:
    """Return whether a dict is what a module's `state_dict()` returns: names, most of them of tensors."""
    return isinstance(value, dict) and any(type(each) is TensorRef for each in value.values())


def _node(value: Value, path: str, small_tensor: SmallTensor, remarks: list[str]) -> Value:
    if not isinstance(value, dict):
        return value
    found = nested_optimizer(value) or flattened_optimizer(value)
    if found is not None:
        return _optimizer(found, path, small_tensor, remarks)
    if not holds_tensor(value) or not all(type(key) is str for key in value):
        return value
    if "param_groups" in value and "state" in value:
        remarks.append(f"{path}: holds its state by number, not by name: an optimizer takes it by position")
    children = {key: each for key, each in value.items() if not isinstance(each, TensorRef | Skipped)}
    return Group("dict", {key: _node(each, f"{path}.{key}", small_tensor, remarks) for key, each in children.items()})


def _optimizer(found: NamedOptimizer, path: str, small_tensor: SmallTensor, remarks: list[str]) -> Group:
    hyperparameters: dict[str, Mapping[str, Value]] = {}
    known: dict[int, Mapping[str, Value]] = {}
    for fqn, shared in found.hyperparameters.items():
        if id(shared) not in known:
            # In the order of their names: in what order they were saved is chance.
            settled = {name: _settled(value, small_tensor) for name, value in sorted(shared.items())}
            known[id(shared)] = {name: value for name, value in settled.items() if not isinstance(value, Skipped)}
        hyperparameters[fqn] = known[id(shared)]
    unknown = sorted(found.names - hyperparameters.keys())
    if unknown:
        remarks.append(f"{path}: {len(unknown)} parameters have state and are in no group, {unknown[0]} among them")
    values = {
        fqn: {name: value for name, value in entries.items() if not _holds(Skipped, value)}
        for fqn, entries in found.values.items()
    }
    return optimizer_group(hyperparameters, values)


def _settled(value: Value, small_tensor: SmallTensor) -> Value:
    """Return a hyperparameter with its tensors as values; `Skipped` where it cannot be had whole."""
    if isinstance(value, TensorRef):
        return small_tensor(value.fqn) or Skipped(value.fqn)
    if _holds(Skipped, value):
        return Skipped("")
    if not holds_tensor(value):
        return value
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    settled = {key: _settled(each, small_tensor) for key, each in entries}
    if any(isinstance(each, Skipped) for each in settled.values()):
        return Skipped("")
    if isinstance(value, dict):
        return settled
    return tuple(settled.values()) if isinstance(value, tuple) else list(settled.values())


def _holds(kind: type, value: Value) -> bool:
    """Return whether a noun of a kind stands anywhere in a value."""
    if isinstance(value, dict):
        return any(_holds(kind, each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(kind, each) for each in value)
    return isinstance(value, kind)


def holds_tensor(value: Value) -> bool:
    """Return whether a tensor stands anywhere in a value."""
    return _holds(TensorRef, value)


def _joined(path: Path) -> str:
    return ".".join(map(str, path))[:300]
