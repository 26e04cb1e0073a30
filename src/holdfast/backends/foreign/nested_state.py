"""Rebuilds the nested dict that a caller would pass to `torch.save` or `torch.distributed.checkpoint`."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.backends.foreign.file_layout import TensorLeaf, small_tensor_of
from holdfast.backends.foreign.model_names import exported_dtype, model_names
from holdfast.backends.foreign.values import below
from holdfast.base.types.export import ExportContent, ExportOptions
from holdfast.base.types.values import (
    PIECES_RECORD,
    FrameworkValue,
    Group,
    PerRankRef,
    Skipped,
    TensorRef,
    Value,
    is_subclass_record,
)
from holdfast.errors import CorruptError, InvalidError, first_three

logger = logging.getLogger(__name__)

State = dict[str, object]
"""Plain values, `TensorLeaf`, `SmallTensor` and `FrameworkValue`, nested."""

_ABSENT = object()


def model_state(content: ExportContent, options: ExportOptions) -> tuple[str, State]:
    """Return the key of the model in the state (empty if none), and the model as its `state_dict()` returns it.

    Raises:
        InvalidError: The state has no model.
    """
    model = model_names(content, required=True)
    builder = _StateBuilder(content, options.dtype, model.names)
    state: State = {name: builder.leaf(fqn) for fqn, name in model.names.items()}
    for alias, name in model.aliases.items():
        state.setdefault(alias, state[name])
    for key, group in content.tree.items.items():
        if isinstance(group, Group) and group.kind == "module" and model.key in ("", key):
            plain = {name: value for name, value in group.items.items() if not is_subclass_record(value)}
            for name, value in builder.values(plain, key).items():
                state[name if model.key else below(key, name)] = value
    builder.log_left_out()
    builder.sort(model.key, state)
    return model.key, state


def nested_state(content: ExportContent, options: ExportOptions, *, flat_optimizers: bool) -> State:
    """Return the whole state: modules and optimizers as their state dicts, all other values with their nesting.

    Args:
        content: The content of the checkpoint.
        options: The options of the export.
        flat_optimizers: Whether optimizers have flat keys, `state.<fqn>.<key>` and `param_groups.<fqn>.<key>`, as
            `torch.distributed.checkpoint.state_dict` returns them on request.
    """
    builder = _StateBuilder(content, options.dtype, model_names(content, required=False).names)
    state = builder.state()
    builder.log_left_out()
    if flat_optimizers:
        for kind, group in builder.places.values():
            if kind == "optimizer":
                _flatten(group)
    return state


class _StateBuilder:
    """Builds nested dicts from the names and the tree of a checkpoint."""

    def __init__(self, content: ExportContent, dtype: str | None, model: Mapping[str, str]) -> None:
        self._content, self._dtype, self._model = content, dtype, model
        self._referred: set[str] = set()
        self._places_in_order = {name: place for place, name in enumerate(content.order)}
        self._left_out: list[str] = []
        self._tied: dict[str, set[str]] = {}
        self.places: dict[str, tuple[str, State]] = {}
        """Kind and content of each group, by path."""

    def leaf(self, fqn: str) -> TensorLeaf:
        """Return the leaf of a stored tensor, or of the tensor that a name is tied to."""
        spec = self._content.tensors.get(self._content.aliases.get(fqn, fqn))
        if spec is None:
            raise CorruptError(f"{fqn}: a value refers to this tensor, which the index lacks; read another copy")
        dtype = exported_dtype(spec.dtype, self._dtype) if spec.fqn in self._model else spec.dtype
        return TensorLeaf(spec.fqn, dtype, spec.global_shape)

    def state(self) -> State:
        """Return the whole state."""
        tree = self._content.tree
        root = self._group(Group(tree.kind, {key: tree.items[key] for key in tree.items if key != PIECES_RECORD}), "")
        # Tensors that no value refers to are stored under their names; the tree only holds values.
        for fqn in (*self._content.tensors, *self._content.aliases):
            if fqn not in self._referred:
                self._place(fqn)
        for path, (kind, state) in self.places.items():
            if kind != "optimizer":
                self.sort(path, state)
        return root

    def sort(self, path: str, state: State) -> None:
        """Put the names of a dict or module into their order in the state that was saved."""
        places = self._places_in_order
        items = sorted(state.items(), key=lambda item: places.get(below(path, item[0]), len(places)))
        state.clear()
        state.update(items)

    def log_left_out(self) -> None:
        """Log the values that the file cannot hold."""
        if self._left_out:
            logger.warning("left out, as each rank has its own or it was not saved: %s", first_three(self._left_out))

    def values(self, items: Mapping[Any, Value], path: str) -> dict[Any, object]:
        """Return the values of a dict, without those that are left out."""
        values = ((key, self.value(item, below(path, key))) for key, item in items.items())
        return {key: value for key, value in values if value is not _ABSENT}

    def value(self, value: Value, path: str) -> object:
        """Return a value with leaves in place of tensors."""
        if isinstance(value, Group):
            return self.value(value.items.get("state"), path) if value.kind == "stateful" else self._group(value, path)
        if isinstance(value, TensorRef):
            self._referred.add(value.fqn)
            return self.leaf(value.fqn)
        if isinstance(value, Skipped | PerRankRef):
            self._left_out.append(path)
            return _ABSENT
        if is_subclass_record(value):
            return self.value(value.value.get("tensors") if isinstance(value.value, dict) else None, path)
        if isinstance(value, FrameworkValue) and value.kind == "torch.tensor":
            return small_tensor_of(value, path)
        if isinstance(value, dict) and not isinstance(value, Counter):
            items = self.values(value, path)
            if isinstance(value, OrderedDict):
                items = OrderedDict(items)
                vars(items).update(vars(value))
            return items
        if isinstance(value, list | tuple):
            children = (self.value(item, f"{path}.{number}") for number, item in enumerate(value))
            return type(value)(None if child is _ABSENT else child for child in children)
        return value

    def _group(self, group: Group, path: str) -> State:
        """Return a node of the tree, and record it, so that tensors can be stored in it by name."""
        if group.kind == "optimizer":
            return self._optimizer(group, path)
        state: State = {}
        self.places[path] = (group.kind, state)
        state |= self.values(group.items, path)
        return state

    def _optimizer(self, group: Group, path: str) -> State:
        """Return an optimizer's state dict by names. Tied parameters have one name, as in torch."""
        hyperparameters: Any = group.items.get("hyperparameters", {})
        members: Any = group.items.get("param_groups", {})
        values: Any = group.items.get("state", {})
        tied = self._tied[path] = _tied_members(members, self._content.aliases)
        groups: dict[str, list[str]] = {}
        for fqn, content in members.items():
            if fqn not in tied:
                groups.setdefault(content, []).append(fqn)
        param_groups = [
            {**self.values(hyperparameters.get(content, {}), f"{path}.param_groups"), "params": fqns}
            for content, fqns in groups.items()
        ]
        by_name = {
            fqn: self.values(entries, f"{path}.state.{fqn}") for fqn, entries in values.items() if fqn not in tied
        }
        state: State = {"state": by_name, "param_groups": param_groups}
        self.places[path] = ("optimizer", state)
        return state

    def _place(self, fqn: str) -> None:
        """Store a tensor in the innermost node whose path is a prefix of its name."""
        path, rest = next((path, rest) for path, rest in _splits(fqn) if path in self.places)
        kind, state = self.places[path]
        if kind == "optimizer" and rest.startswith("state."):
            name, _, key = rest.removeprefix("state.").rpartition(".")
            if name in self._tied[path]:
                return
            by_name: Any = state["state"]
            state, rest = by_name.setdefault(name, {}), key
        if rest in state:
            raise InvalidError(f"{fqn}: the state has a value and a tensor of this name; expected one. Rename either")
        state[rest] = self.leaf(fqn)


def _splits(fqn: str) -> Iterator[tuple[str, str]]:
    """Yield every split of a name at a dot, the longest prefix first, the empty prefix last."""
    at = len(fqn)
    while (at := fqn.rfind(".", 0, at)) >= 0:
        yield fqn[:at], fqn[at + 1 :]
    yield "", fqn


def _tied_members(members: Mapping[str, object], aliases: Mapping[str, str]) -> set[str]:
    """Return the parameters of an optimizer that are tied names of another parameter of it."""
    tied = set()
    for alias, fqn in aliases.items():
        for path, name in _splits(alias):
            if name in members and fqn.startswith(path) and fqn[len(path) :].removeprefix(".") in members:
                tied.add(name)
    return tied


def _flatten(optimizer: State) -> None:
    """Replace the nested keys of an optimizer's state dict by flat ones."""
    by_name: Any = optimizer.pop("state")
    param_groups: Any = optimizer.pop("param_groups")
    for fqn, entries in by_name.items():
        optimizer |= {f"state.{fqn}.{key}": value for key, value in entries.items()}
    for group in param_groups:
        for fqn in group["params"]:
            optimizer |= {f"param_groups.{fqn}.{key}": value for key, value in group.items() if key != "params"}
