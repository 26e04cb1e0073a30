"""A column for a trace, as the runtime follows one: the treatment of each saved tensor, and the act for each op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch

from holdfast.activations.profile.unit_profile import UnitColumn
from holdfast.activations.runtime.dense import PackedTensor, TensorGeometry
from holdfast.activations.runtime.traced import UnitTrace
from holdfast.errors import InvalidError

Pack = Callable[[torch.Tensor, int], PackedTensor | None]
"""Packs the tensor of a group, by the group's number. None: the content does not fit the pack (overflow)."""

_ACTS_MAX = 256
"""Most remembered patterns of overflows and released tensors."""


class Treatment(Enum):
    """The treatment of a saved tensor in forward."""

    KEEP = "kept by reference"
    PASS = "given to torch's checkpoint, which asks for a replay"
    PACK = "packed by an action"


class Act(Enum):
    """The treatment of an op in a replay."""

    RUN = "runs"
    VIEW = "runs: views read no content"
    GIVE = "returns stored or unwritten tensors"
    DRAW = "runs for its draw, and returns as GIVE does"


@dataclass(slots=True)
class ColumnProgram:
    """A column that was checked against a trace.

    Raises:
        InvalidError: The column would leave a needed tensor out, or run an op whose inputs are missing.
    """

    trace: UnitTrace
    """The trace."""
    column: UnitColumn
    """The column."""
    pack: Pack | None = None
    """Packs the tensors of groups whose action is not "keep"."""
    actions: dict[int, str] = field(init=False)
    """Action of each stored group."""
    run: frozenset[int] = field(init=False)
    """Groups that a replay runs where nothing overflows."""
    treatments: tuple[Treatment, ...] = field(init=False)
    """Treatment of each saved tensor."""
    packed: dict[int, tuple[int, TensorGeometry]] = field(init=False)
    """Slot and geometry of the packed tensor of each packed group. The group's other results are kept."""
    is_replayed: bool = field(init=False)
    """Whether a call may need a replay."""
    irreplaceable: frozenset[int] = field(init=False, default=frozenset())
    """Stored groups that no replay can run again, because they follow an op with an effect."""
    _acts: dict[tuple[frozenset[int], frozenset[int]], tuple[Act, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        ops = self.trace.ops
        numbers = [number for number, _ in self.column.store] + list(self.column.run)
        if self.trace.refused or any(not 0 <= number < len(ops) for number in numbers):
            raise InvalidError(f"the column is not of this unit: {self.trace.refused or 'an op is not in the trace'}")
        self.actions = {ops[number].group: action for number, action in self.column.store}
        self.run = frozenset(ops[number].group for number in self.column.run) - {0}
        packed = frozenset(group for group, action in self.actions.items() if action != "keep")
        if 0 in packed or (packed and self.pack is None):
            raise InvalidError(f"the column packs ops {sorted(packed)[:3]}; expected packs, and a kept input")
        self.packed = {group: self.trace.packed_geometry(group) for group in packed}
        self.is_replayed = bool(self.run or {group for group in packed if not self._always_fits(group)})
        missing = {op.group for op in ops[1:] if op.is_needed and not op.has_value} - self.run - self.actions.keys()
        if missing:
            raise InvalidError(f"the column neither stores nor runs {self._names(missing)}, which backward needs")
        if self.is_replayed:
            if self.run != self.closure(self.run) or self.trace.why_not:
                short = self.closure(self.run) - self.run
                why = self.trace.why_not or f"its ops read {self._names(short)}, neither stored nor run"
                raise InvalidError(f"a replay of the column cannot run: {why}")
            self.closure(self.run | packed, missing=packed)
            self.irreplaceable = self._irreplaceable()
        self.treatments = tuple(map(self._treatment, range(len(self.trace.saved))))

    def closure(self, wanted: Iterable[int], missing: frozenset[int] = frozenset()) -> frozenset[int]:
        """Return the groups that a replay runs so that the wanted ones, and all values that Python reads, are right.

        Args:
            wanted: Groups to run.
            missing: Stored groups that cannot be given back.
        Raises:
            InvalidError: One of them may not run again.
        """
        run = self._ancestors(wanted, missing)
        if barred := run & self._barred():
            raise InvalidError(f"a replay would run {self._names(barred)} again, which has an effect")
        return run

    def acts(self, wanted: frozenset[int], missing: frozenset[int]) -> tuple[Act, ...]:
        """Return the act of a replay for each op.

        Args:
            wanted: Groups whose tensors the replay makes.
            missing: Stored groups that cannot be given back: overflowed, or released.
        """
        found = self._acts.get((wanted, missing))
        if found is None:
            if len(self._acts) >= _ACTS_MAX:
                self._acts.clear()
            run = self.closure(wanted, missing)
            ops = self.trace.ops
            # The generator stands where it stood at the start: each op that drew before the last draw draws again.
            last = max((op.number for op in ops if op.is_random and op.group in run), default=0)
            found = self._acts[wanted, missing] = tuple(
                Act.VIEW
                if op.is_view
                else Act.RUN
                if op.group in run
                else Act.DRAW
                if op.is_random and op.number < last
                else Act.GIVE
                for op in ops
            )
        return found

    def _ancestors(self, wanted: Iterable[int], missing: frozenset[int]) -> frozenset[int]:
        reads: dict[int, set[int]] = {}
        for op in self.trace.ops:
            reads.setdefault(op.group, set()).update(op.reads)
        run: set[int] = set()
        ahead = [*wanted, *(op.group for op in self.trace.ops if op.has_value)]
        while ahead:
            group = ahead.pop()
            if group and group not in run:
                run.add(group)
                ahead += [each for each in reads[group] if not self._is_given(each) or each in missing]
        return frozenset(run)

    def _barred(self) -> frozenset[int]:
        return frozenset(op.group for op in self.trace.ops if op.has_effect)

    def _irreplaceable(self) -> frozenset[int]:
        barred, released = self._barred(), frozenset(self.actions) - {0}
        while lost := {each for each in released if self._ancestors([each], released) & barred}:
            released -= lost
        return frozenset(self.actions) - {0} - released

    def _always_fits(self, group: int) -> bool:
        """Return whether no content overflows the group's pack: masks as bits."""
        return self.actions[group] == "bits" and self.packed[group][1].dtype is torch.bool

    def _is_given(self, group: int) -> bool:
        return group == 0 or (group in self.actions and self.trace.ops[group].is_storable)

    def _treatment(self, index: int) -> Treatment:
        source = self.trace.saved[index]
        if source.group is None:
            # A replay casts weights itself; kept casts would stay until backward.
            return Treatment.PASS if source.is_cast and self.run else Treatment.KEEP
        if source.group == 0 or self.actions.get(source.group) == "keep":
            return Treatment.KEEP
        if source.group not in self.actions:
            return Treatment.PASS
        # Small results of the same op, such as the statistics of a norm, are kept.
        return Treatment.PACK if source.slot == self.packed[source.group][0] else Treatment.KEEP

    def _names(self, groups: Iterable[int]) -> str:
        return ", ".join(f"op {group} ({self.trace.ops[group].overload})" for group in sorted(groups)[:3])
