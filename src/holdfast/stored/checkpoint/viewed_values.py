"""The values of a checkpoint under layouts: hyperparameters of optimizers go where their parameters go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.base.types.values import Group, Value
from holdfast.base.types.view import View
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
            model = items.pop(before, None) if before else None
            held = model if isinstance(model, Group) else Group("module")
            items = {**items, **({after: held} if after else held.items)}
        tree = Group(tree.kind, items)
    return tree


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
