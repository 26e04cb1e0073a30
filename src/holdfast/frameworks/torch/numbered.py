"""An optimizer's own state dict, in which parameters go by number: given the names of the optimizer that takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.containers import put_together
from holdfast.frameworks.torch.optimizers import OptimizerView
from holdfast.spec.values import Group, TensorRef, Value


@dataclass(frozen=True, slots=True)
class ByName:
    """The same state by FQN."""

    group: Group
    """As if it had been saved by name."""

    aliases: Mapping[str, str]
    """Name of each tensor of the state by FQN, and the numbered one it is stored under."""


def numbered(saved: Value) -> dict[str, Value] | None:
    """Return a value if it is what `Optimizer.state_dict()` returns; else None."""
    items = saved.items if isinstance(saved, Group) and saved.kind == "dict" else saved
    if not isinstance(items, dict) or not isinstance(items.get("state"), dict):
        return None
    groups = items.get("param_groups")
    if not isinstance(groups, list):
        return None
    return items if all(isinstance(each, dict) and isinstance(each.get("params"), list) for each in groups) else None


def by_name(saved: Mapping[str, Value], view: OptimizerView, on_leaf: Callable[[Value], object]) -> ByName:
    """Return an optimizer's state dict by the names of an optimizer's parameters, matched as torch does: by position.

    Args:
        saved: The state dict, `TensorRef` for its tensors.
        view: The optimizer that takes it.
        on_leaf: Returns what a `TensorRef` among the hyperparameters stands for.
    Raises:
        InvalidError: The groups are not as many or as long.
    """
    groups, state = saved["param_groups"], saved["state"]
    assert isinstance(groups, list) and isinstance(state, dict)
    own = [group["params"] for group in view.optimizer.param_groups]
    if [len(each) for each in own] != [len(group["params"]) for group in groups]:
        raise InvalidError(
            f"{view.path}: groups of {[len(each) for each in own]} parameters, in the checkpoint of "
            f"{[len(group['params']) for group in groups]}; expected the same, since it holds numbers and no names. "
            "Group the parameters as they were saved"
        )
    found = Group("optimizer", {"hyperparameters": {}, "param_groups": {}, "state": {}})
    hyperparameters, members, values = found.items.values()
    assert isinstance(hyperparameters, dict) and isinstance(members, dict) and isinstance(values, dict)
    aliases: dict[str, str] = {}
    for at, (group, parameters) in enumerate(zip(groups, own, strict=True)):
        hyperparameters[str(at)] = {
            key: put_together(each, on_leaf) for key, each in group.items() if key not in ("params", "param_names")
        }
        for number, parameter in zip(group["params"], parameters, strict=True):
            name = view.names[parameter]
            members[name] = str(at)
            entries = state.get(number, {})
            for key, each in entries.items() if isinstance(entries, dict) else ():
                if isinstance(each, TensorRef):
                    aliases[view.state_fqn(name, key)] = each.fqn
                else:
                    values.setdefault(name, {})[key] = each
    return ByName(found, aliases)
