"""The values of a checkpoint under layouts: hyperparameters of optimizers go where their parameters go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.base.types.values import Group, Value
from holdfast.base.types.view import View
from holdfast.core.format.state_order import names_above
from holdfast.errors import InvalidError


def viewed_values(tree: Group, views: Sequence[View]) -> Group:
    """Return the values of a checkpoint as views make them; all but optimizers stay.

    Raises:
        InvalidError: Parameters with unlike hyperparameters become one.
    """
    for view in views:
        items = {key: _viewed(value, key, view.parameters) for key, value in tree.items.items()}
        before, after = view.keys
        if before != after:
            held = _group(items.pop(before, None) if before else None)
            there = _group(items.get(after)) if after else Group("dict", items)
            if held is None or there is None or there.items.keys() & held.items.keys():
                raise InvalidError(
                    f"the layout moves the values of {before or 'the top'} to {after or 'the top'}, where other values "
                    "have their names. Write other names in follow"
                )
            both = Group(held.kind, {**there.items, **held.items})
            items = {**items, after: both} if after else both.items
        emptied = names_above(view.made) - names_above(view.tensors) - names_above(view.aliases)
        tree = _without(Group(tree.kind, items), "", emptied)
    return tree


def _group(value: Value) -> Group | None:
    """Return a value as a group; None if the value is none."""
    if value is None:
        return Group("module")
    return value if isinstance(value, Group) else Group("dict", dict(value)) if isinstance(value, dict) else None


def _without(group: Group, path: str, emptied: set[str]) -> Group:
    """Leave out dicts and modules whose tensors have all gone elsewhere."""
    kept: dict[str, Value] = {}
    for key, value in group.items.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Group) and value.kind in ("dict", "module"):
            value = _without(value, inner, emptied)
            if not value.items and inner in emptied:
                continue
        kept[key] = value
    return Group(group.kind, kept)


def _viewed(value: Value, path: str, parameters: Mapping[str, tuple[str, ...]]) -> Value:
    if not isinstance(value, Group):
        return value
    if value.kind != "optimizer":
        return Group(value.kind, {key: _viewed(each, f"{path}.{key}", parameters) for key, each in value.items.items()})
    items = dict(value.items)
    for table in ("param_groups", "state"):
        entries = items.get(table)
        if isinstance(entries, dict):
            items[table] = _moved(entries, f"{path}.{table}", parameters)
    return Group(value.kind, items)


def _moved(entries: Mapping[str, Value], path: str, parameters: Mapping[str, tuple[str, ...]]) -> dict[str, Value]:
    moved: dict[str, Value] = {}
    first: dict[str, str] = {}
    for name, entry in entries.items():
        for new in parameters.get(name, (name,)):
            if new in moved and moved[new] != entry:
                raise InvalidError(
                    f"{path}: {first[new]} and {name} become {new}, with unlike hyperparameters; expected equal ones. "
                    "Load the model alone, or write a layout that keeps them apart"
                )
            moved.setdefault(new, entry)
            first.setdefault(new, name)
    return moved
