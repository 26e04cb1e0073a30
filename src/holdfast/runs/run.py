"""One run: a root with many steps, saved, listed and loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from holdfast.checkpoint.location import CheckpointLocation, none_allowed, require_no_checkpoint
from holdfast.coordination.job import Job
from holdfast.coordination.save_schedule import Schedule
from holdfast.engine.write import PackWriter
from holdfast.errors import CheckpointError, InvalidError, MissingError
from holdfast.format.names import MANIFEST_FILE, STEP_MAX, step_folder
from holdfast.leases.writer import WriterLease
from holdfast.loading.load import LoadRequest, load, load_attempt
from holdfast.loading.step_choice import ExactStep, NewestValid, StepSelector
from holdfast.policies import Policies
from holdfast.ports.framework import Selection
from holdfast.ports.observer import Observer
from holdfast.ports.store import Packs, Store
from holdfast.repository.catalog import committed_steps, read_run_id, step_folders
from holdfast.repository.epochs import current_fence, fenced_error, is_valid
from holdfast.repository.quarantine import identity_at, list_records
from holdfast.runs.garbage_collection import Background, CheckpointGC, Pins
from holdfast.runs.preemption import PreemptionHandler, owed_bytes
from holdfast.runs.step_metrics import WantedMetrics
from holdfast.runs.step_request import LastCommitted, Lineage, RunParts, StepRequest, StepState
from holdfast.runs.suspect_steps import SuspectSteps
from holdfast.runs.tags import tag_step, untag
from holdfast.saving.deduplication import previous_of
from holdfast.saving.handle import SaveHandle
from holdfast.saving.save import begin_save
from holdfast.telemetry.dispatcher import EventDispatcher
from holdfast.types.manifest import Parent
from holdfast.types.reports import LoadReport, SaveReport

logger = logging.getLogger(__name__)


class Run:
    """A root and the job that saves into it."""

    def __init__(
        self,
        store: Store,
        job: Job,
        references: Packs = none_allowed,
        policies: Policies = Policies(),  # noqa: B008 - frozen
        observers: Sequence[Observer] = (),
        preemption_handler: PreemptionHandler | None = None,
    ) -> None:
        require_no_checkpoint(store)
        self._dispatcher = EventDispatcher(observers, job.clock)
        self._store, self._job = store, job
        self._home = CheckpointLocation(store, "", None, references=references, root=store)
        self._writer_lease = WriterLease(store, job.clock, job.settings.lease_seconds)
        self._lineage = Lineage(None, None)
        self._loaded: int | None = None
        self._newer: tuple[int, ...] = ()
        """Newer steps that existed when the last load asked for an older step by number."""
        self._pending: list[SaveHandle] = []
        self._closed = False
        self._schedule = None if policies.save is None else Schedule(job, policies.save)
        self._keep = policies.keep
        self._preemption = preemption_handler
        self._pins = Pins()
        self._collecting: Background | None = None
        if policies.keep is not None and job.comm.rank == 0:
            collector = CheckpointGC(store, job.clock, policies.keep, self._writer_lease, self._pins)
            self._collecting = Background(collector, job.settings.collect_grace_seconds)
        self._parts = RunParts(
            job=job,
            store=store,
            writer=PackWriter(store, job.settings),
            writer_lease=self._writer_lease,
            last_committed=LastCommitted(),
            pins=self._pins,
            metrics=WantedMetrics(store, policies.keep),
            suspect_steps=SuspectSteps(store),
            collecting=self._collecting,
        )
        self.load_report: LoadReport | None = None
        """What the last load did."""

    def maybe_save(
        self, step: int, state: Mapping[str, object], selection: Selection, metrics: Mapping[str, object] | None = None
    ) -> SaveHandle | None:
        """Begin a save of a step if it is due.

        Raises:
            InvalidError: The run has no policy that says when to save, or went back to an older step.
            Preempted: Some rank was told to end, and all leave at this step.
        """
        self._require_open()
        require_step(step)
        if self._schedule is None:
            raise InvalidError(
                f"{self._store.url}: maybe_save does not know when to save; expected a manager made with every=100 or "
                "save=…, as in CheckpointManager(root, every=100). save(step, state) saves at once"
            )
        if self._preemption is not None and self._preemption.should_stop(step):
            self._preemption.save_and_exit(
                step,
                self._location_of(step),
                lambda: self._owed_bytes(state, selection),
                lambda: self.save(step, state, selection, metrics, is_last=True),
                # A restart would resume from a newer step than this one.
                is_there=step == self._loaded and not self._newer,
            )
        self._require_not_gone_back()
        return self.save(step, state, selection, metrics) if self._schedule.is_due(step) else None

    def request_save(self) -> None:
        """Ask for a save soon; from any thread, or from a signal handler.

        Raises:
            InvalidError: The policy of the run takes no requests.
        """
        if self._schedule is None or not self._schedule.takes_requests:
            raise InvalidError(
                f"{self._store.url}: the policy takes no requests, so nothing would come of it; expected every=…, or "
                "save=AnyOf(…, OnRequest())"
            )
        self._schedule.request()

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        selection: Selection,
        metrics: Mapping[str, object] | None = None,
        tags: Iterable[str] | str = (),
        *,
        is_last: bool = False,
    ) -> SaveHandle:
        """Begin a save of a step; where it is the last of a job that is told to end, metrics may be missing.

        Raises:
            InvalidError: The run went back to an older step; every rank raises it, for all know it from the load.
        """
        self._require_open()
        require_step(step)
        self._require_not_gone_back()
        self._loaded = None
        if self._schedule is not None:
            self._schedule.note_saved(step)
        passed = StepState(state, selection, metrics, tags, is_last)
        request = StepRequest(self._parts, self._location_of(step), passed, self._lineage)
        try:
            handle = begin_save(self._job, request, self._dispatcher)
        except BaseException:
            self._pins.unpin(step, is_committed=False)
            raise
        handle.committed.add_done_callback(partial(_let_go, self._pins, step, handle))
        self._lineage = request.lineage
        self._pending = [each for each in self._pending if not each.committed.done() or each.failure is not None]
        self._pending.append(handle)
        if self._preemption is not None:
            self._preemption.note(step, handle)
        return handle

    def load(self, request: LoadRequest, step: int | None) -> int | None:
        """Fill a state from a step, or from the newest that is whole; return the step."""
        self._require_open()
        job = self._job
        # If it fails, it may have met damage in what a save would refer to.
        self._parts.last_committed.base = None
        choice: StepSelector = NewestValid(self._home, job.clock, job.is_news)
        if step is not None:
            require_step(step)
            choice = ExactStep(partial(self._choose, step), partial(self._newer_than, step))
        with load_attempt(job, self._home, choice, request, self._dispatcher) as attempt:
            done = load(attempt)
        if done is None:
            return None
        location, manifest, self.load_report = done.location, done.manifest, done.report
        if location.step is not None:
            self._loaded, self._newer = location.step, done.newer
            self._pins.has_gone_back = bool(self._newer)
            if self._newer and self._preemption is not None:
                self._preemption.forget_last()
            self._parts.last_committed.base = previous_of(manifest, done.index, done.filled)
            self._pins.current_step = location.step
            self._lineage = Lineage(Parent(manifest.run_id, location.step, manifest.digest), None)
            if self._schedule is not None:
                self._schedule.note_loaded(location.step)
        return location.step

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return committed_steps(self._store)

    def tag(self, step: int, name: str) -> None:
        """Give a committed step a name; errors as `tagging.tag_step`."""
        require_step(step)
        tag_step(self._store, self._job.clock, step, name)

    def untag(self, name: str) -> None:
        """Take a name away from its step; errors as `tagging.untag`."""
        untag(self._store, name)

    def kept(self) -> dict[int, tuple[str, ...]]:
        """Return the steps that stay as things are now, ascending, each with why; errors as `CheckpointGC.survey`."""
        if read_run_id(self._store) is None:
            return {}
        reasons = CheckpointGC(self._store, self._job.clock, self._keep, None, self._pins).survey().reasons
        return {step: reasons[step] for step in sorted(reasons)}

    def wait(self) -> None:
        """Wait for every save under way.

        Raises:
            CheckpointError: A save failed and nobody was told yet; several are its cause, as a group.
        """
        failures: list[Exception] = []
        for handle in self._pending:
            try:
                seen = handle.was_awaited
                handle.wait()
            except CheckpointError as error:
                if not seen:
                    failures.append(error)
        self._pending.clear()
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise failures[0] from ExceptionGroup(f"{len(failures)} saves failed", failures)

    def close(self, *, hand_on: bool = True) -> None:
        """Wait for every save under way, then end.

        Args:
            hand_on: Whether a signal to end that no step answered does now what it would have done without us.
        Raises:
            CheckpointError: As `wait`.
        """
        if self._closed:
            return
        self._closed = True
        # From the last to the first, each whatever became of the others.
        with ExitStack() as ending:
            if self._preemption is not None:
                # A signal that no step answered may end the process here.
                ending.callback(self._preemption.close, hand_on=hand_on)
            ending.callback(self._dispatcher.close)
            ending.callback(self._writer_lease.release)
            if self._collecting is not None:
                ending.callback(self._collecting.close)
            ending.callback(self._job.close)
            self.wait()

    def _owed_bytes(self, state: Mapping[str, object], selection: Selection) -> int:
        """Return what this rank has to write of a state at least, as far as that is known before it is looked at."""
        if self._parts.last_committed.base is not None and self._job.settings.deduplicate:
            return 0  # Any of it may be as it was.
        return owed_bytes(self._job.framework.collect(state, selection).shards, self._job.comm.world_size)

    def _location_of(self, step: int) -> CheckpointLocation:
        return replace(self._home, folder=step_folder(step), step=step)

    def _choose(self, step: int) -> CheckpointLocation:
        require_no_checkpoint(self._store)
        location = self._location_of(step)
        try:
            is_fenced = not is_valid(self._store, current_fence(self._store), step)
        except MissingError as missing:
            raise MissingError(
                f"{self._store.url}: no committed step {step}; committed are {self.steps()[-20:]}"
            ) from missing
        if is_fenced:
            raise fenced_error(f"{location.url}/{MANIFEST_FILE}")
        return location

    def _newer_than(self, step: int) -> tuple[int, ...]:
        """Return the steps that a resume would prefer to this one, and those that a save may still commit."""
        fence, damaged = current_fence(self._store), list_records(self._store)

        def is_candidate(newer: int) -> bool:
            identities = [identity for step, identity in damaged if step == newer]
            try:
                return is_valid(self._store, fence, newer) and not (
                    identities and identity_at(self._store, newer) in identities
                )
            except (MissingError, InvalidError):
                return False  # A resume passes it over as well.
            except CheckpointError:
                # An unreadable newer step must not fail the load of this one. Saves are then refused.
                return True

        found = {each for each in step_folders(self._store) if each > step and is_candidate(each)}
        return tuple(sorted(found | {each for each in self._pins.under_way() if each > step}))

    def _require_not_gone_back(self) -> None:
        """Refuse to save after going back: a resume would load a newer step, and retention delete the saved one."""
        if not self._newer:
            return
        assert self._loaded is not None, "nothing is saved in between"
        count, url = len(self._newer), self._location_of(self._loaded).url
        there = "a newer step exists" if count == 1 else f"{count} newer steps exist"
        named = ", ".join(map(str, self._newer[:3])) + (", …" if count > 3 else "")
        raise InvalidError(
            f"{self._store.url}: step {self._loaded} was loaded, and {there} ({named}); going back within a root is "
            f"not yet supported. Nothing was saved. To continue from step {self._loaded}, make a "
            f'CheckpointManager(new_root), call holdfast.load("{url}", state), and save with that manager. To continue '
            "from the newest step, call manager.load(state)"
        )

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidError(f"{self._store.url}: the manager is closed; make a new one")


def _let_go(pins: Pins, step: int, handle: SaveHandle, committed: Future[SaveReport]) -> None:
    """Pin a step no longer that is certain not to be there; knows no run, for whoever keeps the handle keeps this."""
    if handle.may_come:
        pins.note_unknown(step)
    elif committed.exception() is not None:
        pins.unpin(step, is_committed=False)


def require_step(step: object) -> None:
    """Refuse what is no step.

    Raises:
        InvalidError: It is no whole number, or out of range.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEP_MAX:
        kind = type(step).__name__
        raise InvalidError(f"step={str(step)[:80]!r} ({kind}); expected a whole number from 0 to {STEP_MAX}")
