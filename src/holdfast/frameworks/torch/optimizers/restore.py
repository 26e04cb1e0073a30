"""Fills an optimizer by FQN: hyperparameters, state in place, and state that it has not allocated yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from holdfast.errors import CorruptError, InvalidError
from holdfast.frameworks.torch.containers import put_together
from holdfast.frameworks.torch.optimizers.state import OptimizerView, new_state_tensor
from holdfast.frameworks.torch.tensors import torch_dtype
from holdfast.geometry.sharded import Sharded
from holdfast.ports.framework import Catalog
from holdfast.types.values import Group, TensorRef, Value


class TensorTaker(Protocol):
    """The load that fills tensors and records names; `TorchRestoration` is one."""

    missing: list[str]
    unexpected: list[str]

    def want(self, fqn: str, tensor: torch.Tensor, declared: Sharded | None = None) -> bool:
        """Ask for a tensor to be filled; return whether the checkpoint has it."""
        ...

    def take(self, reference: TensorRef, template: object) -> torch.Tensor:
        """Return the tensor to fill for a reference in a container."""
        ...

    def pass_over(self, fqn: str) -> None:
        """Record that a stored tensor is not needed."""
        ...

    def takes_part(self, name: str) -> bool:
        """Return whether `only` and `skip` select a name; record it as skipped if not."""
        ...


class OptimizerRestoration:
    """The load of one optimizer."""

    def __init__(
        self,
        view: OptimizerView,
        saved: Group,
        taker: TensorTaker,
        catalog: Catalog,
        tensors: Iterable[str] | None = None,
    ) -> None:
        """Ask for the optimizer's tensors.

        Args:
            view: The optimizer.
            saved: Its saved values.
            taker: The load.
            catalog: The checkpoint's tensors.
            tensors: Names of its state's tensors, if names of the catalog are numbered; None: the catalog's names.
        """
        self._view, self._taker = view, taker
        self._masters = set(catalog.masters.values())
        self._members = _mapping(saved, "param_groups")
        self._hyperparameters = _mapping(saved, "hyperparameters")
        self._values = _mapping(saved, "state")
        self._keepers = _mapping(saved, "keepers") if "keepers" in saved.items else {}
        self._empty_groups = _mapping(saved, "empty_groups") if "empty_groups" in saved.items else {}
        listed = (*catalog.tensors, *catalog.aliases) if tensors is None else tensors
        self._stored = _stored_by_name(listed, f"{view.path}.state.", self._values)
        self._groups: list[tuple[dict[str, object], dict[str, object]]] = []
        self._states: list[tuple[torch.Tensor, dict[str, object]]] = []
        for position, (group, parameters) in enumerate(view.members.groups()):
            self._group(group, parameters)
            if not parameters:
                self._empty_group(group, str(position))
            for parameter in parameters:
                self._state(parameter, group, catalog)
        known = set(view.names.values())
        for name in self._members:
            if name not in known and self._is_of_tie(name, catalog):
                for key in self._stored.get(name, ()):
                    taker.pass_over(view.state_fqn(name, key))
            elif name not in known and taker.takes_part(f"{view.path}.param_groups.{name}"):
                taker.unexpected.append(f"{view.path}.param_groups.{name}")

    def _is_of_tie(self, name: str, catalog: Catalog) -> bool:
        """Return whether a name is tied to a parameter of this optimizer, with equal state and hyperparameters."""
        tied = self._view.ties.get(name)
        if tied is None or self._members.get(tied) != self._members[name]:
            return False
        keys = self._stored.get(name, [])
        if sorted(keys) != sorted(self._stored.get(tied, [])):
            return False
        for key in keys:
            first, second = self._view.state_fqn(tied, key), self._view.state_fqn(name, key)
            if not catalog.same_content(catalog.aliases.get(first, first), catalog.aliases.get(second, second)):
                return False
        return True

    def finish(self) -> None:
        """Set hyperparameters and state."""
        for group, values in self._groups:
            group.update(values)
        for parameter, state in self._states:
            self._view.members.set_state(parameter, state, self._keepers)

    def _group(self, group: dict[str, object], parameters: Iterable[torch.Tensor]) -> None:
        """Choose a group's hyperparameters.

        Raises:
            InvalidError: The checkpoint holds different ones for its parameters.
        """
        chosen: dict[str, Value] | None = None
        chosen_name = ""
        for parameter in parameters:
            name = self._view.names[parameter]
            path = f"{self._view.path}.param_groups.{name}"
            if not self._taker.takes_part(path):
                continue
            key = self._members.get(name)
            values = self._hyperparameters.get(str(key)) if key is not None else None
            if not isinstance(values, dict):
                # A frozen parameter is never stepped, and DeepSpeed leaves it out of its optimizer.
                if key is not None or parameter.requires_grad or self._view.members.state_of(parameter):
                    self._taker.missing.append(path)
                continue
            if chosen is None:
                chosen, chosen_name = values, name
            elif chosen is not values:
                self._require_same(chosen_name, chosen, name, values)
        if chosen is not None:
            self._groups.append((group, self._hyperparameters_of(chosen)))

    def _empty_group(self, group: dict[str, object], position: str) -> None:
        """Choose the hyperparameters of a group without parameters: those of the empty group at its position."""
        values = self._hyperparameters.get(str(self._empty_groups.get(position)))
        if isinstance(values, dict) and self._taker.takes_part(f"{self._view.path}.param_groups.{position}"):
            self._groups.append((group, self._hyperparameters_of(values)))

    def _hyperparameters_of(self, values: dict[str, Value]) -> dict[str, object]:
        if "params" in values:
            raise CorruptError(
                f"{self._view.path}.param_groups: the hyperparameters hold params; expected none. Read another copy"
            )
        return {key: put_together(value, lambda leaf: leaf) for key, value in values.items()}

    def _require_same(self, first: str, chosen: dict[str, Value], second: str, values: dict[str, Value]) -> None:
        for key in sorted(chosen.keys() | values.keys()):
            if _written(chosen.get(key)) != _written(values.get(key)):
                raise InvalidError(
                    f"{self._view.path}.param_groups: one group holds {first} with {key}={_written(chosen.get(key))} "
                    f"and {second} with {key}={_written(values.get(key))} in the checkpoint; "
                    "expected one value per group. Group the parameters as they were saved"
                )

    def _state(self, parameter: torch.Tensor, group: Mapping[str, object], catalog: Catalog) -> None:
        view, name = self._view, self._view.names[parameter]
        if name not in self._members:
            return
        present = view.members.state_of(parameter, view.path)
        state: dict[str, object] = {}
        for key in self._stored.get(name, ()):
            fqn = view.state_fqn(name, key)
            if not self._taker.takes_part(fqn):
                continue
            stored = catalog.aliases.get(fqn, fqn)
            if stored in self._masters and key not in present:
                # This optimizer keeps no master copy.
                continue
            spec = catalog.tensors[stored]
            local_shape = view.local_shape(parameter, spec.global_shape)
            tensor = present.get(key)
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != local_shape:
                catalog.require_stored(stored)
                tensor = new_state_tensor(parameter, group, key, torch_dtype(spec.dtype), local_shape)
            self._taker.want(fqn, tensor, view.declared_for(parameter, tensor))
            state[key] = tensor
        values = self._values.get(name)
        for key, value in values.items() if isinstance(values, dict) else ():
            if self._taker.takes_part(view.state_fqn(name, key)):
                state[key] = put_together(value, self._leaf)
        saved_keys = {*self._stored.get(name, ()), *(values if isinstance(values, dict) else ())}
        for key, value in present.items():
            if key in state:
                continue
            fqn = view.state_fqn(name, key)
            if not self._taker.takes_part(fqn):
                state[key] = value
            elif saved_keys if view.members.is_one else saved_keys & view.members.keys_beside(parameter, key):
                # The checkpoint has state of this parameter, but not this entry, without which a step would fail.
                # Of several optimizers the one that keeps the entry was stepped, or had no state yet.
                self._taker.missing.append(fqn)
                state[key] = value
        if id(parameter) not in view.elsewhere:
            self._states.append((parameter, state))

    def _leaf(self, leaf: Value) -> object:
        return self._taker.take(leaf, None) if isinstance(leaf, TensorRef) else leaf


def _written(value: Value) -> str:
    """Return the `repr` of a hyperparameter, by which two are compared.

    Raises:
        InvalidError: It holds an integer that is too long for Python to convert to decimal.
    """
    try:
        return repr(value)
    except ValueError as error:
        raise InvalidError(f"a hyperparameter cannot be compared: {error}; group the parameters as saved") from error


def _mapping(saved: Group, name: str) -> dict[str, Value]:
    mapping = saved.items.get(name)
    if not isinstance(mapping, dict):
        raise InvalidError(f"the checkpoint's optimizer has no {name}; expected one saved by Holdfast, skip= it")
    return mapping


def _stored_by_name(listed: Iterable[str], prefix: str, values: Mapping[str, Value]) -> dict[str, list[str]]:
    """Return the keys of each parameter's state tensors that are not inside a container, by parameter FQN."""
    inside = {ref.fqn for value in values.values() for ref in _references(value)}
    stored: dict[str, list[str]] = defaultdict(list)
    for fqn in listed:
        if fqn.startswith(prefix) and fqn not in inside:
            name, _, key = fqn.removeprefix(prefix).rpartition(".")
            stored[name].append(key)
    return stored


def _references(value: Value) -> list[TensorRef]:
    if isinstance(value, TensorRef):
        return [value]
    if isinstance(value, dict):
        return [ref for entry in value.values() for ref in _references(entry)]
    if isinstance(value, list | tuple):
        return [ref for item in value for ref in _references(item)]
    return []
