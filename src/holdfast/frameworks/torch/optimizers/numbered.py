"""An optimizer's state dict, in which parameters go by number: given the names of the optimizer that takes it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.containers import put_together
from holdfast.frameworks.torch.optimizers.state import OptimizerView
from holdfast.ports.framework import Catalog
from holdfast.types.values import Group, TensorRef, Value


@dataclass(frozen=True, slots=True)
class ByName:
    """The same state by FQN."""

    group: Group
    """As if it had been saved by name."""

    aliases: Mapping[str, str]
    """Name of each tensor of the state by FQN, and the numbered one it is stored under, which may be the same."""


def numbered(saved: Value) -> dict[str, Value] | None:
    """Return a value if it is what `Optimizer.state_dict()` returns; else None."""
    items = saved.items if isinstance(saved, Group) and saved.kind == "dict" else saved
    if not isinstance(items, dict) or not isinstance(items.get("state"), dict | Group):
        return None
    groups = items.get("param_groups")
    if not isinstance(groups, list):
        return None
    return items if all(isinstance(each, dict) and _are_numbers(each.get("params")) for each in groups) else None


def _are_numbers(members: Value) -> bool:
    return isinstance(members, list) and all(type(each) in (int, str) for each in members)


def by_name(
    saved: Mapping[str, Value], view: OptimizerView, catalog: Catalog, on_leaf: Callable[[Value], object]
) -> ByName:
    """Return an optimizer's state dict by the names of an optimizer's parameters.

    They are matched by position, as torch does, unless the state dict has their names beside.

    One that `torch.distributed.checkpoint.state_dict` made goes by name already.

    Args:
        saved: The state dict.
        view: The optimizer that takes it.
        catalog: Where its tensors are listed, by number.
        on_leaf: Returns what a `TensorRef` among the hyperparameters stands for.
    Raises:
        InvalidError: The groups are not as many or as long, or hold other parameters.
    """
    groups, state = saved["param_groups"], saved["state"]
    assert isinstance(groups, list)
    own = _names_of(groups, view)
    hyperparameters: dict[str, Value] = {}
    members: dict[str, Value] = {}
    values: dict[str, Value] = {}
    names: dict[str, str] = {}
    for at, (group, known) in enumerate(zip(groups, own, strict=True)):
        hyperparameters[str(at)] = {
            key: put_together(each, on_leaf) for key, each in group.items() if key not in ("params", "param_names")
        }
        for number, name in zip(group["params"], known, strict=True):
            members[name], names[str(number)] = str(at), name
            kept = {key: each for key, each in _entries(state, number).items() if not isinstance(each, TensorRef)}
            if kept:
                values[name] = kept
    group = {"hyperparameters": hyperparameters, "param_groups": members, "state": values}
    aliases = _aliases(view, names, catalog)
    _require_shapes(view, aliases, catalog)
    return ByName(Group("optimizer", group), aliases)


def _names_of(groups: list[Value], view: OptimizerView) -> list[list[str]]:
    """Return the FQNs of the parameters of each saved group: its own, or those that stand at the same place.

    An optimizer made of named parameters tells their names beside the numbers. They are gone by where they are this
    one's names; elsewhere, as behind a wrapper that puts something before each, by place.
    """
    saved = [group["params"] for group in groups if isinstance(group, dict)]
    if all(type(each) is str for members in saved for each in members):
        return saved
    names = [group.get("param_names") for group in groups if isinstance(group, dict)]
    told: list[list[Any]] = [each if isinstance(each, list) else [] for each in names]
    if list(map(len, told)) == list(map(len, saved)) and _are_all(told, view):
        return told
    own = [[view.names[parameter] for parameter in group["params"]] for group in view.optimizer.param_groups]
    if list(map(len, own)) != list(map(len, saved)):
        raise InvalidError(
            f"{view.path}: groups of {list(map(len, own))} parameters, in the checkpoint of {list(map(len, saved))}; "
            "expected the same, since it holds numbers and no names. Group the parameters as they were saved"
        )
    known = set(view.names.values())
    for theirs, here in zip(told, own, strict=True):
        for name, fqn in zip(theirs, here, strict=False):
            if name != fqn and type(name) is str and name in known:
                raise InvalidError(
                    f"{view.path}: in the place of {fqn} the checkpoint has {name}, which is another parameter here; "
                    "expected the same order, or the same names. Group the parameters as they were saved"
                )
    return own


def _are_all(told: list[list[Any]], view: OptimizerView) -> bool:
    """Return whether names are those of all the parameters of an optimizer, each once."""
    names = [each for names in told for each in names]
    return all(type(each) is str for each in names) and Counter(names) == Counter(view.names.values())


_SHAPED_LIKE_PARAMETERS = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    "sum", "prev",
)  # fmt: skip
"""State that optimizers of torch itself keep in the shape of the parameter."""


def _require_shapes(view: OptimizerView, aliases: Mapping[str, str], catalog: Catalog) -> None:
    """Refuse state that is of another parameter, which the place it stands at cannot tell.

    Raises:
        InvalidError: A tensor has another shape than the parameter at its place.
    """
    if not type(view.optimizer).__module__.startswith("torch.optim."):
        return
    for parameter, name in view.names.items():
        if id(parameter) in view.declared or id(parameter) in view.elsewhere:
            continue
        for key in _SHAPED_LIKE_PARAMETERS:
            fqn = view.state_fqn(name, key)
            spec = catalog.tensors.get(aliases.get(fqn, ""))
            if spec is not None and math.prod(spec.global_shape) > 1 and spec.global_shape != tuple(parameter.shape):
                raise InvalidError(
                    f"{fqn}: the checkpoint has shape {spec.global_shape} at the place of this parameter, whose shape "
                    f"is {tuple(parameter.shape)}; expected parameters in the order in which they were saved"
                )


def _entries(state: Value, number: object) -> Mapping[str, Value]:
    """Return what is kept of a parameter; DCP writes its number as text."""
    items = state.items if isinstance(state, Group) else state
    assert isinstance(items, dict)
    found = items.get(number, items.get(str(number)))
    found = found.items if isinstance(found, Group) else found
    return found if isinstance(found, dict) else {}


def _aliases(view: OptimizerView, names: Mapping[str, str], catalog: Catalog) -> dict[str, str]:
    prefix = f"{view.path}.state."
    found: dict[str, str] = {}
    for fqn in (*catalog.tensors, *catalog.aliases):
        number, _, key = fqn.removeprefix(prefix).rpartition(".") if fqn.startswith(prefix) else ("", "", "")
        if number in names:
            found[view.state_fqn(names[number], key)] = catalog.aliases.get(fqn, fqn)
    return found
