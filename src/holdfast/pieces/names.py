"""The names of a checkpoint as DCP forms them, and the tree that keeps them.

A caller of `PieceWriter` names tensors and values, and says how they nest. The tree of the checkpoint is the one that
an import of the same state would make, so that `holdfast.load` and every export understand it. From a tree follow names
again: those of an export to DCP. Where they differ from the caller's, the tree has the caller's own under `RECORD`: the
tree of an optimizer keeps hyperparameters by parameter, not by group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CorruptError, InvalidError
from holdfast.foreign.dcp.metadata import Path
from holdfast.foreign.dcp.nesting import is_tensor, items_of, nested_of, tree_of
from holdfast.foreign.file_layout import TensorLeaf
from holdfast.foreign.nested_state import nested_state
from holdfast.format.values import values as codec
from holdfast.geometry.tensor import TensorSpec
from holdfast.types.export import ExportContent, ExportOptions
from holdfast.types.values import Group, TensorRef, Value

RECORD = "holdfast_pieces"
"""Key in the tree under which names are kept that do not follow from the rest of it."""


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
    for reserved in (RECORD, MARK):
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
    derived = _derived(ExportContent(tensors, {}, tree), flat_optimizers=False)
    kept = {name: value for name, value in values.items() if not _is_same(value, derived.values, name)}
    moved = {
        name: list(path)
        for name, path in names.items()
        if derived.paths.get(name) != path and (name in paths or name in derived.paths)
    }
    absent = [name for name in derived.values if name not in values]
    if kept or moved or absent:
        tree.items[RECORD] = {"values": kept, "paths": moved, "absent": absent}
    return tree


def names_in(content: ExportContent, *, flat_optimizers: bool) -> PieceNames:
    """Return the names of a checkpoint: those of its writer, if it was written by pieces; else those of an export.

    Args:
        content: The content of the checkpoint.
        flat_optimizers: Whether the state of optimizers has flat keys, if it was not written by pieces.
    """
    items = dict(content.tree.items)
    record: Any = items.pop(RECORD, None)
    items.pop(MARK, None)
    rest = ExportContent(content.tensors, content.aliases, Group("dict", items))
    is_ours = isinstance(record, dict)
    derived = _derived(rest, flat_optimizers=flat_optimizers and not is_ours)
    if not is_ours:
        return derived
    absent, kept, moved = set(record.get("absent", ())), record.get("values", {}), record.get("paths", {})
    values = {name: value for name, value in derived.values.items() if name not in absent} | kept
    inner = _references(list(values.values()))
    tensors = {fqn: fqn for fqn in content.tensors if fqn not in inner}
    paths = {name: derived.paths.get(name, (name,)) for name in (*tensors, *values)}
    return PieceNames(tensors, values, paths | {name: tuple(path) for name, path in moved.items()})


def _derived(content: ExportContent, *, flat_optimizers: bool) -> PieceNames:
    """Return the names that an export to DCP has."""
    state = nested_state(content, ExportOptions(), flat_optimizers=flat_optimizers)
    tensors, values, paths = {}, {}, {}
    for path, item in items_of(state, ()):
        name = ".".join(map(str, path))
        paths[name] = path
        if isinstance(item, TensorLeaf):
            tensors[name] = item.fqn
        else:
            values[name] = item
    return PieceNames(tensors, values, paths)


def _is_same(value: Value, derived: Mapping[str, Value], name: str) -> bool:
    if name not in derived:
        return False
    other = mapped(derived[name], lambda leaf: TensorRef(leaf.fqn) if isinstance(leaf, TensorLeaf) else leaf)
    try:
        return codec.dumps(codec.encode(other, name)) == codec.dumps(codec.encode(value, name))
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
