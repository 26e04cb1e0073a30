"""Loads a base and follows the log: the newest base and all records after it, or the base before a recorded step.

If a redo departs from the recorded run, the base is loaded again and redone once more: a flipped bit of this process
passes. After that the base is taken alone, loudly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from holdfast.base.ports.store import Store
from holdfast.base.types.reports import LoadReport
from holdfast.core.format.names import manifest_key
from holdfast.core.format.step_name import StepName, step_name
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError, first_three, text_of
from holdfast.stored.repository.catalog import exists
from holdfast.stored.repository.timelines import run_timelines
from holdfast.training.coordination.job import Job
from holdfast.training.loading.load import Loaded, load, load_attempt
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.named_step import find_named
from holdfast.training.redo_log.recovery import LogRedo, Redone
from holdfast.training.redo_log.segments import read_records, steps_reached
from holdfast.training.runs.position import RunPosition
from holdfast.training.telemetry.dispatcher import EventDispatcher

logger = logging.getLogger(__name__)


def load_with_log(
    job: Job,
    position: RunPosition,
    request: LoadRequest,
    dispatcher: EventDispatcher,
    note: Callable[[LoadRequest, Loaded], None],
    recorded: RecordedStep | None = None,
) -> LoadReport | None:
    """Load a base and follow the log; return the report, or None for a new run. A collective.

    Args:
        job: The ranks.
        position: The position of this process in the run.
        request: What is loaded, and how.
        dispatcher: Receives the events.
        note: Takes note of each loaded base. The reader lease still holds the base.
        recorded: The step to go back to; None for the newest valid base and all records after it.
    Raises:
        CorruptError: The step could not be redone.
    """
    store = position.home.store
    find = None if recorded is None else partial(find_named, named=StepName(recorded.base, recorded.digest))
    step = None if recorded is None else recorded.step
    follower = LogFollower(job, store, request, step)
    while True:
        with load_attempt(job, position.choice(find, discards=False), request, dispatcher) as attempt:
            loaded = load(attempt)
            if loaded is None:
                return None
            note(request, loaded)
            redone = follower.follow(loaded)
            if redone is not None:
                if step not in (None, redone.step):
                    raise CorruptError(
                        f"{store.url}: step {step} cannot be redone: {redone.why}. The state holds step {redone.step}; "
                        "load again without a step to go on from there"
                    )
                position.move_on(redone.step, leaves_records=redone.reach > redone.step)
                return redone.report(loaded.report)


class RecordedStep(msgspec.Struct, frozen=True):
    """A step that only a record of the log holds, and the base from which the step is redone."""

    step: int
    base: int
    digest: str = ""
    log: str = ""
    end: int | None = None


_NOT_RECORDED = RecordedStep(-1, -1)


def recorded_step(job: Job, store: Store, step: object) -> RecordedStep | None:
    """Return a named step without a manifest, if a log may hold the step; None otherwise. A collective.

    Args:
        job: The ranks.
        store: The root of the run.
        step: The step as the caller names it, the same on every rank.
    Raises:
        MissingError: The records of some rank do not reach the step; on every rank.
    """
    named = step_name(step)
    if named.step is None or named.digest:
        return None
    own = _NOT_RECORDED
    if job.comm.rank == 0:
        with suppress(CheckpointError):  # The load raises the error.
            own = _recorded_at(store, named.step)
    found = msgspec.msgpack.decode(job.comm.broadcast(msgspec.msgpack.encode(own)), type=RecordedStep)
    if found == _NOT_RECORDED:
        return None
    records = read_records(store, found.log, job.comm.rank, found.base)
    steps = [each for each in steps_reached(records, found.base, found.end) if each <= found.step]
    reaches = [int(text) for text in job.comm.all_gather(str(max(steps, default=found.base)).encode())]
    if min(reaches) != found.step:
        raise MissingError(
            f"{store.url}: no committed step {found.step}; after step {found.base} the redo log of rank "
            f"{reaches.index(min(reaches))} holds no step from {min(reaches) + 1} on that could lead there. Expected a "
            f"committed step, or one up to {min(reaches)} at which a boundary was. Nothing was changed"
        )
    return found


def _recorded_at(store: Store, step: int) -> RecordedStep:
    """Return a step with the newest base before it whose log may hold the step."""
    if exists(store, manifest_key(step)):
        return _NOT_RECORDED
    stored = run_timelines(store)
    if stored.superseded_at(step):
        return _NOT_RECORDED
    for manifest in reversed(stored.chain):
        if manifest.step < step and manifest.log and manifest.digest is not None:
            end = stored.log_end(manifest)
            if end is None or step < end:
                return RecordedStep(step, manifest.step, manifest.digest, manifest.log, end)
    return _NOT_RECORDED


class LogFollower:
    """Follows the log after a load, and decides when the base has to be loaded again. The same on every rank."""

    def __init__(self, job: Job, store: Store, request: LoadRequest, step: int | None = None) -> None:
        """Follow nothing yet.

        Args:
            job: The ranks.
            store: The root of the run.
            request: What is loaded, and how.
            step: The step to end at; None for the last one.
        """
        self._job, self._store, self._request, self._step = job, store, request, step
        self._failures: list[str] = []

    def follow(self, loaded: Loaded) -> Redone | None:
        """Redo the records after a base; return None if the base must be loaded again. A collective.

        A flipped bit in the process that redoes passes with the second try. After two failures the base is taken alone.
        """
        manifest = loaded.manifest
        assert manifest.step is not None, "a run has steps"
        base = Redone(manifest.step, 0, manifest.step)
        if not manifest.log:
            return base
        if len(self._failures) > 1:
            why = f"the redo did not give the recorded state: {self._failures[-1]}"
            logger.error("step %d is loaded alone: %s", manifest.step, why)
            return replace(base, why=why)
        request = self._request
        unfit = _unfit_because(request)
        if unfit:
            return replace(base, why=unfit)
        try:
            redo = self._job.framework.redo(request.state, request.selection)
        except InvalidError as error:
            # Every rank passes the same names, so every rank ends here.
            return replace(base, why=text_of(error))
        try:
            redone = LogRedo(self._job, self._store, manifest, redo).run(self._step)
        except CorruptError as error:
            self._failures.append(text_of(error))
            return None
        if redone.departed:
            self._failures.append(f"step {redone.step} differs in {first_three(redone.departed)}")
            return None
        return redone


def _unfit_because(request: LoadRequest) -> str:
    """Return why a load cannot follow the log; empty if the load can."""
    selection = request.selection
    if selection.only is not None or selection.skip or selection.partial or not selection.hyperparameters:
        return "the load leaves out parts of the state"
    if selection.cast or request.rename.rules:
        return "the load converts the state"
    return ""
