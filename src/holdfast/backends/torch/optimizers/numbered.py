"""Optimizer state dicts with numbered parameters, converted to the names of the optimizer that loads them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.backends.torch.containers import put_together
from holdfast.backends.torch.optimizers.state import LISTS_OF_MEMBERS, OptimizerView
from holdfast.backends.torch.subclasses.flatten import references_of, renamed
from holdfast.base.ports.framework import Catalog
from holdfast.base.types.values import Group, TensorRef, Value, is_subclass_record
from holdfast.errors import InvalidError, first_three


def numbered(saved: Value) -> dict[str, Value] | None:
    """Return a value if it has the form of `Optimizer.state_dict()`; else None."""
    items = saved.items if isinstance(saved, Group) and saved.kind == "dict" else saved
    if not isinstance(items, dict) or not isinstance(items.get("state"), dict | Group):
        return None
    groups = items.get("param_groups")
    if not isinstance(groups, list):
        return None
    members = [group.get("params") if isinstance(group, dict) else None for group in groups]
    is_numbered = all(isinstance(numbers, list) and {*map(type, numbers)} <= {int, str} for numbers in members)
    return items if is_numbered else None


def by_name(
    saved: Mapping[str, Value], view: OptimizerView, catalog: Catalog, on_leaf: Callable[[Value], object]
) -> tuple[Group, Mapping[str, str]]:
    """Return an optimizer's state dict as if it had been saved by name, and the stored name of each of its tensors.

    Parameters are matched by position, as torch does, unless the state dict holds their names.
    `torch.distributed.checkpoint.state_dict` writes names instead of numbers.

    Args:
        saved: The state dict.
        view: The optimizer that loads it.
        catalog: Lists its tensors, by number.
        on_leaf: Returns the object for a `TensorRef` among the hyperparameters.
    Raises:
        InvalidError: The groups differ in number or length, or hold other parameters.
    """
    groups, state = saved["param_groups"], saved["state"]
    parts = {name: view.names_of(parameter) for parameter, name in view.names.items() if id(parameter) in view.parts}
    assert isinstance(groups, list)
    fqns = _names_of(groups, view)
    hyperparameters: dict[str, Value] = {}
    members: dict[str, Value] = {}
    values: dict[str, Value] = {}
    empty_groups: dict[str, Value] = {}
    names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for position, (group, group_fqns) in enumerate(zip(groups, fqns, strict=True)):
        hyperparameters[str(position)] = {
            key: put_together(value, on_leaf) for key, value in group.items() if key not in LISTS_OF_MEMBERS
        }
        if not group_fqns:
            empty_groups[str(position)] = str(position)
        for number, name in zip(group["params"], group_fqns, strict=True):
            members |= dict.fromkeys(parts.get(name, (name,)), str(position))
            names[str(number)] = name
            entries = _entries(state, number)
            if kept := {key: value for key, value in entries.items() if not isinstance(value, TensorRef)}:
                values[name] = {
                    key: renamed(value, view.state_fqn(name, str(key))) if is_subclass_record(value) else value
                    for key, value in kept.items()
                }
                aliases |= _aliases_of_records(view, name, kept, catalog)
    tables = {"hyperparameters": hyperparameters, "param_groups": members, "state": values}
    aliases |= _aliases(view, names, catalog)
    _require_shapes(view, aliases, catalog)
    return Group("optimizer", {**tables, "empty_groups": empty_groups}), aliases


def _names_of(groups: list[Value], view: OptimizerView) -> list[list[str]]:
    """Return the FQNs of the parameters of each saved group: the saved names, or the names at the same position.

    An optimizer of named parameters saves their names beside the numbers. They are used if they are the names of this
    optimizer. Otherwise, for example behind a wrapper that adds a prefix, the position decides.
    """
    saved = [group["params"] for group in groups if isinstance(group, dict)]
    if all(type(member) is str for members in saved for member in members):
        return saved
    names = [group.get("param_names") for group in groups if isinstance(group, dict)]
    saved_names: list[list[Any]] = [members if isinstance(members, list) else [] for members in names]
    if list(map(len, saved_names)) == list(map(len, saved)) and _are_all(saved_names, view):
        return saved_names
    present = [[view.names[parameter] for parameter in parameters] for _, parameters in view.members.groups()]
    if list(map(len, present)) != list(map(len, saved)):
        raise InvalidError(
            f"{view.path}: groups of [{first_three(map(len, present))}] parameters, and of "
            f"[{first_three(map(len, saved))}] in the checkpoint; expected the same, since it holds numbers and no "
            "names. Group the parameters as they were saved"
        )
    known = set(view.names.values())
    for saved_group, group_fqns in zip(saved_names, present, strict=True):
        for name, fqn in zip(saved_group, group_fqns, strict=False):
            if name != fqn and type(name) is str and name in known:
                raise InvalidError(
                    f"{view.path}: at the position of {fqn} the checkpoint has {name}, another parameter of this job; "
                    "expected the same order, or the same names. Group the parameters as they were saved"
                )
    return present


def _are_all(groups: list[list[Any]], view: OptimizerView) -> bool:
    """Return whether names are those of all parameters of an optimizer, each once."""
    names = [name for members in groups for name in members]
    return all(type(name) is str for name in names) and Counter(names) == Counter(view.names.values())


_SHAPED_LIKE_PARAMETERS = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    "sum", "prev",
)  # fmt: skip
"""State of torch's own optimizers that has the parameter's shape."""


def _require_shapes(view: OptimizerView, aliases: Mapping[str, str], catalog: Catalog) -> None:
    """Refuse state of another parameter, since a position alone does not identify one.

    Raises:
        InvalidError: A state tensor has another shape than the parameter at its position.
    """
    if not type(view.optimizer).__module__.startswith("torch.optim."):
        return
    for parameter, name in view.names.items():
        if id(parameter) in view.declared or id(parameter) in view.elsewhere:
            continue
        for key in _SHAPED_LIKE_PARAMETERS:
            fqn = view.state_fqn(name, key)
            spec = catalog.tensors.get(aliases.get(fqn, ""))
            if spec is None or math.prod(spec.global_shape) == 1:
                continue
            # A parameter that has another shape now is told by the shape under its own name.
            saved = catalog.tensors.get(catalog.stored_fqn(view.whole_name(name)))
            if spec.global_shape not in (tuple(parameter.shape), saved and saved.global_shape):
                raise InvalidError(
                    f"{fqn}: the checkpoint has shape {spec.global_shape} at the position of this parameter, whose "
                    f"shape is {tuple(parameter.shape)}; expected the saved order. Group the parameters as they were"
                )


def _entries(state: Value, number: object) -> Mapping[str, Value]:
    """Return the state of a parameter; DCP writes its number as text."""
    items = state.items if isinstance(state, Group) else state
    assert isinstance(items, dict)
    entries = items.get(number, items.get(str(number)))
    entries = entries.items if isinstance(entries, Group) else entries
    return entries if isinstance(entries, dict) else {}


def _aliases_of_records(
    view: OptimizerView, name: str, entries: Mapping[str, Value], catalog: Catalog
) -> dict[str, str]:
    """Return the stored name of each inner tensor of the tensor subclasses in a parameter's state, by its name here."""
    return {
        f"{view.state_fqn(name, str(key))}.{inner}": catalog.stored_fqn(fqn)
        for key, record in entries.items()
        if is_subclass_record(record)
        for inner, fqn in references_of(record)
    }


def _aliases(view: OptimizerView, names: Mapping[str, str], catalog: Catalog) -> dict[str, str]:
    prefix = f"{view.path}.state."
    aliases: dict[str, str] = {}
    for fqn in (*catalog.tensors, *catalog.aliases):
        number, _, key = fqn.removeprefix(prefix).rpartition(".") if fqn.startswith(prefix) else ("", "", "")
        if number in names:
            aliases[view.state_fqn(names[number], key)] = catalog.stored_fqn(fqn)
    return aliases
