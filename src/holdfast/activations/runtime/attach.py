"""Put columns to work on a model: replace the forward of units, and restore the plain one.

Only `forward` of the instance is replaced. Hooks, FQNs, keys of state dicts and classes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdfast.activations.runtime.arguments import Form, objects_of, put_together, take_apart
from holdfast.activations.runtime.column_program import ColumnProgram
from holdfast.activations.runtime.frame import CallFrame
from holdfast.activations.runtime.replay import call_with_replay
from holdfast.activations.runtime.signature import signature_of
from holdfast.activations.runtime.store_only import call_storing
from holdfast.activations.runtime.trace import trace_call
from holdfast.activations.runtime.traced import UnitTrace
from holdfast.errors import InvalidError

_FORWARD = "forward"
"""The attribute that is replaced."""


@dataclass(slots=True)
class CallCounts:
    """Calls of managed units."""

    planned: int = 0
    """Calls of the signature that a plan was traced with."""
    other: int = 0
    """Calls with another signature: recomputed as a whole, or plain where a replay is refused."""
    overflows: int = 0
    """Stored tensors that did not fit a pack."""


@dataclass(slots=True)
class AttachedUnits:
    """Units whose forward is replaced."""

    units: list[nn.Module]
    """The units."""
    counts: CallCounts = field(default_factory=CallCounts)
    """Calls so far."""

    def detach(self) -> None:
        """Restore the forward of every unit. A backward of an earlier call still finds the call's stored tensors."""
        for unit in self.units:
            replaced = vars(unit).pop(_FORWARD, None)
            if isinstance(replaced, ReplacedForward) and replaced.was_own:
                vars(unit)[_FORWARD] = replaced.plain
        self.units = []


def attach(model: nn.Module, programs: Mapping[str, ColumnProgram]) -> AttachedUnits:
    """Replace the forward of units.

    Args:
        model: Contains the units.
        programs: A program for each unit, by FQN.
    Raises:
        InvalidError: A unit is managed already.
    """
    units = {name: model.get_submodule(name) for name in programs}
    refuse_managed(units)
    attached = AttachedUnits(list(units.values()))
    for name, unit in units.items():
        managed = _ManagedUnit(name, unit, programs[name], attached.counts)
        vars(unit)[_FORWARD] = managed.replaced = ReplacedForward(unit, managed.call)
    return attached


def refuse_managed(units: Mapping[str, nn.Module]) -> None:
    """Raise if the forward of a unit is replaced already."""
    for name, unit in units.items():
        if isinstance(vars(unit).get(_FORWARD), ReplacedForward):
            raise InvalidError(f"unit {name} is managed already; expected a plain unit. Call detach() first")


def trace_units(
    model: nn.Module, names: Iterable[str], step: Callable[[], Any], *, measured: Collection[str] = ()
) -> dict[str, UnitTrace]:
    """Return the trace of the first call with gradients of each unit in a step; units that are not called are left out.

    Args:
        model: Contains the units.
        names: FQNs of the units.
        step: Runs forward and backward.
        measured: FQNs of the units whose costs are measured too, one after the other: one of each class is enough.
    """
    traces: dict[str, UnitTrace] = {}
    units = {name: model.get_submodule(name) for name in names}
    refuse_managed(units)
    attached = AttachedUnits(list(units.values()))

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        plain = vars(units[name])[_FORWARD].plain
        if name in traces or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        output, traces[name] = trace_call(units[name], plain, args, kwargs, is_measured=name in measured)
        return output

    try:
        for name, unit in units.items():
            vars(unit)[_FORWARD] = ReplacedForward(unit, partial(call, name))
        step()
    finally:
        attached.detach()
    return traces


class ReplacedForward:
    """The replaced forward of a unit; a copy or a pickle holds the plain forward."""

    def __init__(self, unit: nn.Module, call: Callable[..., Any]) -> None:
        self._unit, self._call = unit, call
        self.was_own = _FORWARD in vars(unit)
        """Whether the instance had a forward of its own."""
        self.plain = unit.forward
        """The plain forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the unit."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the plain forward of the unit's copy."""
        from copy import deepcopy

        if self.was_own:
            return deepcopy(self.plain, memo)
        return getattr(deepcopy(self._unit, memo), _FORWARD)

    def __reduce__(self) -> Any:
        """Return how to unpickle the plain forward."""
        if self.was_own:
            return _same, (self.plain,)
        # The unit is unpickled first, with the forward of the class alone.
        return getattr, (self._unit, _FORWARD)


def _same(value: Any) -> Any:
    return value


class _ManagedUnit:
    """One unit with a program."""

    def __init__(self, name: str, unit: nn.Module, program: ColumnProgram, counts: CallCounts) -> None:
        self._name, self._unit, self._program, self._counts = name, unit, program, counts
        self.replaced: ReplacedForward | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the unit as the program says."""
        assert self.replaced is not None, "a call comes from the replaced forward"
        plain = self.replaced.plain
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        form = take_apart((args, kwargs), tensors)
        trace = self._program.trace
        if signature_of(self._unit, form, tensors) != trace.signature:
            self._counts.other += 1
            if trace.why_not or trace.has_effect or objects_of(form):
                return plain(*args, **kwargs)
            return checkpoint(partial(_call_apart, plain, form), *tensors, use_reentrant=False)
        self._counts.planned += 1
        if not self._program.is_replayed and not self._program.packed:
            return plain(*args, **kwargs)
        frame = CallFrame(self._program, self._name, self._unit)
        call = call_with_replay if self._program.is_replayed else call_storing
        output = call(frame, partial(_call_apart, plain, form), tensors)
        self._counts.overflows += frame.overflows
        return output


def _call_apart(forward: Callable[..., Any], form: Form, *tensors: torch.Tensor) -> Any:
    args, kwargs = put_together(form, tensors)
    return forward(*args, **kwargs)
