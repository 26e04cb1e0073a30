"""Rebuilds the nested state from flattened keys, and the tree that Holdfast would have saved for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeGuard

from holdfast.backends.foreign.dcp.metadata import Path
from holdfast.backends.foreign.dcp.optimizers import NamedOptimizer, flattened_optimizer, nested_optimizer
from holdfast.backends.foreign.file_layout import SmallTensor, TensorLeaf
from holdfast.backends.foreign.optimizers import optimizer_group
from holdfast.base.types.values import Group, Skipped, TensorRef, Value
from holdfast.errors import CorruptError, first_three

_HOLES_MAX = 1 << 16
"""List positions without a saved value, in all lists. An empty dict in a list leaves one."""

ReadSmallTensor = Callable[[str], Value]
"""Reads a tensor of a few elements, by FQN, as a value and removes it from the listing; None if it is not small."""


def items_of(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """Yield every item of a nested state, with its path; the inverse of `nested_of`.

    An item is a value of a dict, or of a list that holds tensors or dicts. DCP's `traverse_state_dict` decides the same
    way, and its readers form keys from it.

    Args:
        value: Plain values, with a leaf of `file_layout` for each tensor.
        path: Its own path.
    """
    if isinstance(value, dict):
        for key, child in value.items():
            yield from items_of(child, (*path, str(key)))
    elif isinstance(value, list) and not _is_whole(value):
        for number, child in enumerate(value):
            yield from items_of(child, (*path, number))
    else:
        yield path, value


def _is_whole(value: list[object]) -> bool:
    """Return whether a list is one item."""
    return not any(
        isinstance(child, dict) or is_tensor(child) or (isinstance(child, list) and not _is_whole(child))
        for child in value
    )


def is_tensor(value: object) -> TypeGuard[TensorLeaf | SmallTensor]:
    """Return whether a value stands for a tensor."""
    return isinstance(value, TensorLeaf | SmallTensor)


def nested_of(leaves: Iterable[tuple[Path, Value]], where: str) -> dict[str, Value]:
    """Return the nested dicts and lists of the saved state. DCP does not store empty ones.

    Args:
        leaves: Path and value of each leaf; a `TensorRef` for a tensor.
        where: The `.metadata` file, for messages.
    Raises:
        CorruptError: The paths of two leaves contradict each other.
    """
    root: dict[str | int, object] = {}
    for path, value in leaves:
        node = root
        for key in path[:-1]:
            below = node.setdefault(key, {})
            if isinstance(below, _Leaf):
                raise CorruptError(f"{where}: {_joined(path)} is inside {key!r}, which is a leaf; expected a container")
            assert isinstance(below, dict)
            node = below
        if path[-1] in node:
            raise CorruptError(f"{where}: {_joined(path)} is stated twice; expected one leaf of this name")
        node[path[-1]] = _Leaf(value)
    holes = [_HOLES_MAX]
    return {str(key): _container(child, (key,), holes, where) for key, child in root.items()}


class _Leaf:
    """Wraps a saved value, so that a dict that was saved as one object is not taken for a level of the tree."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


def _container(node: object, path: Path, holes: list[int], where: str) -> Value:
    """Return a node as a dict, or as a list if its keys are positions."""
    if isinstance(node, _Leaf):
        return node.value
    assert isinstance(node, dict)
    children = {key: _container(child, (*path, key), holes, where) for key, child in node.items()}
    places = [key for key in children if type(key) is int]
    if not places:
        return children
    if len(places) < len(children):
        raise CorruptError(f"{where}: {_joined(path)} is stated as a list and a dict; expected one of them")
    length = max(places) + 1
    # A path of one leaf may state a list of 2**60 positions. Bound the empty ones before a list is made.
    holes[0] -= length - len(places)
    if holes[0] < 0:
        raise CorruptError(f"{where}: {_joined(path)} is stated as a list of {length}, with {len(places)} stored")
    return [children.get(place) for place in range(length)]


def tree_of(nested: Mapping[str, Value], small_tensor: ReadSmallTensor, remarks: list[str]) -> Group:
    """Return the tree that Holdfast would have saved for a nested state.

    Args:
        nested: The state, with a `TensorRef` for each tensor.
        small_tensor: Reads hyperparameters that are tensors as values.
        remarks: Receives remarks for the user.
    """
    items: dict[str, Value] = {}
    for key, value in nested.items():
        # A dict of names, some of them of tensors, is a module's state dict.
        if key == "model" and isinstance(value, dict) and any(type(child) is TensorRef for child in value.values()):
            items[key] = Group("module", {name: extra for name, extra in value.items() if type(extra) is not TensorRef})
        elif not isinstance(value, TensorRef | Skipped):
            items[key] = _node(value, key, small_tensor, remarks)
    return Group("dict", items)


def _node(value: Value, path: str, small_tensor: ReadSmallTensor, remarks: list[str]) -> Value:
    if not isinstance(value, dict):
        return value
    optimizer = nested_optimizer(value) or flattened_optimizer(value)
    if optimizer is not None:
        return _optimizer(optimizer, path, small_tensor, remarks)
    if not _holds(TensorRef, value) or not all(type(key) is str for key in value):
        return value
    if "param_groups" in value and "state" in value:
        remarks.append(f"{path}: numbers its parameters instead of naming them; an optimizer loads it by position")
    children = {key: child for key, child in value.items() if not isinstance(child, TensorRef | Skipped)}
    return Group("dict", {key: _node(child, f"{path}.{key}", small_tensor, remarks) for key, child in children.items()})


def _optimizer(optimizer: NamedOptimizer, path: str, small_tensor: ReadSmallTensor, remarks: list[str]) -> Group:
    hyperparameters: dict[str, Mapping[str, Value]] = {}
    known: dict[int, Mapping[str, Value]] = {}
    for fqn, shared in optimizer.hyperparameters.items():
        if id(shared) not in known:
            # DCP stores them in arbitrary order; sort them so that the same checkpoint always yields the same tree.
            readable = {name: value for name, value in sorted(shared.items()) if not _holds(Skipped, value)}
            plain = {name: _plain(value, small_tensor) for name, value in readable.items()}
            known[id(shared)] = {name: value for name, value in plain.items() if not _holds(Skipped, value)}
        hyperparameters[fqn] = known[id(shared)]
    unknown = sorted(optimizer.names - hyperparameters.keys())
    if unknown:
        remarks.append(f"{path}: {len(unknown)} parameters with state are in no group: {first_three(unknown)}")
    values = {
        fqn: {name: value for name, value in entries.items() if not _holds(Skipped, value)}
        for fqn, entries in optimizer.values.items()
    }
    return optimizer_group(hyperparameters, values)


def _plain(value: Value, small_tensor: ReadSmallTensor) -> Value:
    """Return a hyperparameter with its tensors as values; `Skipped` in place of a tensor that is not small."""
    if isinstance(value, TensorRef):
        return small_tensor(value.fqn) or Skipped(value.fqn)
    if not _holds(TensorRef, value):
        return value
    if isinstance(value, dict):
        return {key: _plain(entry, small_tensor) for key, entry in value.items()}
    assert isinstance(value, list | tuple)
    return type(value)(_plain(entry, small_tensor) for entry in value)


def _holds(kind: type, value: Value) -> bool:
    """Return whether a value contains an instance of a class."""
    if isinstance(value, dict):
        return any(_holds(kind, child) for child in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(kind, child) for child in value)
    return isinstance(value, kind)


def _joined(path: Path) -> str:
    return ".".join(map(str, path))[:300]
