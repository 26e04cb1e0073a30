"""Optimizers that hold others inside: which of them steps a parameter and keeps its state.

A container or wrapper is an optimizer by its class, but the optimizers inside it hold the moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.errors import InvalidError

_INSIDE = ("optimizers", "optimizer", "base_optimizer")
"""Attributes under which wrappers hold optimizers. They may be properties, which `vars` does not list."""

OF_THE_BASE_CLASS = ("state", "param_groups", "defaults")
"""Attributes that hold what the base class of all optimizers keeps."""


class OptimizerMembers:
    """An optimizer and those inside it that step its parameters, the inner ones first.

    One of several with the same `state` is enough: a wrapper such as Accelerate's shares that of the optimizer inside.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._members, self._lacking = _members_of(optimizer)
        own = getattr(optimizer, "state", None)
        self.keep_state_inside = len(self._members) > 1 or self._members[0].state is not own
        """Whether an optimizer inside holds state that the outer one does not share."""
        self.is_one = len(self._members) == 1
        """Whether one optimizer keeps all state."""
        several = () if self.is_one else self._members
        self._parameters = [{id(parameter): parameter for parameter in parameters_of(member)} for member in several]
        """Parameters of each of several members, by identity."""

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._members)

    def require_whole(self, path: str) -> None:
        """Refuse an optimizer whose groups lack parameters that an optimizer inside it steps.

        Args:
            path: Path of the optimizer in the state, for the message.
        Raises:
            InvalidError: The state of an optimizer inside it would be left out.
        """
        if self._lacking:
            optimizer, inner = self._optimizer, self._lacking[0]
            held, stepped = (sum(1 for _ in parameters_of(each)) for each in (optimizer, inner))
            raise InvalidError(
                f"{path}: {type(inner).__name__} inside {type(optimizer).__name__} steps {stepped} parameters, and "
                f"the groups of {type(optimizer).__name__} hold {held}, not all of them; expected every parameter that "
                "is stepped inside. Add the others to its param_groups, or pass the optimizers inside it one by one"
            )

    def groups(self) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Return the parameter groups, each with its parameters.

        A parameter belongs to the group of its innermost optimizer: that one steps it.
        """
        if self.is_one:
            return [(group, group["params"]) for group in self._members[0].param_groups]
        found: dict[int, tuple[dict[str, Any], list[torch.Tensor]]] = {}
        known: set[int] = set()
        for member, parameters in zip(self._members, self._parameters, strict=True):
            for group in member.param_groups:
                first = [parameter for parameter in group["params"] if id(parameter) not in known]
                if first or not group["params"]:
                    found.setdefault(id(group), (group, first))
            known |= parameters.keys()
        return list(found.values())

    def steppers(self) -> list[Optimizer]:
        """Return the innermost optimizer of each parameter, each once."""
        if self.is_one:
            return [self._members[0]]
        known: set[int] = set()
        found = []
        for member, parameters in zip(self._members, self._parameters, strict=True):
            if not parameters.keys() <= known:
                found.append(member)
            known |= parameters.keys()
        return found

    def keys_of_state(self) -> Iterator[object]:
        """Yield the keys of all state; they should be parameters."""
        return chain.from_iterable(member.state for member in self._members)

    def state_of(self, parameter: torch.Tensor, path: str = "") -> Mapping[Any, object]:
        """Return the state of a parameter, of all optimizers that keep some.

        Args:
            parameter: The parameter.
            path: Path of the optimizer in the state, for the message.
        Raises:
            InvalidError: Two optimizers keep different state under one key.
        """
        if self.is_one:
            state: Mapping[Any, object] = self._members[0].state.get(parameter, {})
            return state
        merged: dict[Any, object] = {}
        for member in self._members:
            for key, value in member.state.get(parameter, {}).items():
                if merged.setdefault(key, value) is not value:
                    raise InvalidError(
                        f"{path}: {type(member).__name__} and an optimizer inside it keep different state {key!r} of "
                        "one parameter; expected one. Pass the optimizers one by one"
                    )
        return merged

    def keys_beside(self, parameter: torch.Tensor, key: str) -> set[object]:
        """Return the keys of a parameter's state that the optimizer keeps which keeps `key`."""
        kept = [member.state.get(parameter, {}) for member in self._members]
        return {each for state in kept if key in state for each in state}

    def keepers(self, path: str) -> dict[str, int]:
        """Return which optimizer keeps each key of the state, without the keys that the innermost ones keep.

        The optimizers of one parameter are counted from the innermost, 0. A load needs this: a new optimizer has no
        state yet that shows where it keeps which key.

        Raises:
            InvalidError: One key has different places for different parameters.
        """
        places: dict[str, int] = {}
        for parameter in {key: key for known in self._parameters for key in known.values()}:
            for place, member in enumerate(self._holders(parameter)):
                for key in member.state.get(parameter, {}):
                    if places.setdefault(key, place) != place:
                        raise InvalidError(
                            f"{path}: an outer optimizer keeps the state {key!r} of one parameter, and an inner one "
                            "that of another; expected one place. Pass the optimizers one by one"
                        )
        return {key: place for key, place in places.items() if place}

    def set_state(self, parameter: torch.Tensor, state: Mapping[str, object], keepers: Mapping[str, object]) -> None:
        """Set the whole state of a parameter, each key where it is now, else where `keepers` says."""
        holders = self._holders(parameter)
        parts: list[dict[str, object]] = [{} for _ in holders]
        for key, value in state.items():
            present = [place for place, member in enumerate(holders) if key in member.state.get(parameter, {})]
            stated = keepers.get(key)
            place = present[0] if present else stated if isinstance(stated, int) and 0 < stated < len(holders) else 0
            parts[place][key] = value
        for member, part in zip(holders, parts, strict=True):
            if part:
                member.state[parameter] = part
            else:
                member.state.pop(parameter, None)

    def _holders(self, parameter: torch.Tensor) -> list[Optimizer]:
        """Return the optimizers that have a parameter, the innermost first."""
        if self.is_one:
            return [self._members[0]]
        pairs = zip(self._members, self._parameters, strict=True)
        return [member for member, parameters in pairs if id(parameter) in parameters]


def _members_of(optimizer: Optimizer) -> tuple[tuple[Optimizer, ...], tuple[Optimizer, ...]]:
    """Return an optimizer and all inside it that step its parameters, the inner ones first, one for each `state`.

    Optimizers that step other parameters, as one that is only referred to, do not count.

    Returns:
        These optimizers, and those inside it that also step parameters which its groups lack.
    """
    inside = [*directly_inside(optimizer)]
    if not inside:
        return (optimizer,), ()
    parameters = {id(parameter) for parameter in parameters_of(optimizer)}
    members: dict[int, Optimizer] = {}
    visited: dict[int, Optimizer] = {}
    lacking: list[Optimizer] = []

    def visit(member: Optimizer) -> None:
        visited[id(member)] = member
        for inner in directly_inside(member):
            if id(inner) in visited:
                continue
            stepped = {id(parameter) for parameter in parameters_of(inner)}
            if stepped <= parameters:
                visit(inner)
            elif not parameters or stepped & parameters:
                lacking.append(inner)
        if (state := getattr(member, "state", None)) is not None:
            members.setdefault(id(state), member)

    visit(optimizer)
    return tuple(members.values()), tuple(lacking)


def directly_inside(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers in the attributes of an optimizer; one may come twice."""
    attributes = [value for name, value in vars(optimizer).items() if name not in OF_THE_BASE_CLASS]
    for value in (*(getattr(optimizer, name, None) for name in _INSIDE), *attributes):
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (each for each in values if isinstance(each, Optimizer) and each is not optimizer)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters in the groups of an optimizer."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]
