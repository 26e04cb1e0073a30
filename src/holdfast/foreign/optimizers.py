"""The part of an optimizer that is not tensors, as a state saved by Holdfast has it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from holdfast.types.values import Group, Value

_NOT_A_HYPERPARAMETER = "params"
"""What torch's state dicts list beside them: numbers of parameters, which say nothing outside that file."""


def optimizer_group(
    hyperparameters: Mapping[str, Mapping[str, Value]], values: Mapping[str, Mapping[str, Value]]
) -> Group:
    """Return the group of kind `optimizer` from which a torch optimizer is loaded.

    Args:
        hyperparameters: By FQN of a parameter, those of its parameter group; every parameter of the optimizer has an
            entry, an empty one where nothing is known. `params` is left out.
        values: By FQN, what the parameter's state holds besides tensors that stand in it directly.
    """
    kept: dict[str, Value] = {}
    members: dict[str, Value] = {}
    known: dict[int, str] = {}
    for fqn, found in hyperparameters.items():
        content = known.get(id(found))
        if content is None:
            own = {name: value for name, value in found.items() if name != _NOT_A_HYPERPARAMETER}
            # Equal ones are kept once, under a key made of their content, so that groups need no numbers.
            text = repr(own).encode("utf-8", "backslashreplace")
            content = known[id(found)] = hashlib.blake2b(text, digest_size=8).hexdigest()
            kept.setdefault(content, own)
        members[fqn] = content
    state: dict[str, Value] = {fqn: dict(found) for fqn, found in values.items() if found}
    return Group("optimizer", {"hyperparameters": kept, "param_groups": members, "state": state})
