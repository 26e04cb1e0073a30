"""A column for a trace, as the runtime follows one: the treatment of each saved tensor, and the act for each op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum
from functools import lru_cache

import torch

from holdfast.activations.profile.unit_profile import UnitColumn
from holdfast.activations.runtime.dense import PackedTensor
from holdfast.activations.runtime.traced import SavedSource, TracedOp, UnitTrace
from holdfast.errors import InvalidError

Pack = Callable[[torch.Tensor, int], PackedTensor | None]
"""Packs the tensor of a group, by the group's number. None: the content does not fit the pack (overflow)."""

_ACTS_MAX = 256
"""Most remembered patterns of overflows and released tensors."""


class Act(Enum):
    """The treatment of an op in a replay."""

    RUN = "runs"
    VIEW = "runs: views read no content"
    GIVE = "returns stored or unwritten tensors"
    DRAW = "runs for its draw, and returns as GIVE does"


class ColumnProgram:
    """A column for a trace. Of a column that stores too little, a replay runs more ops."""

    def __init__(self, trace: UnitTrace, column: UnitColumn, pack: Pack | None = None) -> None:
        """Check that a replay could run, also if no tensor fits a pack.

        Args:
            trace: The trace.
            column: The column.
            pack: Packs the tensors of groups whose action is not "keep".
        Raises:
            InvalidError: The column would run ops that must not run again.
        """
        self.trace, self.pack = trace, pack
        self.actions = {trace.ops[number].group: action for number, action in column.store}
        """Action of each stored group."""
        self.packed = {
            group: trace.packed_geometry(group) for group, action in self.actions.items() if action != "keep"
        }
        """Slot and geometry of the packed tensor of each packed group. The group's other results are kept."""
        self._runs = bool(column.run)
        self.is_replayed = self._runs or not all(map(self._always_fits, self.packed))
        """Whether a call may need a replay."""
        if why_not := trace.refused or (trace.why_not if self.is_replayed else ""):
            raise InvalidError(f"the column is not for this unit: {why_not}")
        self._barred = frozenset(op.group for op in trace.ops if op.has_effect)
        self.irreplaceable: frozenset[int] = frozenset()
        """Stored groups that no replay can run again, because they follow an op with an effect."""
        if self.is_replayed:
            wanted = {op.group for op in trace.ops[1:] if op.is_needed} - self.actions.keys()
            self._closure(wanted | self.packed.keys(), frozenset(self.packed))
            released = self.actions.keys() - {0}
            while lost := {each for each in released if self._ancestors([each], released) & self._barred}:
                released -= lost
            self.irreplaceable = frozenset(self.actions.keys() - {0} - released)
        self.treatments = tuple(map(self._treatment, trace.saved))
        """Treatment of each saved tensor: "keep" by reference, "pack", or "pass" to the checkpoint of torch."""
        self.acts = lru_cache(maxsize=_ACTS_MAX)(self._acts)
        """Return the act of a replay for each op. Arguments as for `_acts`."""

    def _acts(self, wanted: frozenset[int], missing: frozenset[int]) -> tuple[Act, ...]:
        """Return the act of a replay for each op.

        Args:
            wanted: Groups whose tensors the replay makes.
            missing: Stored groups that cannot be given back: overflowed, or released.
        """
        run, ops = self._closure(wanted, missing), self.trace.ops
        # The generator stands where it stood at the start: each op that drew before the last draw draws again.
        last = max((op.number for op in ops if op.is_random and op.group in run), default=0)

        def act(op: TracedOp) -> Act:
            if op.is_view or op.group in run:
                return Act.VIEW if op.is_view else Act.RUN
            return Act.DRAW if op.is_random and op.number < last else Act.GIVE

        return tuple(map(act, ops))

    def _closure(self, wanted: Iterable[int], missing: Collection[int]) -> set[int]:
        """Return the groups that a replay runs so that the wanted ones, and all values that Python reads, are right."""
        run = self._ancestors(wanted, missing)
        if barred := run & self._barred:
            names = ", ".join(f"op {group} ({self.trace.ops[group].overload})" for group in sorted(barred)[:3])
            raise InvalidError(f"a replay would run {names} again, which has an effect")
        return run

    def _ancestors(self, wanted: Iterable[int], missing: Collection[int]) -> set[int]:
        given = {0, *(group for group in self.actions if self.trace.ops[group].is_storable)}.difference(missing)
        reads: dict[int, set[int]] = {}
        for op in self.trace.ops:
            reads.setdefault(op.group, set()).update(op.reads)
        run: set[int] = set()
        ahead = [*wanted, *(op.group for op in self.trace.ops if op.has_value)]
        while ahead:
            group = ahead.pop()
            if group and group not in run:
                run.add(group)
                ahead += reads[group] - given
        return run

    def _always_fits(self, group: int) -> bool:
        """Return whether no content overflows the group's pack: masks as bits."""
        return self.actions[group] == "bits" and self.packed[group][1].dtype is torch.bool

    def _treatment(self, source: SavedSource) -> str:
        group = source.group
        if group is None:
            # A replay casts weights itself; kept casts would stay until backward.
            return "pass" if source.is_cast and self._runs else "keep"
        if group and group not in self.actions:
            return "pass"
        # Small results of a packed op, such as the statistics of a norm, are kept.
        return "pack" if group in self.packed and source.slot == self.packed[group][0] else "keep"
