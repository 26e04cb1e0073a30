"""The names of a checkpoint as DCP forms them, and the tree that keeps them.

A caller of `PieceWriter` names tensors and values, and says how they nest. The tree of the checkpoint is the one that
an import of the same state would make, so that `holdfast.load` and every export understand it. From a tree follow names
again: those of an export to DCP. Where they differ from the caller's, a record in the tree has the caller's own: the
tree of an optimizer keeps hyperparameters by parameter, not by group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.backends.foreign.dcp.metadata import Path
from holdfast.backends.foreign.dcp.nesting import is_tensor, items_of, nested_of, tree_of
from holdfast.backends.foreign.file_layout import TensorLeaf
from holdfast.backends.foreign.nested_state import State, nested_state
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.export import ExportContent, ExportOptions
from holdfast.base.types.values import PIECES_RECORD, Group, TensorRef, Value
from holdfast.core.format.values import values as codec
from holdfast.errors import CorruptError, InvalidError

MARK = "holdfast_integration"
"""Key in the tree under which an integration names itself (`integrations/host.py`). It is no part of a state."""


@dataclass(frozen=True, slots=True)
class PieceNames:
    """What a checkpoint holds, by name."""

    tensors: Mapping[str, str]
    """Stored FQN of each tensor."""

    values: Mapping[str, Value]
    """Everything else: neutral values, and a leaf or `TensorRef` for each tensor in them."""

    paths: Mapping[str, Path]
    """Path of each in the state that was saved."""


def tree_of_pieces(values: Mapping[str, Value], paths: Mapping[str, Path], url: str) -> Group:
    """Return the tree of a checkpoint.

    Args:
        values: The values of all ranks, by name.
        paths: Path of each tensor and value that is nested, by name.
        url: The checkpoint, for messages.
    Raises:
        InvalidError: The paths of two names contradict each other, or a name is reserved.
    """
    for reserved in (PIECES_RECORD, MARK):
        if any(name == reserved or name.startswith(f"{reserved}.") for name in (*values, *paths)):
            raise InvalidError(f"{url}: {reserved!r} is a name that Holdfast uses itself; rename the key of the state")
    names = {name: tuple(paths.get(name, (name,))) for name in (*values, *paths)}
    leaves = [(path, values[name] if name in values else TensorRef(name)) for name, path in names.items()]
    try:
        tree = tree_of(nested_of(leaves, url), lambda fqn: None, [])
    except CorruptError as error:
        raise InvalidError(f"{error}. Name the values of all ranks alike") from error
    fqns = {*(name for name in names if name not in values), *_references(list(values.values()))}
    tensors = {fqn: TensorSpec(fqn, "uint8", ()) for fqn in fqns}
    derived, state = _derived(ExportContent(tensors, {}, tree), flat_optimizers=False)
    found = {name: derived.values.get(name, _ABSENT) for name in values}
    # A dict or list that the caller has as one value is in the tree, under several names.
    split = {name: _at(state, names[name]) for name in values if found[name] is _ABSENT}
    kept = {name: value for name, value in values.items() if not _is_same(value, (found | split)[name], name)}
    moved = {name: list(path) for name, path in names.items() if name in split or derived.paths.get(name) != path}
    absent = [name for name in derived.values if name not in values]
    if kept or moved or absent:
        tree.items[PIECES_RECORD] = {"values": kept, "paths": moved, "absent": absent}
    return tree


def names_in(content: ExportContent, *, flat_optimizers: bool) -> PieceNames:
    """Return the names of a checkpoint: those of its writer, if it was written by pieces; else those of an export.

    Args:
        content: The content of the checkpoint.
        flat_optimizers: Whether the state of optimizers has flat keys, if it was not written by pieces.
    """
    items = dict(content.tree.items)
    record: Any = items.pop(PIECES_RECORD, None)
    items.pop(MARK, None)
    rest = replace(content, tree=Group("dict", items))
    is_ours = isinstance(record, dict)
    derived, state = _derived(rest, flat_optimizers=flat_optimizers and not is_ours)
    if not is_ours:
        return derived
    kept, moved, absent = _recorded(record)
    split = {name: _at(state, path) for name, path in moved.items() if name not in content.tensors}
    found = {**derived.values, **split}
    values = {name: value for name, value in found.items() if name not in absent and value is not _ABSENT} | kept
    inner = _references(list(values.values()))
    tensors = {fqn: fqn for fqn in content.tensors if fqn not in inner}
    paths = {name: moved.get(name) or derived.paths.get(name, (name,)) for name in (*tensors, *values)}
    return PieceNames(tensors, values, paths)


def _recorded(record: Mapping[str, object]) -> tuple[dict[str, Value], dict[str, Path], set[str]]:
    """Return values and paths by name, and the names that follow from the tree and are none of the caller's.

    Raises:
        CorruptError: It is no record that `tree_of_pieces` makes.
    """
    values, paths, absent = (record.get(key) for key in ("values", "paths", "absent"))
    if (
        not isinstance(values, dict)
        or not isinstance(paths, dict)
        or not isinstance(absent, list)
        or not all(isinstance(name, str) for name in (*values, *paths, *absent))
        or not all(isinstance(path, list) and all(type(key) in (str, int) for key in path) for path in paths.values())
    ):
        raise CorruptError(f"{PIECES_RECORD}: is no record of names; expected values and paths. Read another copy")
    return values, {name: tuple(path) for name, path in paths.items()}, set(absent)


def _derived(content: ExportContent, *, flat_optimizers: bool) -> tuple[PieceNames, State]:
    """Return the names that an export to DCP has, and the nested state behind them."""
    state = nested_state(content, ExportOptions(), flat_optimizers=flat_optimizers)
    tensors, values, paths = {}, {}, {}
    for path, item in items_of(state, ()):
        name = ".".join(map(str, path))
        paths[name] = path
        if isinstance(item, TensorLeaf):
            tensors[name] = item.fqn
        else:
            values[name] = item
    return PieceNames(tensors, values, paths), state


_ABSENT = object()


def _at(state: object, path: Sequence[str | int]) -> object:
    """Return what is at a path of a nested state; `_ABSENT` if nothing is."""
    for key in path:
        is_there = key in state if isinstance(state, dict) else isinstance(state, list) and _is_position(key, state)
        if not is_there:
            return _ABSENT
        state = state[key]  # type: ignore[index]
    return state


def _is_position(key: str | int, items: Sequence[object]) -> bool:
    return type(key) is int and key < len(items)


def _is_same(value: Value, derived: object, name: str) -> bool:
    if derived is _ABSENT:
        return False
    other = mapped(derived, lambda leaf: TensorRef(leaf.fqn) if isinstance(leaf, TensorLeaf) else leaf)
    try:
        # As documents: the tree may have the keys of a dict in another order, tensors after values.
        return codec.encode(other, name) == codec.encode(value, name)
    except InvalidError:
        return False  # A small tensor that became a leaf with its elements.


def _references(value: Value) -> set[str]:
    found: set[str] = set()

    def note(leaf: object) -> object:
        if isinstance(leaf, TensorRef | TensorLeaf):
            found.add(leaf.fqn)
        return leaf

    mapped(value, note)
    return found


def mapped(value: Value, on_leaf: Callable[[Any], object]) -> object:
    """Return a value with its leaves replaced; dicts, lists and tuples are copied."""
    if is_tensor(value):
        return on_leaf(value)
    if isinstance(value, dict):
        copied = type(value)((key, mapped(item, on_leaf)) for key, item in value.items())
        vars(copied).update(vars(value)) if hasattr(value, "__dict__") else None
        return copied
    if type(value) is list or type(value) is tuple:
        return type(value)(mapped(item, on_leaf) for item in value)
    return on_leaf(value)
