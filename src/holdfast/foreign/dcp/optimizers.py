"""Optimizer state as PyTorch's `get_state_dict` lays it out, told from other dicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.types.values import TensorRef, Value

_STATE, _GROUPS = "state.", "param_groups."


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer by name of its parameters."""

    hyperparameters: Mapping[str, Mapping[str, Value]]
    """By FQN of a parameter, those of its group."""

    values: Mapping[str, Mapping[str, Value]]
    """By FQN, what of its state is not a tensor by itself."""

    names: frozenset[str]
    """FQNs of all parameters that have state, tensors included."""


def nested_optimizer(value: Mapping[object, Value]) -> NamedOptimizer | None:
    """Return an optimizer out of `{"state": {fqn: …}, "param_groups": [{"params": [fqn, …], …}]}`, else None."""
    groups, state = value.get("param_groups"), value.get("state", {})
    if not isinstance(groups, list) or not isinstance(state, dict) or not value.keys() <= {"state", "param_groups"}:
        return None
    hyperparameters: dict[str, Mapping[str, Value]] = {}
    for group in groups:
        if not isinstance(group, dict) or not all(type(name) is str for name in group):
            return None
        names = group.get("params")
        if not isinstance(names, list) or not all(type(name) is str for name in names):
            return None
        shared = {name: each for name, each in group.items() if name != "params"}
        hyperparameters.update(dict.fromkeys(names, shared))
    if not all(type(fqn) is str and isinstance(entries, dict) for fqn, entries in state.items()):
        return None
    values = {
        fqn: {name: each for name, each in entries.items() if not isinstance(each, TensorRef)}
        for fqn, entries in state.items()
    }
    return NamedOptimizer(hyperparameters, {fqn: kept for fqn, kept in values.items() if kept}, frozenset(state))


def flattened_optimizer(value: Mapping[object, Value]) -> NamedOptimizer | None:
    """Return an optimizer out of `{"state.<fqn>.<name>": …, "param_groups.<fqn>.<name>": …}`, else None.

    So `flatten_optimizer_state_dict=True` has it, and torchtitan. An FQN has dots itself: which part of a key it is,
    the groups tell, whose names have none.
    """
    hyperparameters: dict[str, dict[str, Value]] = {}
    for key in value:
        if not isinstance(key, str) or not key.startswith((_STATE, _GROUPS)):
            return None
        if key.startswith(_GROUPS):
            fqn, _, name = key.removeprefix(_GROUPS).rpartition(".")
            hyperparameters.setdefault(fqn, {})[name] = value[key]
    if not hyperparameters:
        return None
    values: dict[str, dict[str, Value]] = {}
    names: set[str] = set()
    for key, each in value.items():
        assert isinstance(key, str)
        if not key.startswith(_STATE):
            continue
        fqn, path = _parted(key.removeprefix(_STATE), hyperparameters)
        names.add(fqn)
        if len(path) > 1 or not isinstance(each, TensorRef):
            _put(values.setdefault(fqn, {}), path, each)
    return NamedOptimizer(hyperparameters, values, frozenset(names))


def _parted(key: str, fqns: Mapping[str, object]) -> tuple[str, list[str]]:
    """Return the longest FQN that a key begins with, and the names after it."""
    fqn, path = key, list[str]()
    while "." in fqn:
        fqn, _, name = fqn.rpartition(".")
        path.insert(0, name)
        if fqn in fqns:
            return fqn, path
    fqn, _, name = key.rpartition(".")
    return fqn, [name]


def _put(values: dict[str, Value], path: list[str], value: Value) -> None:
    """Put a value where nested names lead; where something else stands already, under the rest of its name."""
    for at, name in enumerate(path[:-1]):
        below = values.setdefault(name, {})
        if not isinstance(below, dict):
            values[".".join(path[at:])] = value
            return
        values = below
    values[path[-1]] = value
