"""Fills an optimizer by FQN: hyperparameters, state in place, and state that is not allocated yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.containers import plain_leaf, put_together, tensors_in
from holdfast.backends.torch.optimizers.forms import StateForms
from holdfast.backends.torch.optimizers.kinds import SWITCHES, SavedState, misfit_of
from holdfast.backends.torch.optimizers.parts import ParameterPart
from holdfast.backends.torch.optimizers.state import (
    LISTS_OF_MEMBERS,
    OptimizerView,
    new_state_tensor,
    shape_of_state,
)
from holdfast.backends.torch.subclasses.flatten import references_of
from holdfast.backends.torch.subclasses.make import new_subclass
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.ports.framework import Catalog, Misfit, Selection
from holdfast.base.types.manifest import OptimizerRecord
from holdfast.base.types.values import FrameworkValue, Group, TensorRef, Value, is_subclass_record
from holdfast.errors import CorruptError, InvalidError, first_three


class TensorTaker(Protocol):
    """The load that fills tensors and records names; `TorchRestoration` is one."""

    missing: list[str]
    unexpected: list[str]
    misfits: list[Misfit]

    def want(
        self, fqn: str, tensor: torch.Tensor, declared: Sharded | None = None, *, parameter: Sequence[str] = ()
    ) -> bool:
        """Ask for a tensor to be filled; return whether the checkpoint has it."""
        ...

    def take(self, reference: TensorRef, template: object) -> torch.Tensor:
        """Return the tensor to fill for a reference in a container."""
        ...

    def take_subclass(self, record: FrameworkValue, current: Mapping[str, object]) -> torch.Tensor:
        """Return the tensor to fill for the record of a tensor subclass in a container."""
        ...

    def pass_over(self, fqn: str) -> None:
        """Record that a stored tensor is not needed."""
        ...

    def takes_part(self, name: str) -> bool:
        """Return whether `only` and `skip` select a name; record any other name as skipped."""
        ...


@dataclass(slots=True)
class _WantedState:
    """The state that one parameter gets."""

    parameter: torch.Tensor
    group: Mapping[str, object]
    entries: dict[str, object] = field(default_factory=dict)
    filled: dict[str, set[str]] = field(default_factory=dict)
    """Parts that fill each tensor, by name; an empty name fills the whole tensor."""


class OptimizerRestoration:
    """The load of one optimizer."""

    def __init__(
        self,
        view: OptimizerView,
        saved: Group,
        taker: TensorTaker,
        catalog: Catalog,
        tensors: Iterable[str] | None = None,
        *,
        selection: Selection,
    ) -> None:
        """Ask for the optimizer's tensors.

        Args:
            view: The optimizer.
            saved: The saved values of the optimizer.
            taker: The load.
            catalog: The checkpoint's tensors.
            tensors: Names of the tensors of the state, if the catalog has numbers for names; None: the catalog's names.
            selection: Whether to set the hyperparameters, and to convert dtypes.
        """
        self._view, self._taker = view, taker
        self._sets_hyperparameters = selection.hyperparameters
        self._forms = StateForms(view, catalog, casts=selection.cast)
        self._masters = set(catalog.masters.values())
        self._members = _mapping(saved, "param_groups")
        self._hyperparameters = _mapping(saved, "hyperparameters")
        self._values = _mapping(saved, "state")
        self._keepers = _mapping(saved, "keepers") if "keepers" in saved.items else {}
        self._empty_groups = _mapping(saved, "empty_groups") if "empty_groups" in saved.items else {}
        listed = (*catalog.tensors, *catalog.aliases) if tensors is None else tensors
        self._stored = _stored_by_name(listed, f"{view.path}.state.", self._values)
        self._groups: list[tuple[dict[str, object], dict[str, object]]] = []
        self._switched: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        """Groups by hyperparameter, value in the optimizer, and value in the checkpoint."""
        self._states: list[tuple[torch.Tensor, dict[str, object]]] = []
        self._takes_state = False
        self._new: dict[tuple[object, ...], torch.Tensor] = {}
        """New tensors in containers, by stored name, device and layout."""
        for position, (group, parameters) in enumerate(view.members.groups()):
            self._group(group, parameters, position)
            if not parameters:
                self._empty_group(group, position)
            for parameter in parameters:
                self._state(parameter, group, catalog)
        known = {*view.names.values(), *(part.name for parts in view.parts.values() for part in parts)}
        for name in self._members:
            if name not in known and self._is_of_tie(name, catalog):
                for key in self._stored.get(name, ()):
                    taker.pass_over(view.state_fqn(name, key))
            elif name not in known and taker.takes_part(f"{view.path}.param_groups.{name}"):
                taker.unexpected.append(f"{view.path}.param_groups.{name}")

    @property
    def fills_any(self) -> bool:
        """Whether the load sets any value of this optimizer."""
        return bool(self._groups or self._states)

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
            if not catalog.same_content(catalog.stored_fqn(first), catalog.stored_fqn(second)):
                return False
        return True

    def misfits(self, record: OptimizerRecord | None) -> list[Misfit]:
        """Return how the saved optimizer (described by `record`) differs from this one."""
        if not self._groups and not self._takes_state:
            return []  # The selection leaves out the whole optimizer.
        path, found = self._view.path, [self._misfit_of_state(record)]
        for (key, own, saved), groups in self._switched.items():
            text = f"{path}.param_groups: {first_three(groups)} had {key}={own}, the checkpoint has {key}={saved}; "
            if self._sets_hyperparameters:
                text += (
                    "the load sets the checkpoint's value, as load_state_dict of torch does. Build the optimizer with "
                    f"that value. Or keep its own values with skip='{path}.param_groups.*'; if they need other state, "
                    f"begin that anew with skip='{path}'"
                )
            else:
                text += f"its own value stays. If that needs other state, begin the state anew with skip='{path}'"
            found.append(Misfit(text, is_certain=False))
        return [each for each in found if each is not None]

    def _misfit_of_state(self, record: OptimizerRecord | None) -> Misfit | None:
        held = [*self._stored.values(), *(value for value in self._values.values() if isinstance(value, dict))]
        keys = {key for each in held for key in each}
        if self._masters:
            keys -= {"master"}
        return misfit_of(self._view, SavedState(record, frozenset(keys)))

    def finish(self) -> None:
        """Set hyperparameters and state."""
        for group, values in self._groups:
            group.update(values)
        for parameter, state in self._states:
            self._view.members.set_state(parameter, state, self._keepers)

    def _group(self, group: dict[str, object], parameters: Iterable[torch.Tensor], position: int) -> None:
        """Choose a group's hyperparameters.

        Raises:
            InvalidError: The checkpoint holds different hyperparameters for parameters of the group.
        """
        chosen: dict[str, Value] | None = None
        chosen_name = ""
        for parameter, name in ((each, name) for each in parameters for name in self._view.names_of(each)):
            path = f"{self._view.path}.param_groups.{name}"
            if not self._taker.takes_part(path):
                continue
            key = self._members.get(name)
            values = self._hyperparameters.get(str(key)) if key is not None else None
            if not isinstance(values, dict):
                # A frozen parameter is never stepped, and the optimizer of DeepSpeed omits frozen parameters.
                if key is not None or parameter.requires_grad or self._view.members.state_of(parameter):
                    self._taker.missing.append(path)
                continue
            if chosen is None:
                chosen, chosen_name = values, name
            elif chosen is not values and self._sets_hyperparameters:
                self._require_same(chosen_name, chosen, name, values)
        if chosen is not None:
            self._set(group, chosen, f"group {position} ({chosen_name})")

    def _empty_group(self, group: dict[str, object], position: int) -> None:
        """Choose the hyperparameters of a group without parameters: from the saved empty group at this position."""
        values = self._hyperparameters.get(str(self._empty_groups.get(str(position))))
        if isinstance(values, dict) and self._taker.takes_part(f"{self._view.path}.param_groups.{position}"):
            self._set(group, values, f"group {position}")

    def _set(self, group: dict[str, object], values: dict[str, Value], name: str) -> None:
        """Give a group its saved hyperparameters, and note the switches that change."""
        taken = {key: _as_kept(group.get(key), value) for key, value in self._hyperparameters_of(values).items()}
        for key in sorted(SWITCHES & group.keys() & taken.keys()):
            if bool(group[key]) != bool(taken[key]):
                self._switched[key, repr(group[key]), _written(values[key])].append(name)
        if self._sets_hyperparameters:
            self._groups.append((group, taken))

    def _hyperparameters_of(self, values: dict[str, Value]) -> dict[str, object]:
        if "params" in values:
            raise CorruptError(
                f"{self._view.path}.param_groups: the hyperparameters hold params; expected none. Read another copy"
            )
        # Older checkpoints hold `param_names`.
        kept = {key: value for key, value in values.items() if key not in LISTS_OF_MEMBERS}
        return {key: put_together(value, plain_leaf) for key, value in kept.items()}

    def _require_same(self, first: str, chosen: dict[str, Value], second: str, values: dict[str, Value]) -> None:
        for key in sorted((chosen.keys() | values.keys()).difference(LISTS_OF_MEMBERS)):
            if _written(chosen.get(key)) != _written(values.get(key)):
                raise InvalidError(
                    f"{self._view.path}.param_groups: one group holds {first} with {key}={_written(chosen.get(key))} "
                    f"and {second} with {key}={_written(values.get(key))} in the checkpoint; "
                    "expected one value per group. Group the parameters as they were saved"
                )

    def _state(self, parameter: torch.Tensor, group: Mapping[str, object], catalog: Catalog) -> None:
        view, state = self._view, _WantedState(parameter, group)
        names = [name for name in view.names_of(parameter) if name in self._members]
        if not names:
            return
        present = view.members.state_of(parameter, view.path)
        parts: Mapping[str, ParameterPart] = {part.name: part for part in view.parts.get(id(parameter), ())}
        for name in names:
            values = self._values.get(name)
            self._want_tensors(name, state, present, catalog, parts.get(name))
            for key, value in values.items() if isinstance(values, dict) else ():
                if self._taker.takes_part(view.state_fqn(name, key)):
                    state.entries[key] = self._value(name, key, value, state, present, catalog)
                    self._takes_state = True
        for key, value in present.items():
            if key in state.entries:
                continue
            fqn = view.state_fqn(names[0], key)
            if not self._taker.takes_part(fqn):
                state.entries[key] = value
            elif self._is_stepped(names, parameter, key):
                # The checkpoint has state of this parameter, but lacks this entry: a step would fail.
                self._taker.missing.append(fqn)
                state.entries[key] = value
        for part in parts.values():
            # A tensor that some parts fill and others do not.
            lacking = [key for key, filled in state.filled.items() if part.name not in filled and filled != {""}]
            self._taker.missing += [view.state_fqn(part.name, key) for key in lacking]
        if id(parameter) not in view.elsewhere:
            self._states.append((parameter, state.entries))

    def _value(
        self,
        name: str,
        key: str,
        value: Value,
        state: _WantedState,
        present: Mapping[str, object],
        catalog: Catalog,
    ) -> object:
        """Return the new value of an entry of a parameter's state, other than a plain tensor."""
        view, parameter, fqn = self._view, state.parameter, self._view.state_fqn(name, key)
        if not is_subclass_record(value):
            if isinstance(value, dict | list | tuple) and value and self._forms.differ(key, present.get(key), None):
                self._taker.misfits.append(self._forms.misfit(fqn, present[key], f"a {type(value).__name__}"))
                return present[key]
            return put_together(value, self._leaf_of(name, state, key, tensors_in(present.get(key), fqn), catalog))
        tensor = state.entries.get(key, present.get(key))
        if not isinstance(tensor, torch.Tensor):
            tensor = new_subclass(fqn, value, parameter, view.members.steppers(), catalog)
        if not self._taker.want(fqn, tensor, view.declared_for(parameter, tensor)):
            raise InvalidError(
                f"{fqn}: is a tensor subclass in the checkpoint and a {type(tensor).__name__} here; expected the same. "
                "Use the class of optimizer that was saved, or leave this entry out with skip="
            )
        return tensor

    def _want_tensors(
        self,
        name: str,
        state: _WantedState,
        present: Mapping[str, object],
        catalog: Catalog,
        part: ParameterPart | None,
    ) -> None:
        """Ask for the state tensors that the checkpoint has under one name of a parameter."""
        view, parameter = self._view, state.parameter
        before, now = self._shapes(name, parameter, part)
        tied = (alias for alias, main in view.ties.items() if main == name) if before != now else ()
        names = [view.whole_name(each) for each in (name, *tied)]
        for key in self._stored.get(name, ()):
            fqn = view.state_fqn(name, key)
            if not self._taker.takes_part(fqn):
                if part is not None and key in present:
                    state.entries.setdefault(key, present[key])
                continue
            stored = catalog.stored_fqn(fqn)
            if stored in self._masters and key not in present:
                # This optimizer keeps no master copy.
                continue
            spec = catalog.tensors[stored]
            # A count of steps of a parameter with one element may have the parameter's shape.
            wanted_shape = spec.global_shape if key == "step" else shape_of_state(spec.global_shape, before, now)
            if wanted_shape is None:
                self._refuse(fqn, spec.global_shape)
                continue
            # A state dict with numbers has whole tensors, which fill the parameter under its first name.
            of_part = part is not None and wanted_shape == part.box.shape != tuple(parameter.shape)
            shape = tuple(parameter.shape) if of_part else view.local_shape(parameter, wanted_shape)
            tensor = state.entries.get(key, present.get(key))
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
                if self._forms.differ(key, tensor, shape):
                    self._taker.misfits.append(self._forms.misfit(fqn, tensor, str(spec.global_shape)))
                    state.entries[key] = tensor
                    continue
                catalog.require_stored(stored)
                dtype = self._forms.new_dtype(name, parameter, key, spec)
                tensor = new_state_tensor(parameter, state.group, key, dtype, shape)
                if of_part or wanted_shape != spec.global_shape:
                    tensor.zero_()  # Another part may be missing, or the saved shape may be smaller.
            target = part.of(tensor, parameter, fqn) if of_part and part is not None else tensor
            self._taker.want(fqn, target, view.declared_for(parameter, tensor), parameter=names)
            state.entries[key] = tensor
            self._takes_state = True
            if part is not None:
                state.filled.setdefault(key, set()).add(name if of_part else "")

    def _shapes(
        self, name: str, parameter: torch.Tensor, part: ParameterPart | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a parameter, or of its part: the saved shape, and the shape now."""
        now = self._view.global_shape(parameter) if part is None else part.box.shape
        saved = self._forms.saved_parameter(name)
        return now if saved is None else saved.global_shape, now

    def _refuse(self, fqn: str, shape: tuple[int, ...]) -> None:
        """Refuse state without a known form for the new shape of its parameter."""
        text = f"{fqn}: {shape}, of a parameter that has another shape now (leave this state out with skip=)"
        self._taker.misfits.append(Misfit(text, is_certain=True, fqn=fqn, is_shape=True))

    def _is_stepped(self, names: Iterable[str], parameter: torch.Tensor, key: str) -> bool:
        """Return whether the optimizer that keeps `key` had stepped a parameter before the save."""
        values = [value for name in names if isinstance(value := self._values.get(name), dict)]
        saved = {key for each in (*(self._stored.get(name, ()) for name in names), *values) for key in each}
        return bool(saved if self._view.members.is_one else saved & self._view.members.keys_beside(parameter, key))

    def _leaf_of(
        self, name: str, state: _WantedState, key: str, present: Mapping[str, object], catalog: Catalog
    ) -> Callable[[Value], object]:
        """Return `on_leaf` for a container in a parameter's state: fills tensors in the container as any other tensor.

        A new tensor has the device and layout of the parameter, as the next step of the optimizer needs.
        """
        before, now = self._shapes(name, state.parameter, None)

        def on_leaf(leaf: Value) -> object:
            if is_subclass_record(leaf):
                return self._taker.take_subclass(leaf, present)
            if not isinstance(leaf, TensorRef):
                return leaf
            tensor, stored = present.get(leaf.fqn), catalog.stored_fqn(leaf.fqn)
            spec = catalog.tensors.get(stored)
            if spec is None:
                return self._taker.take(leaf, tensor)
            if shape_of_state(spec.global_shape, before, now) != spec.global_shape and self._taker.takes_part(leaf.fqn):
                self._refuse(leaf.fqn, spec.global_shape)
                return tensor
            parameter, shape = state.parameter, self._view.local_shape(state.parameter, spec.global_shape)
            fits = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shape
            if fits and not self._taker.takes_part(leaf.fqn):
                return tensor
            if not isinstance(tensor, torch.Tensor) or not fits:
                if self._forms.differ(key, tensor, shape):
                    if self._taker.takes_part(leaf.fqn):
                        self._taker.misfits.append(self._forms.misfit(leaf.fqn, tensor, str(spec.global_shape)))
                    return tensor
                catalog.require_stored(stored)
                layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
                tensor = self._new.get((stored, parameter.device, layout))  # Tied in the save, so tied again.
                if tensor is None:
                    dtype = self._forms.new_dtype(name, parameter, key, spec)
                    tensor = new_state_tensor(parameter, state.group, key, dtype, shape)
                    tensor.zero_()  # `skip` may leave the tensor out.
                    self._new[stored, parameter.device, layout] = tensor
            self._taker.want(leaf.fqn, tensor, self._view.declared_for(parameter, tensor))
            return tensor

        return on_leaf


def _as_kept(present: object, saved: object) -> object:
    """Return a saved hyperparameter in the form of the present value: for a tensor, a tensor on the same device.

    A graph would capture a learning rate in host memory as a constant, and some optimizers refuse a plain number.
    """
    if not isinstance(present, torch.Tensor):
        return saved
    if isinstance(saved, torch.Tensor):
        return saved.to(present.device)
    return torch.full_like(present, saved) if isinstance(saved, int | float) and not present.ndim else saved


def _written(value: Value) -> str:
    """Return the `repr` of a hyperparameter, for comparisons.

    Raises:
        InvalidError: The hyperparameter holds an integer that is too long for Python to convert to decimal.
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
    """Return the keys of each parameter's state tensors outside containers, by parameter FQN."""
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
    if is_subclass_record(value):
        return [TensorRef(fqn) for _, fqn in references_of(value)]
    if isinstance(value, dict):
        return [ref for entry in value.values() for ref in _references(entry)]
    if isinstance(value, list | tuple):
        return [ref for item in value for ref in _references(item)]
    return []
