"""Columns of a class: the ways to treat a unit that no other way beats, found by one MILP for each of many budgets.

Binaries for each storage: stored by an action (`kept`, `packed`), run again (`run`). For each random op: run for its
draw. One binary says whether the unit replays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from holdfast.activations.profile.unit_profile import UnitColumn, UnitProfile
from holdfast.activations.solve.mixed_program import MixedProgram
from holdfast.activations.solve.storages import TracedStorage, storages_of
from holdfast.activations.solve.timeline import forward_workspace, may_overflow

LINEAR_BUDGETS, GEOMETRIC_BUDGETS = 33, 17
"""Budgets of the sweep. Geometric steps are dense near the least budget, where columns differ most."""

HOOK_SECONDS = 13e-6
"""Time of a hook for one saved tensor (measured on one CPU core)."""

REPLAY_SECONDS, REPLAY_OP_SECONDS = 200e-6, 35e-6
"""Time of Python in a replay: for the unit, and for each op of its trace (measured on one CPU core)."""

_RUN_SECONDS = 1e-9
"""Least cost of an op that runs again, so that no free op runs for nothing."""

_SECONDS_MAX = 10.0
"""Time limit of one MILP; one of thirty ops takes 5 to 30 ms."""


def columns_of(unit: UnitProfile, error_bound: float) -> tuple[UnitColumn, ...]:
    """Return the columns of a class, fastest first. The first one keeps everything.

    Args:
        unit: The class of units.
        error_bound: Largest relative error of a stored element. At 0 no lossy packing has a variable: the solver's
            tolerance would choose one whose error a row bounds by 0.
    Raises:
        InvalidError: scipy is missing.
    """
    storages = storages_of(unit, allow_lossy=error_bound > 0)
    found = [keep_all(unit), whole_recompute(unit), *_UnitProgram(unit, storages).sweep()]
    return _undominated(filter(None, found))


def keep_all(unit: UnitProfile) -> UnitColumn:
    """Return the column of plain training: every needed storage is kept, and nothing is installed."""
    storages = storages_of(unit, allow_lossy=False)
    kept = {base: "keep" for base, storage in storages.items() if storage.is_needed}
    return replace(column_from(unit, storages, kept, run=()), seconds=0.0, is_measured=True)


def whole_recompute(unit: UnitProfile) -> UnitColumn | None:
    """Return the column that stores nothing but the unit's input, which the replay holds; None if a replay is refused.

    An op with an effect, or a reader of one, never runs again.
    """
    storages = storages_of(unit, allow_lossy=False)
    run = {base for base, storage in storages.items() if storage.is_needed and base != 0}
    ahead = list(run)
    while ahead:
        more = {read for read in storages[ahead.pop()].reads if read != 0} - run
        run |= more
        ahead += more
    if not run or not unit.is_replayable or any(storages[base].is_kept for base in (0, *run)):
        return None
    column = column_from(unit, storages, {}, run=run)
    return None if any(unit.ops[number].has_effect for number in column.draw) else column


def column_from(
    unit: UnitProfile, storages: dict[int, TracedStorage], store: dict[int, str], *, run: Iterable[int]
) -> UnitColumn:
    """Return a column with its draws, bytes and seconds.

    Args:
        unit: The class of units.
        storages: Storages of the unit.
        store: Action of each stored base.
        run: Bases that the replay runs, with all views and in-place ops.
    """
    packings = {(base, each.action): each for base in store for each in storages[base].packings}
    packed = {base: packings[base, action] for base, action in store.items() if action != "keep"}
    stored = {base: packed[base].device_bytes if base in packed else storages[base].bytes for base in store}
    run = sorted(run)
    numbers = sorted(number for base in run for number in storages[base].members)
    last = max((number for number in numbers if unit.ops[number].is_random), default=0)
    draw = tuple(op.number for op in unit.ops[:last] if op.is_random and op.number not in numbers)
    if run:
        stored.setdefault(0, storages[0].bytes)
    seconds = sum(packing.seconds for packing in packed.values()) + HOOK_SECONDS * len(store)
    if run:
        seconds += sum(storages[base].seconds for base in run) + sum(unit.ops[number].seconds for number in draw)
        seconds += REPLAY_SECONDS + REPLAY_OP_SECONDS * len(unit.ops)
    return UnitColumn(
        store=tuple(sorted(store.items())),
        run=tuple(numbers),
        draw=draw,
        device_bytes=sum(stored.values()) + (0 if run else unit.cast_bytes),
        seconds=seconds,
        forward_workspace_bytes=unit.cast_bytes + forward_workspace(unit, storages.values(), stored, packed),
        backward_workspace_bytes=_backward_workspace(unit, storages, store, is_replayed=bool(run)),
        is_lossy=any(packing.is_lossy for packing in packed.values()),
        spare_bytes=sum(packing.spare_bytes for packing in packed.values()),
        forward_cast_bytes=unit.cast_bytes if run and unit.casts_stay else 0,
    )


def _backward_workspace(
    unit: UnitProfile, storages: dict[int, TracedStorage], store: dict[int, str], *, is_replayed: bool
) -> int:
    """Return the bytes that a unit's backward takes above the stored ones.

    A replay makes everything that backward needs, except tensors that are kept by reference. Without a replay the
    largest unpacked tensor counts. Both need the temporaries of backward itself; those of a replay have casts.
    """
    needed = {base: storage.bytes for base, storage in storages.items() if storage.is_needed and base != 0}
    temporary = max(unit.recompute_workspace_bytes - sum(needed.values()), 0)
    if is_replayed:
        unpacked = {**needed, 0: storages[0].bytes if store.get(0, "keep") != "keep" else 0}
        return temporary + sum(size for base, size in unpacked.items() if store.get(base) != "keep")
    temporary = max(temporary - unit.cast_bytes, 0)
    return temporary + max((storages[base].bytes for base, action in store.items() if action != "keep"), default=0)


def _undominated(found: Iterable[UnitColumn]) -> tuple[UnitColumn, ...]:
    """Return the columns that no other column beats in time and every kind of memory, fastest first."""

    def costs(column: UnitColumn) -> tuple[float, ...]:
        memory = (column.device_bytes, column.forward_workspace_bytes, column.backward_workspace_bytes)
        return column.seconds, *memory, may_overflow(column)

    left: list[UnitColumn] = []
    for column in sorted(found, key=costs):
        mine = costs(column)
        if not any(all(theirs <= own for theirs, own in zip(costs(each), mine, strict=True)) for each in left):
            left.append(column)
    return tuple(left)


@dataclass(slots=True)
class _UnitProgram:
    """The MILP of one class."""

    unit: UnitProfile
    storages: dict[int, TracedStorage]
    program: MixedProgram = field(default_factory=MixedProgram)
    stored: dict[tuple[int, str], int] = field(default_factory=dict)
    """Variable of each base and action."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each of these variables."""
    run: dict[int, int] = field(default_factory=dict)
    """Variable of each base that may run again."""

    def sweep(self) -> list[UnitColumn]:
        """Return the cheapest column of each budget, largest budget first."""
        self._add_variables()
        replays = self.program.variable(self._scaled(REPLAY_SECONDS + REPLAY_OP_SECONDS * len(self.unit.ops)))
        self._add_rows(replays)
        self._add_draws()
        self._add_overflows()
        most = keep_all(self.unit).device_bytes
        if not self.sizes or not most:
            return []
        sizes = {variable: size / most for variable, size in self.sizes.items()}
        budget_row = self.program.row(sizes.items())
        by_variable = [sizes.get(variable, 0.0) for variable in range(len(self.program.costs))]
        values = self.program.minimum(gap=0.0, seconds=_SECONDS_MAX, costs=by_variable)
        if values is None:
            return []
        least = float(values @ by_variable)
        linear = np.linspace(least, 1.0, LINEAR_BUDGETS)
        geometric = np.geomspace(max(least, 1e-6), 1.0, GEOMETRIC_BUDGETS)
        found: list[UnitColumn] = []
        for budget in sorted({float(each) for each in (*linear, *geometric)}, reverse=True):
            if found and found[-1].device_bytes <= budget * most:
                continue  # The column of a larger budget fits this one, too.
            self.program.most[budget_row] = budget + 1e-9
            if (values := self.program.minimum(gap=0.0, seconds=_SECONDS_MAX)) is not None:
                found.append(self._column(values))
        return found

    def _scaled(self, seconds: float) -> float:
        """Return a cost in thousandths of the unit's time, so that the solver's absolute tolerance is far below."""
        whole = sum(storage.seconds for storage in self.storages.values()) + REPLAY_SECONDS
        return seconds / whole * 1e3

    def _add_variables(self) -> None:
        for base, storage in self.storages.items():
            ways = [("keep", storage.bytes, 0.0)] if storage.is_storable else []
            ways += [(each.action, each.device_bytes, each.seconds) for each in storage.packings]
            for action, size, seconds in ways:
                self.stored[base, action] = variable = self.program.variable(self._scaled(HOOK_SECONDS + seconds))
                self.sizes[variable] = size
            if self.unit.is_replayable and base != 0 and not storage.is_kept:
                self.run[base] = self.program.variable(self._scaled(storage.seconds + _RUN_SECONDS))

    def _add_rows(self, replays: int) -> None:
        """Add the rows of storing and running: needed storages exist, and replayed ops find their inputs."""
        for base, storage in self.storages.items():
            stored = self._stored(base)
            self.program.row(stored, most=1)
            if storage.is_needed:
                self.program.row(stored + self._run(base), least=1)
            for run, _ in self._run(base):
                self.program.row([(replays, 1), (run, -1)], least=0)
                for read in storage.reads:
                    self.program.row([*self._stored(read), *self._run(read), (run, -1)], least=0)
        # A replay begins at the unit's input, and every pack may need one.
        self.program.row([*self._stored(0), (replays, -1)], least=0)
        for (base, action), variable in self.stored.items():
            if self.unit.is_replayable and action != "keep" and base != 0:
                self.program.row([*self._stored(0), (variable, -1)], least=0)

    def _add_draws(self) -> None:
        """Add the rows of random ops: one before a random op that runs again draws too, so that both draw as before."""
        random = [op.number for op in self.unit.ops if op.is_random]
        base_of = {op.number: op.number if op.base is None else op.base for op in self.unit.ops}
        for place, early in enumerate(random):
            draw = self.program.variable(self._scaled(self.unit.ops[early].seconds))
            draws = [] if self.unit.ops[early].has_effect else [(draw, 1.0)]
            for late in random[place + 1 :]:
                for run, _ in self._run(base_of[late]):
                    self.program.row([*draws, *self._run(base_of[early]), (run, -1.0)], least=0)

    def _add_overflows(self) -> None:
        """Add the rows of packs below an op with an effect: an overflow needs a way back to kept tensors."""
        if not self.unit.is_replayable:
            return
        below = {base for base, storage in self.storages.items() if storage.is_kept}
        while more := {base for base, each in self.storages.items() if not below.isdisjoint(each.reads)} - below:
            below |= more
        # 1 where the storage can be made again after all packs have overflowed.
        reruns = {
            base: self.program.variable(upper=0.0 if self.storages[base].is_kept else 1.0, is_whole=False)
            for base in sorted(below)
        }
        for base, rerun in reruns.items():
            storage = self.storages[base]
            for read in below.intersection(storage.reads):
                kept = [(self.stored[read, "keep"], 1.0)] if (read, "keep") in self.stored else []
                self.program.row([*kept, (reruns[read], 1), (rerun, -1)], least=0)
            for packing in storage.packings:
                self.program.row([(rerun, 1), (self.stored[base, packing.action], -1)], least=0)

    def _stored(self, base: int) -> list[tuple[int, float]]:
        return [(variable, 1.0) for (stored, _), variable in self.stored.items() if stored == base]

    def _run(self, base: int) -> list[tuple[int, float]]:
        return [(self.run[base], 1.0)] if base in self.run else []

    def _column(self, values: NDArray[np.float64]) -> UnitColumn:
        store = {base: action for (base, action), variable in self.stored.items() if values[variable] > 0.5}
        run = [base for base, variable in self.run.items() if values[variable] > 0.5]
        return column_from(self.unit, self.storages, store, run=run)
