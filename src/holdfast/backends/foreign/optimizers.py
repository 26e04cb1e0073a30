"""Builds the non-tensor state of an optimizer in the form that Holdfast saves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from holdfast.base.types.values import Group, Value

_NOT_A_HYPERPARAMETER = "params"
"""Key of torch's state dicts that lists numbers of parameters, which are meaningless outside that file."""


def optimizer_group(
    hyperparameters: Mapping[str, Mapping[str, Value]], values: Mapping[str, Mapping[str, Value]]
) -> Group:
    """Return the group of kind `optimizer` that a torch optimizer loads.

    Args:
        hyperparameters: Hyperparameters of the group of each parameter, by FQN; empty if unknown. Every parameter of
            the optimizer has an entry. `params` is left out.
        values: State of each parameter by FQN, without tensors that are direct entries.
    """
    by_content: dict[str, Value] = {}
    members: dict[str, Value] = {}
    known: dict[int, str] = {}
    for fqn, shared in hyperparameters.items():
        if id(shared) not in known:
            plain = {name: value for name, value in shared.items() if name != _NOT_A_HYPERPARAMETER}
            # The key is a hash of the content, so groups need no numbers and equal groups are stored once.
            text = repr(plain).encode("utf-8", "backslashreplace")
            content = known[id(shared)] = hashlib.blake2b(text, digest_size=8).hexdigest()
            by_content.setdefault(content, plain)
        members[fqn] = known[id(shared)]
    state: dict[str, Value] = {fqn: dict(entries) for fqn, entries in values.items() if entries}
    return Group("optimizer", {"hyperparameters": by_content, "param_groups": members, "state": state})
