"""Recognises optimizer state in the layouts of PyTorch's `get_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.base.types.values import TensorRef, Value

_STATE, _GROUPS = "state.", "param_groups."


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """The state of an optimizer by parameter name."""

    hyperparameters: Mapping[str, Mapping[str, Value]]
    """Hyperparameters of the group of each parameter, by FQN."""

    values: Mapping[str, Mapping[str, Value]]
    """State of each parameter that is not a single tensor, by FQN."""

    names: frozenset[str]
    """FQNs of all parameters with state, tensors included."""


def nested_optimizer(value: Mapping[object, Value]) -> NamedOptimizer | None:
    """Return the optimizer of `{"state": {fqn: …}, "param_groups": [{"params": [fqn, …], …}]}`, else None."""
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
        shared = {name: entry for name, entry in group.items() if name != "params"}
        hyperparameters.update(dict.fromkeys(names, shared))
    values: dict[str, Mapping[str, Value]] = {}
    for fqn, entries in state.items():
        if type(fqn) is not str or not isinstance(entries, dict):
            return None
        plain = {name: entry for name, entry in entries.items() if not isinstance(entry, TensorRef)}
        if plain:
            values[fqn] = plain
    return NamedOptimizer(hyperparameters, values, frozenset(state))


def flattened_optimizer(value: Mapping[object, Value]) -> NamedOptimizer | None:
    """Return the optimizer of `{"state.<fqn>.<name>": …, "param_groups.<fqn>.<name>": …}`, else None.

    `flatten_optimizer_state_dict=True` and torchtitan write this layout. An FQN contains dots, so a key of the state is
    ambiguous; the names of hyperparameters have no dots, so the keys of the groups give the FQNs.
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
    for key, entry in value.items():
        assert isinstance(key, str)
        if not key.startswith(_STATE):
            continue
        fqn, path = _split(key.removeprefix(_STATE), hyperparameters)
        names.add(fqn)
        if len(path) > 1 or not isinstance(entry, TensorRef):
            _put(values.setdefault(fqn, {}), path, entry)
    return NamedOptimizer(hyperparameters, values, frozenset(names))


def _split(key: str, fqns: Mapping[str, object]) -> tuple[str, list[str]]:
    """Return the longest known FQN at the start of a key, and the names after it."""
    at = len(key)
    while (at := key.rfind(".", 0, at)) >= 0:
        if key[:at] in fqns:
            return key[:at], key[at + 1 :].split(".")
    fqn, _, name = key.rpartition(".")
    return fqn, [name]


def _put(values: dict[str, Value], path: list[str], value: Value) -> None:
    """Store a value under nested names. If a value blocks the path, store it under the joined rest of the names."""
    for at, name in enumerate(path[:-1]):
        below = values.setdefault(name, {})
        if not isinstance(below, dict):
            values[".".join(path[at:])] = value
            return
        values = below
    values[path[-1]] = value
