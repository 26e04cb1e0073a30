"""The values of a checkpoint that are not tensors, as plain nested dicts."""

from __future__ import annotations

from holdfast.base.types.values import Group, Value
from holdfast.errors import CorruptError


def to_plain(value: Value, path: str) -> object:
    """Return a node as plain nested dicts.

    Raises:
        CorruptError: A group lacks a field of its kind.
    """
    if not isinstance(value, Group):
        return value
    if value.kind == "stateful":
        return to_plain(value.items.get("state"), path)
    if value.kind == "optimizer":
        tables = value.items.get("hyperparameters")
        members = value.items.get("param_groups")
        if not isinstance(tables, dict) or not isinstance(members, dict):
            raise CorruptError(f"{path}: an optimizer without hyperparameters or param_groups. Read another copy")
        if not all(isinstance(key, str) for key in members.values()):
            raise CorruptError(f"{path}.param_groups: expected keys of hyperparameters. Read another copy")
        groups = {name: tables.get(key) for name, key in members.items()}
        return {"param_groups": groups, "state": value.items.get("state", {})}
    return {key: to_plain(item, f"{path}.{key}") for key, item in value.items.items()}
