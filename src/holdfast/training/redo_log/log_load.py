"""Loads a base and follows the log: the newest base and all records after it, or the base before a recorded step.

If a redo departs from the recorded run, the base is loaded again and redone once more: a flipped bit of this process
passes. After that the base is taken alone, loudly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from holdfast.base.ports.store import Store
from holdfast.base.types.events import LogRedone
from holdfast.base.types.reports import LoadReport
from holdfast.errors import CorruptError, MissingError, first_three, text_of
from holdfast.stored.repository.logs import base_reaching
from holdfast.stored.repository.quarantine import is_skipped, list_records
from holdfast.stored.repository.timelines import run_timelines
from holdfast.training.coordination.job import Job
from holdfast.training.loading.load import Loaded, load, load_attempt
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.named_step import FoundStep, StepQuery
from holdfast.training.redo_log.recovery import LogRedo, Redone
from holdfast.training.runs.position import RunPosition
from holdfast.training.telemetry.dispatcher import EventDispatcher
from holdfast.training.telemetry.log_lines import shown_seconds

logger = logging.getLogger(__name__)


def load_with_log(
    job: Job,
    position: RunPosition,
    request: LoadRequest,
    dispatcher: EventDispatcher,
    note: Callable[[Loaded], None],
    find: StepQuery | None = None,
    step: int | None = None,
) -> LoadReport | None:
    """Load a step and follow its log; return the report, or None for a new run. A collective.

    Args:
        job: The ranks.
        position: The position of this process in the run.
        request: What is loaded, and how.
        dispatcher: Receives the events.
        note: Takes note of each loaded base. The reader lease still holds the base.
        find: Finds a given step; None for the newest valid step and all records after it.
        step: The number of the given step, if it was given by number: if only a record holds it, it is redone.
    Raises:
        MissingError: The given step does not exist, and no log reaches the step; nothing was changed.
        CorruptError: The given step could not be redone.
    """
    store = position.home.store
    finder = find if find is None or step is None else partial(_found_or_recorded, find=find, step=step)
    follower = LogFollower(job, store, request, step)
    while True:
        with load_attempt(job, position.choice(finder, discards=False), request, dispatcher) as attempt:
            loaded = load(attempt)
            if loaded is None:
                return None
            note(loaded)
            if find is not None and step in (None, loaded.manifest.step):
                if loaded.manifest.step is not None and loaded.manifest.log:
                    position.move_on(loaded.manifest.step, leaves_records=True)
                return loaded.report
            began = job.clock.monotonic_seconds()
            redone = follower.follow(loaded)
            if redone is None:
                continue
            if step not in (None, redone.step):
                raise CorruptError(
                    f"{store.url}: step {step} cannot be redone: {redone.why}. The state holds step {redone.step}; "
                    "load again without a step to go on from there"
                )
            position.move_on(redone.step, leaves_records=redone.reach > redone.step)
            report = redone.report(loaded.report, job.clock.monotonic_seconds() - began)
            _announce(job, store.url, report, dispatcher)
            return report


def _found_or_recorded(store: Store, find: StepQuery, step: int) -> FoundStep:
    """Return the step that a finder finds; of a step that is absent or quarantined, the base before. On rank 0.

    Raises:
        MissingError: The step does not exist, and no log reaches the step.
    """
    try:
        found = find(store)
    except MissingError:
        recorded = _recorded(store, step)
        if recorded is None:
            raise
        return recorded
    stored, manifest = found
    # A run without a log costs no request here. A manifest that cannot be read may have stated one.
    may_have_log = any(each.log or each.timeline is None for each in stored.chain)
    is_damaged = may_have_log and is_skipped(store, step, manifest.key, list_records(store))
    return (_recorded(store, step) if is_damaged else None) or found


def _recorded(store: Store, step: int) -> FoundStep | None:
    stored = run_timelines(store)
    base = base_reaching(store, stored, step)
    manifest = None if base is None else stored.at(base)
    return None if manifest is None else (stored, manifest)


def _announce(job: Job, url: str, report: LoadReport, dispatcher: EventDispatcher) -> None:
    """Dispatch that records were redone, and log a line on rank 0."""
    step, base, records, seconds = report.step, report.base_step, report.redone_steps, report.redo_seconds
    if step is None or base is None:
        return
    dispatcher.dispatch(LogRedone(step, url, job.comm.rank, base, records, seconds, job.clock.unix_seconds()))
    if job.comm.rank == 0:
        count, took = f"{records} record{'s' * (records != 1)}", shown_seconds(seconds)
        logger.info("step %d: base %d and %s redone in %s", step, base, count, took)


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
        self._ended: Redone | None = None
        """How a redo ended inside an accumulation: the next one ends before."""

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
        redo, problem = None, ""
        try:
            redo = self._job.framework.redo(request.state, request.selection)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
            problem = text_of(error)
        problems = [text.decode() for text in self._job.comm.all_gather(problem.encode())]
        if redo is None or any(problems):
            rank, why = next((rank, text) for rank, text in enumerate(problems) if text)
            return replace(base, why=f"rank {rank}: {why}")
        try:
            up_to = self._step if self._ended is None else self._ended.step
            redone = LogRedo(self._job, self._store, manifest, redo).run(up_to)
        except CorruptError as error:
            self._failures.append(text_of(error))
            return None
        if redone.departed:
            self._failures.append(f"step {redone.step} differs in {first_three(redone.departed)}")
            return None
        if redone.is_inside:
            self._ended = redone
            return None
        return redone if self._ended is None else replace(redone, why=redone.why or self._ended.why)


def _unfit_because(request: LoadRequest) -> str:
    """Return why a load cannot follow the log; empty if the load can."""
    selection = request.selection
    if selection.only is not None or selection.skip or selection.partial or not selection.hyperparameters:
        return "the load leaves out parts of the state"
    if not request.strict:
        return "the load is not strict: names may be missing"
    if selection.cast or request.rename.rules or request.layouts:
        return "the load converts the state"
    return ""
