"""Targets that overlap in memory: they are filled only if the checkpoint has equal bytes for what they share.

Names of exactly the same elements are one target (`ties.py`), so no two targets here are those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import numpy as np
import torch

from holdfast.backends.torch.local_shards import extent_bytes
from holdfast.backends.torch.tensors import TorchTarget
from holdfast.base.ports.framework import Wanted
from holdfast.errors import InvalidError
from holdfast.settings import MIB

_TOGETHER_BYTES = 64 * MIB
"""Targets of so many bytes are filled in one call, or one larger target."""

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that are compared, by their bytes."""


@dataclass(frozen=True, slots=True)
class _TargetMemory:
    """Memory that one target fills, from its first to its last byte; not all in between need be its own."""

    wanted: Wanted
    """The target."""

    number: int
    """Which of the target's memories it is."""

    local: torch.Tensor
    """The memory."""

    start: int
    """Address of the first byte."""

    def in_scratch(self, scratch: torch.Tensor, first: int, unit: int) -> torch.Tensor:
        """Return the view of this memory in scratch memory that begins at an address, one element for `unit` bytes.

        Its last dimension is the units of one element.
        """
        count = self.local.itemsize // unit
        steps = [step * count for step in self.local.stride()]
        return scratch.as_strided((*self.local.shape, count), (*steps, 1), (self.start - first) // unit)


def require_equal_overlaps(wanted: Sequence[Wanted], fill: Callable[[Sequence[Wanted]], None]) -> None:
    """Refuse targets that share memory, within one or among several, if the checkpoint has different bytes for it.

    The order of reads would decide which bytes stay. Where all bytes are equal, any order is right.

    Args:
        wanted: All targets of this rank.
        fill: Fills other targets with what the checkpoint has.
    Raises:
        InvalidError: Names both targets, or the one.
    """
    for first, stop, runs in _clusters(wanted):
        # Every address of an element is a multiple of the unit behind `first`; 8 bytes are the largest integer.
        unit = math.gcd(8, *(number for run in runs for number in (run.local.itemsize, run.start - first)))
        if _is_shared(first, stop, runs, unit):
            _require_equal(first, stop, runs, unit, fill)


def _clusters(wanted: Sequence[Wanted]) -> Iterator[tuple[int, int, list[_TargetMemory]]]:
    """Yield memory in which elements may be shared: addresses of its start and stop, and the runs in it."""
    members = [
        (each, number, local, local.data_ptr())
        for each in wanted
        for number, (_, local) in enumerate(cast("TorchTarget", each.target).memories)
    ]
    # Lists and one sort: a state may have 100,000 tensors, nearly all of them apart.
    addresses = np.array([address for *_, address in members], dtype=np.int64)
    extents = np.array([extent_bytes(local) for _, _, local, _ in members], dtype=np.int64)
    is_strided = np.array([not local.is_contiguous() for _, _, local, _ in members])
    numbers = np.flatnonzero(extents)
    if not numbers.size:
        return
    starts = addresses[numbers]
    order = np.argsort(starts, kind="stable")
    starts, numbers = starts[order], numbers[order]
    stops = np.maximum.accumulate(starts + extents[numbers])
    is_first = np.append(True, starts[1:] >= stops[:-1])
    bounds = np.append(np.flatnonzero(is_first), len(numbers))
    # One memory with strides may overlap itself.
    is_suspect = np.logical_or.reduceat(is_strided[numbers], bounds[:-1]) | (np.diff(bounds) > 1)
    for cluster in np.flatnonzero(is_suspect).tolist():
        begin, end = bounds[cluster], bounds[cluster + 1]
        runs = [_TargetMemory(*members[number]) for number in sorted(numbers[begin:end])]
        if len(runs) > 1 or not _is_injective(runs[0].local):
            yield int(starts[begin]), int(stops[end - 1]), runs


def _is_injective(local: torch.Tensor) -> bool:
    """Return whether it is certain that no two elements have one address: each stride passes all smaller ones."""
    reach = 0
    for step, length in sorted(zip(local.stride(), local.shape, strict=True)):
        if length > 1 and step <= reach:
            return False
        reach += (length - 1) * step
    return True


def _is_shared(first: int, stop: int, runs: Sequence[_TargetMemory], unit: int) -> bool:
    """Return whether an address has several elements: the columns of one matrix have none."""
    marks = torch.zeros((stop - first) // unit, dtype=torch.bool)
    for run in runs:
        run.in_scratch(marks, first, unit).fill_(True)
    return int(marks.count_nonzero()) * unit < sum(run.local.nbytes for run in runs)


def _require_equal(
    first: int, stop: int, runs: Sequence[_TargetMemory], unit: int, fill: Callable[[Sequence[Wanted]], None]
) -> None:
    scratch = torch.zeros((stop - first) // unit, dtype=_UNITS[unit])
    is_filled = torch.zeros(len(scratch), dtype=torch.bool)
    for number, (run, given) in enumerate(_stored(runs, unit, fill)):
        there, is_there = run.in_scratch(scratch, first, unit), run.in_scratch(is_filled, first, unit)
        differs = (there != given).logical_and_(is_there)
        if bool(differs.any()):
            marks = torch.zeros_like(is_filled)
            run.in_scratch(marks, first, unit).copy_(differs)
            other = next(each for each in runs[:number] if bool(each.in_scratch(marks, first, unit).any()))
            raise InvalidError(
                f"{run.wanted.fqn}: shares a part of its memory with {other.wanted.fqn}, and the checkpoint holds "
                "different values for that part; expected equal values, or memory of its own for each. Give one of "
                "them its own memory, e.g. tensor.clone(), or leave it out with skip="
            )
        there.copy_(given)
        is_there.fill_(True)
        if not torch.equal(there, given):
            raise InvalidError(
                f"{run.wanted.fqn}: the target {list(run.local.shape)} has strides {list(run.local.stride())}, so "
                "several of its elements share memory, and the checkpoint holds different values for them; expected "
                "memory for each. Pass tensor.contiguous(), or leave it out with skip="
            )


def _stored(
    runs: Sequence[_TargetMemory], unit: int, fill: Callable[[Sequence[Wanted]], None]
) -> Iterator[tuple[_TargetMemory, torch.Tensor]]:
    """Yield each run with the units that a load would write to it; the last dimension is the units of one element."""
    batch: list[Sequence[_TargetMemory]] = []
    room = _TOGETHER_BYTES
    for _, own in groupby(runs, key=lambda run: id(run.wanted)):
        batch.append([*own])
        room -= cast("TorchTarget", batch[-1][0].wanted.target).local_bytes
        if room <= 0:
            yield from _filled(batch, unit, fill)
            batch, room = [], _TOGETHER_BYTES
    if batch:
        yield from _filled(batch, unit, fill)


def _filled(
    batch: Sequence[Sequence[_TargetMemory]], unit: int, fill: Callable[[Sequence[Wanted]], None]
) -> Iterator[tuple[_TargetMemory, torch.Tensor]]:
    """Yield the runs of some targets, each with the stored units; one call fills all of these targets."""
    copies = []
    for run, *_ in batch:
        target = cast("TorchTarget", run.wanted.target)
        # A clone: what a load with `partial` leaves as it is keeps its present bytes.
        dense = [(box, local.cpu().resolve_conj().resolve_neg()) for box, local in target.memories]
        copies.append(target.over([(box, local.clone(memory_format=torch.contiguous_format)) for box, local in dense]))
    fill([replace(own[0].wanted, target=copy) for own, copy in zip(batch, copies, strict=True)])
    for own, copy in zip(batch, copies, strict=True):
        for run in own:
            (_, filled), local = copy.memories[run.number], run.local
            filled = filled.conj_physical() if local.is_conj() else filled
            filled = filled.neg() if local.is_neg() else filled
            units = filled.reshape(-1).view(torch.uint8).view(_UNITS[unit])
            yield run, units.view(*local.shape, local.itemsize // unit)
