"""Put columns to work on a model: replace the forward of units, and restore the plain one.

Only `forward` of the instance is replaced. Hooks, FQNs, keys of state dicts and classes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from holdfast.activations.profile.solved_plan import SolvedPlan
from holdfast.activations.profile.unit_profile import UnitColumn, UnitProfile
from holdfast.activations.runtime.arguments import put_together, take_apart, tensors_of
from holdfast.activations.runtime.column_program import ColumnProgram
from holdfast.activations.runtime.dense import PackedTensor
from holdfast.activations.runtime.frame import CallFrame, call_storing
from holdfast.activations.runtime.packings import pack
from holdfast.activations.runtime.peak import copied
from holdfast.activations.runtime.replay import call_with_replay
from holdfast.activations.runtime.signature import Signature, signature_of
from holdfast.activations.runtime.trace import trace_call
from holdfast.activations.runtime.traced import UnitTrace
from holdfast.activations.runtime.unit_names import inside_ddp
from holdfast.errors import InvalidError, first_three

_FORWARD = "forward"
"""The attribute that is replaced."""

_SIGNATURES_MAX = 16
"""Signatures of a unit that are traced. Calls of further ones run plain."""


@dataclass(slots=True)
class CallCounts:
    """Calls of managed units."""

    planned: int = 0
    """Calls of the signature that a plan was traced with."""
    other: int = 0
    """Calls with another signature, which run plain: another trace may have effects that a replay would repeat."""
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

    def device_peak(self) -> int | None:
        """Return the most bytes that torch has counted on the units' CUDA device so far; None on a CPU."""
        device = next((each.device for unit in self.units for each in unit.parameters()), torch.device("cpu"))
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def attach(model: nn.Module, programs: Mapping[str, ColumnProgram | PlannedUnit]) -> AttachedUnits:
    """Replace the forward of units.

    Args:
        model: Contains the units.
        programs: A program for each unit, by FQN, or a column whose program is made at the first call.
    Raises:
        InvalidError: The model lacks a unit, or a unit is managed already.
    """
    modules = dict(inside_ddp(model).named_modules())
    absent = [name for name in programs if name not in modules]
    if absent:
        raise InvalidError(f"the model has no module {first_three(absent)}; expected the model that was fitted")
    counts, units = CallCounts(), {name: modules[name] for name in programs}
    return _replaced(units, lambda name: _ManagedUnit(name, units[name], programs[name], counts).call, counts)


def attach_plan(model: nn.Module, plan: SolvedPlan) -> AttachedUnits:
    """Replace the forward of the units of a plan. Each unit is traced at its first call. Errors as for `attach`."""
    units = enumerate(plan.profile.order)
    chosen = {name: (plan.profile.classes[kind], plan.column_of(number)) for number, (name, kind) in units}
    return attach(model, {name: PlannedUnit(*each, plan.error_bound) for name, each in chosen.items()})


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A column for a unit that is not traced yet."""

    profile: UnitProfile
    """The class of the unit."""
    column: UnitColumn
    """One of the columns of the class."""
    error_bound: float
    """Largest relative error of a stored element."""

    def program(self, trace: UnitTrace) -> ColumnProgram:
        """Return the program of the column for a trace of the class."""
        return ColumnProgram(trace, self.column, self._packed)

    def require_same_ops(self, name: str, trace: UnitTrace) -> None:
        """Raise if a trace has other ops than the plan: an InvalidError that names the first one."""
        found, expected = ([op.overload for op in ops] for ops in (trace.ops, self.profile.ops))
        for number, (one, other) in enumerate(zip_longest(found, expected, fillvalue="no op")):
            if one != other:
                raise InvalidError(
                    f"unit {name}: op {number} is {one}; expected {other}. Call the model as in the fit first, or fit "
                    "this model again"
                )

    def _packed(self, tensor: torch.Tensor, group: int) -> PackedTensor | None:
        op, action = self.profile.ops[group], dict(self.column.store)[group]
        most = next(each.device_bytes for each in op.packings if each.action == action)
        room = most - (op.bytes - tensor.nbytes)
        return pack(tensor, action, error_bound=self.error_bound, device_bytes_max=room)


def trace_units(
    model: nn.Module, names: Iterable[str], step: Callable[[], Any], *, error_bound: float | None = None
) -> dict[str, UnitTrace]:
    """Return the trace of the first call with gradients of each unit in a step; units that are not called are left out.

    Args:
        model: Contains the units.
        names: FQNs of the units.
        step: Runs forward and backward.
        error_bound: Measure the units, too, with packs within this bound: one unit of each class is enough. None: only
            trace.
    """
    traces: dict[str, UnitTrace] = {}
    units = {name: model.get_submodule(name) for name in names}

    def call(name: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name in traces or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        output, traces[name] = trace_call(units[name], plain, args, kwargs, error_bound=error_bound)
        return output

    attached = _replaced(units, lambda name: partial(call, name), CallCounts())
    try:
        step()
    finally:
        attached.detach()
    return traces


def _replaced(
    units: Mapping[str, nn.Module], call_of: Callable[[str], Callable[..., Any]], counts: CallCounts
) -> AttachedUnits:
    """Replace the forward of plain units. A call gets the plain forward, and the arguments."""
    for name, unit in units.items():
        if isinstance(vars(unit).get(_FORWARD), ReplacedForward):
            raise InvalidError(f"unit {name} is managed already; expected a plain unit. Call detach() first")
    for name, unit in units.items():
        vars(unit)[_FORWARD] = ReplacedForward(unit, call_of(name))
    return AttachedUnits(list(units.values()), counts)


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
        return self._call(self.plain, *args, **kwargs)

    def __reduce__(self) -> Any:
        """Return how to copy or unpickle the plain forward."""
        # The unit is copied first, with the forward of the class alone.
        return (_same, (self.plain,)) if self.was_own else (getattr, (self._unit, _FORWARD))


def _same(value: Any) -> Any:
    return value


class _ManagedUnit:
    """One unit with a program."""

    def __init__(self, name: str, unit: nn.Module, program: ColumnProgram | PlannedUnit, counts: CallCounts) -> None:
        self._name, self._unit, self._counts = name, unit, counts
        self._planned = program if isinstance(program, PlannedUnit) else None
        self._programs: dict[Signature, ColumnProgram | None] = {}
        """The program of each signature so far; None for calls that run plain."""
        if isinstance(program, ColumnProgram):
            self._programs[program.trace.signature] = program

    def call(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the unit as the program says."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        form = take_apart((args, kwargs), tensors)
        signature = signature_of(self._unit, form, tensors)
        if signature not in self._programs and self._planned and len(self._programs) < _SIGNATURES_MAX:
            self._programs[signature] = self._program_for(self._planned, plain, args, kwargs)
        program = self._programs.get(signature)
        if program is None:
            self._counts.other += 1
            return plain(*args, **kwargs)
        self._counts.planned += 1
        if not program.is_replayed and not program.packed:
            return plain(*args, **kwargs)
        frame = CallFrame(program, self._name, self._unit)
        call = call_with_replay if program.is_replayed else call_storing

        def forward(*given: torch.Tensor) -> Any:
            given_args, given_kwargs = put_together(form, given)
            return plain(*given_args, **given_kwargs)

        output = call(frame, forward, tensors)
        self._counts.overflows += frame.overflows
        return output

    def _program_for(
        self, planned: PlannedUnit, plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> ColumnProgram | None:
        """Return the program of a new signature; None if its trace is not that of the plan.

        The result of the traced call is dropped: memory for one unit. Buffers and generators stay.

        Raises:
            InvalidError: The first training call ran other ops than in the fit.
        """
        devices = {tensor.device for tensor in tensors_of((args, kwargs)) if tensor.device.type == "cuda"}
        with copied(self._unit, parameters=False), torch.random.fork_rng(list(devices)):
            trace = trace_call(self._unit, plain, args, kwargs)[1]
        if trace.fingerprint == planned.profile.fingerprint:
            return planned.program(trace)
        if self._unit.training and not any(self._programs.values()):
            planned.require_same_ops(self._name, trace)
        return None
