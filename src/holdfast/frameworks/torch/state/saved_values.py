"""What a checkpoint has under a name of the state: its entries."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.types.values import Group, Value


def children_of(saved: Value) -> Mapping[str, Value]:
    """Return the entries of a saved value by name; the items of a list or tuple by number."""
    if isinstance(saved, Group):
        return saved.items
    if isinstance(saved, dict):
        return {key: value for key, value in saved.items() if isinstance(key, str)}
    if isinstance(saved, list | tuple):
        return {str(number): item for number, item in enumerate(saved)}
    return {}
