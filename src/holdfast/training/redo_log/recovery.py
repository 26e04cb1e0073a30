"""Goes on from a loaded base to the last recorded step: reads the records after the base, and applies each in order.

Every rank reads its own folder of the log. The ranks agree on how far every one of them can go, then redo record after
record. A record that one rank cannot read ends the redo on all ranks, before any rank applies the record.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from holdfast.base.geometry.region import region_boxes
from holdfast.base.ports.framework import Wanted
from holdfast.base.ports.gradients import StepRedo
from holdfast.base.ports.packs import packs_under
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import Piece
from holdfast.base.types.redo import Record
from holdfast.base.types.reports import LoadReport
from holdfast.core.engine.read import execute
from holdfast.core.plan.reads import load_plan
from holdfast.errors import CheckpointError, CorruptError, first_three, text_of
from holdfast.stored.repository.logs import SealedRecord, read_records, steps_reached
from holdfast.stored.repository.timelines import timelines_from
from holdfast.training.coordination.job import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Redone:
    """How far the redo went, the same on every rank."""

    step: int
    """The step that the state holds now: the base, or that of the last record that was applied."""

    records: int
    """Records that were applied."""

    reach: int
    """The last step to which the log of every rank reaches."""

    why: str = ""
    """Why the redo ended before a recorded step, or why there is no log to follow; empty at the last recorded step."""

    departed: tuple[str, ...] = ()
    """Tensors whose sums differ from those recorded: the state is not that of training, and must be loaded again."""

    is_inside: bool = False
    """Whether the state is inside an accumulation, and must be loaded again: training can go on at `step`."""

    def report(self, of_base: LoadReport, seconds: float) -> LoadReport:
        """Return the report of the load, given the seconds that redoing took."""
        seconds = seconds if self.records else 0.0
        base, in_all = of_base.step if self.records else None, of_base.seconds + seconds
        redone = replace(of_base, step=self.step, base_step=base, redone_steps=self.records, redo_seconds=seconds)
        return replace(redone, seconds=in_all, why_not_further=self.why)


class _Answer(msgspec.Struct, array_like=True):
    """One rank's answer in a gather."""

    step: int
    why: str = ""


class LogRedo:
    """The redo of one log on one rank. Every rank makes one; its calls are collectives."""

    def __init__(self, job: Job, store: Store, base: Manifest, redo: StepRedo) -> None:
        """Read nothing yet.

        Args:
            job: The ranks.
            store: The root of the run.
            base: The manifest of the base that the state holds.
            redo: Applies records to the state.
        """
        assert base.step is not None, "a run has steps"
        self._job, self._store, self._base, self._redo = job, store, base, redo
        self._base_step: int = base.step
        self._logs: dict[int, Mapping[int, SealedRecord]] = {}

    def run(self, up_to: int | None = None) -> Redone:
        """Redo all records that count, or those up to a step.

        Args:
            up_to: The step to end at; None: the last one at which training can go on.
        Raises:
            CheckpointError: Applying a record failed: the state is that of no step, and must be loaded again.
        """
        reach, goal, why = self._agree(up_to)
        at, applied = self._base_step, 0
        for step in self._steps(goal) if goal > at else ():
            sealed = self._own[step]
            problem = self._read(step, sealed)
            worst = self._worst(problem)
            if worst:
                why = worst
                break
            departed = self._apply(sealed)
            at, applied = step, applied + 1
            if departed:
                return Redone(at, applied, reach, f"step {step} departs", departed)
        resumable, _ = self._resumable_by_all(at, "")
        if resumable < at:
            return Redone(resumable, applied, reach, why, is_inside=True)
        if applied:
            self._finish(self._own[at].record)
        return Redone(at, applied, reach, why if at != up_to else "")

    @property
    def _own(self) -> Mapping[int, SealedRecord]:
        return self._log_of(self._job.comm.rank)

    def _log_of(self, rank: int) -> Mapping[int, SealedRecord]:
        if rank not in self._logs:
            self._logs[rank] = read_records(self._store, self._base.log, rank, self._base_step)
        return self._logs[rank]

    def _agree(self, up_to: int | None) -> tuple[int, int, str]:
        """Return the reach of the log, the step to redo to, and why that is not the reach; a collective."""
        comm, base = self._job.comm, self._base
        end = _Answer(-1)
        if comm.rank == 0:
            end = self._end_of_log(up_to)
        end = msgspec.msgpack.decode(comm.broadcast(msgspec.msgpack.encode(end)), type=_Answer)
        if end.why:
            return self._base_step, self._base_step, end.why
        if base.world_size != comm.world_size:
            why = f"the log is of {base.world_size} ranks, and {comm.world_size} load"
            return self._base_step, self._base_step, why
        own = self._reach(None if end.step < 0 else end.step)
        reach, why = self._lowest(own)
        goal, why = self._resumable_by_all(reach if up_to is None else min(reach, up_to), why)
        return reach, goal, why

    def _resumable_by_all(self, goal: int, why: str) -> tuple[int, str]:
        """Return the last step up to a goal at which every rank can go on, and why that is not the goal; a collective.

        A boundary inside an accumulation is no point to go on from, on whichever rank.
        """
        while goal > self._base_step:
            lower, lower_why = self._lowest(self._resumable(goal))
            if lower == goal:
                break
            goal, why = lower, lower_why or why
        return goal, why

    def _end_of_log(self, up_to: int | None) -> _Answer:
        """Return the step below which the log counts, or why no record does. On rank 0."""
        try:
            stored = timelines_from(self._store, self._base_step)
            base = next((each for each in stored.chain if each.digest == self._base.digest), None)
            if base is None:
                return _Answer(-1, f"step {self._base_step} is superseded")
            end = stored.log_end(base)
        except CheckpointError as error:
            return _Answer(-1, text_of(error))
        return _Answer(-1 if end is None else end)

    def _reach(self, below: int | None) -> _Answer:
        """Return the last step that this rank can redo."""
        at = self._base_step
        try:
            records = self._own
            for step in steps_reached(records, at, below):
                unlike = self._redo.unlike(records[step].record)
                if unlike:
                    return _Answer(at, unlike)
                at = step
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
            return _Answer(at, text_of(error))
        later = [step for step in records if step > at and (below is None or step < below)]
        return _Answer(at, f"step {min(later)} is recorded, and no record leads there from step {at}" if later else "")

    def _resumable(self, goal: int) -> _Answer:
        """Return the last step up to a goal at which training can go on."""
        why = ""
        for step in reversed(self._steps(goal)):
            reason = self._own[step].record.not_resumable
            if not reason:
                return _Answer(step, why)
            why = why or f"training cannot go on at step {step}: {reason}"
        return _Answer(self._base_step, why)

    def _steps(self, goal: int) -> list[int]:
        return steps_reached(self._own, self._base_step, goal + 1)

    def _lowest(self, own: _Answer) -> tuple[int, str]:
        """Return the lowest step of all ranks, with its reason; a collective."""
        answers = self._gather(own)
        rank = min(range(len(answers)), key=lambda number: answers[number].step)
        if all(answer.step == answers[rank].step for answer in answers) or not answers[rank].why:
            return answers[rank].step, answers[rank].why
        return answers[rank].step, f"rank {rank}: {answers[rank].why}"

    def _worst(self, problem: str) -> str:
        """Return the problem of the first rank that has one, with its number; empty if no rank has one."""
        if not self._any(bool(problem)):
            return ""
        answers = self._gather(_Answer(0, problem))
        return next((f"rank {rank}: {each.why}" for rank, each in enumerate(answers) if each.why), "")

    def _any(self, own: bool) -> bool:
        """Return whether any rank says yes. A collective; its bytes do not grow with the ranks, as a gather's do."""
        return self._job.comm.bitwise_or(bytes([own])) != b"\0"

    def _gather(self, own: _Answer) -> list[_Answer]:
        gathered = self._job.comm.all_gather(msgspec.msgpack.encode(own))
        return [msgspec.msgpack.decode(each, type=_Answer) for each in gathered]

    def _read(self, step: int, sealed: SealedRecord) -> str:
        """Read the tensors of a record into the memory of the redo; return why that failed."""
        job, settings = self._job, self._job.settings
        try:
            wanted = self._redo.wanted(sealed.record)
            pieces = self._pieces(step, sealed, wanted)
            plan = load_plan(wanted, lambda name, _: pieces.get(name, ()), settings._tuning.read_window_bytes)
            targets = [each.target for each in wanted]
            execute(plan, packs_under(self._store, ""), targets, settings, job.codecs)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
            return f"step {step} cannot be redone: {text_of(error)}"
        return ""

    def _pieces(self, step: int, sealed: SealedRecord, wanted: Sequence[Wanted]) -> Mapping[str, Sequence[Piece]]:
        """Return the pieces of the wanted tensors: of this rank if they suffice, else of all ranks.

        Raises:
            CorruptError: A part of a tensor is in no rank's record.
        """
        pieces = sealed.pieces
        lacking = _uncovered(wanted, pieces)
        if not lacking:
            return pieces
        joined: dict[str, list[Piece]] = {}
        for rank in range(self._job.comm.world_size):
            record = self._log_of(rank).get(step)
            for name, found in () if record is None else record.pieces.items():
                joined.setdefault(name, []).extend(found)
        lacking = _uncovered(wanted, joined)
        if lacking:
            raise CorruptError(f"no segment holds all of {first_three(lacking)}")
        return joined

    def _finish(self, last: Record) -> None:
        """Restore the values of the last record; raise on every rank if any rank failed. A collective."""
        problem, failure = "", None
        try:
            self._redo.finish(last)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
            problem, failure = text_of(error), error
        worst = self._worst(problem)
        if worst:
            raise CorruptError(f"the values of step {last.step} could not be restored: {worst}") from failure

    def _apply(self, sealed: SealedRecord) -> tuple[str, ...]:
        """Apply a record; return the tensors that depart on any rank. A collective."""
        own, error = "", None
        try:
            own = "\n".join(self._redo.apply(sealed.record))
        except Exception as failure:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
            own, error = "", failure
        if not self._any(bool(own) or error is not None):
            return ()
        answers = self._gather(_Answer(0 if error is None else 1, own if error is None else text_of(error)))
        failed = [rank for rank, answer in enumerate(answers) if answer.step]
        if failed:
            text = f"step {sealed.record.step} could not be redone on rank {failed[0]}: {answers[failed[0]].why}"
            raise CorruptError(text) from error
        return tuple(sorted({name for answer in answers if answer.why for name in answer.why.split("\n")}))


def _uncovered(wanted: Sequence[Wanted], pieces: Mapping[str, Sequence[Piece]]) -> list[str]:
    """Return the names of wanted tensors of which some element is in no piece. Pieces of one record do not overlap."""
    names = []
    for each in wanted:
        found = 0
        for box in each.boxes:
            for piece in pieces.get(each.stored_fqn, ()):
                for part in region_boxes(piece.region, piece.tensor.global_shape):
                    common = box.intersect(part)
                    found += 0 if common is None else common.numel
        if found < sum(box.numel for box in each.boxes):
            names.append(each.stored_fqn)
    return names
