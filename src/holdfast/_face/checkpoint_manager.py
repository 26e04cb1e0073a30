"""The manager of a run. It starts saves and loads, and forwards to the features of `training/runs/`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from holdfast._face import wiring
from holdfast._face.arguments import (
    Globs,
    TagNames,
    differential_of,
    policies_of,
    preemption_of,
    require_state,
    selection_of,
)
from holdfast._face.near_place import near_at
from holdfast._face.passed_state import passed_state
from holdfast._face.stored_steps import StoredSteps
from holdfast.backends.stores.foreign import References
from holdfast.base.interrupts import require_uninterrupted
from holdfast.base.layouts.layout import Layouts, layouts_of
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.packs import Packs
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import LoadReport
from holdfast.core.format.names import is_step, plain_step
from holdfast.core.format.step_name import StepName, step_name
from holdfast.errors import InvalidError
from holdfast.policies import KeepPolicy, Policies, SavePolicy, Tier
from holdfast.settings import Differential, Preemption, Settings
from holdfast.stored.checkpoint.location import CheckpointLocation, none_allowed, require_no_checkpoint
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_schedule import taking_requests
from holdfast.training.loading.load import Loaded, load, load_attempt
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.named_step import StepQuery, finder_of
from holdfast.training.loading.rename_rules import Renames
from holdfast.training.redo_log.log_load import load_with_log
from holdfast.training.redo_log.redo_log import redo_log_of
from holdfast.training.runs.discarding import Discarding
from holdfast.training.runs.preemption import PreemptionHandler, least_write_bytes, preemption_handler_of
from holdfast.training.runs.run_parts import RunParts, RunState
from holdfast.training.runs.saves_in_flight import SavesInFlight, note_failed
from holdfast.training.runs.step_request import StepRequest, StepState
from holdfast.training.runs.tiers.due import DueSteps
from holdfast.training.runs.tiers.near import NearPlace, NearTier
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.saving.misuse import refuse_call
from holdfast.training.saving.save import begin_save
from holdfast.training.telemetry.dispatcher import EventDispatcher


class CheckpointManager(StoredSteps):
    """Saves and loads the steps of one run under a root. A context manager; every rank of the group makes one.

    Construction is a collective: ranks agree on a nonce and count those that share memory. Saving runs no collective.

    Example:
        with holdfast.CheckpointManager("run-8", every=100, keep_last=3) as manager:
            start = manager.load(state) or 0
            for step in range(start + 1, 301):
                optimizer.step()
                manager.maybe_save(step, state)
    """

    def __init__(
        self,
        root: wiring.Path,
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        every: int | None = None,
        keep_last: int | None = None,
        start_over: bool = False,
        differential: Differential | bool = False,
        near: Tier | None = None,
        preemption: Preemption | bool = True,
        process_group: wiring.ProcessGroup = None,
        settings: Settings = wiring.DEFAULT_SETTINGS,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Open a root.

        Args:
            root: Folder of the `step-*` folders, or a `holdfast.Store`; the first save creates the folder.
            save: When `maybe_save` saves; the same on every rank. See `holdfast.policies`.
            keep: Which steps are kept; None for all. The newest valid one always is.
            every: Short for `save=AnyOf(EveryNSteps(every), OnRequest())`.
            keep_last: Short for `keep=AnyOf(LatestN(keep_last), Tagged())`.
            start_over: Whether the first save starts over although the root holds steps and the manager loaded no step.
                The steps stay stored, superseded. Otherwise such a save raises.
            differential: Whether each step leaves the gradients of its optimizers beside the checkpoints, so that a
                killed run goes on at its last step. See `holdfast.Differential` and docs/differential.md.
            near: A fast folder in which steps are saved first; those that are due by `save` are drained to the root
                behind training. See `holdfast.Tier` and docs/tiers.md.
            preemption: Signals after which `maybe_save` saves and ends the process, from its first call until `close`.
                True for SIGTERM and SIGINT, with a grace of 30 s; False for none. See `holdfast.Preemption`.
            process_group: None for the default group, False for this process alone, or a group.
            settings: How to save and load.
            observers: Receive events of saves and loads: from `holdfast.observers`, or your own. A slow or broken
                observer cannot delay or fail a save.
        Raises:
            InvalidError: The root is a checkpoint or no path; `save` or `keep` is invalid or given twice;
                `preemption` is given on a thread that receives no signals; or `WORLD_SIZE` is over 1 and there is no
                process group.
        """
        policies = policies_of(save, every, keep, keep_last)
        wanted, options = preemption_of(preemption), differential_of(differential)
        store = wiring.store_at(root, settings)
        job = wiring.saving_job(process_group, settings, store.url)
        handler = preemption_handler_of(job, wanted)
        place = None if near is None else near_at(near, store, settings, job, options)
        self._open(store, job, References(settings.allowed_roots), policies, observers, handler, options, place)
        self._position.starts_over = start_over
        self._follows_default_group = process_group is None

    @classmethod
    def over(
        cls,
        store: Store,
        job: Job,
        references: Packs = none_allowed,
        policies: Policies = Policies(),  # noqa: B008 - frozen
        observers: Sequence[Observer] = (),
        preemption_handler: PreemptionHandler | None = None,
        near: NearPlace | None = None,
    ) -> Self:
        """Return a manager over a store and a job that the caller made; the manager closes the job.

        `references` opens files elsewhere that imported steps refer to.

        Example:
            with holdfast.CheckpointManager.over(store, job) as manager:
                manager.save(1, state)
        """
        manager = cls.__new__(cls)
        manager._open(store, job, references, policies, observers, preemption_handler, near=near)
        return manager

    def _open(
        self,
        store: Store,
        job: Job,
        references: Packs,
        policies: Policies,
        observers: Sequence[Observer],
        preemption_handler: PreemptionHandler | None,
        differential: Differential | None = None,
        near: NearPlace | None = None,
    ) -> None:
        require_no_checkpoint(store)
        self._store, self._job, self._keep = store, job, policies.keep
        self._dispatcher = EventDispatcher(observers, job.clock)
        has_peers = near is not None and near.peers is not None
        self._due = DueSteps(job, store.url, policies.save, None if near is None else near.save, heals=has_peers)
        self._preemption = preemption_handler
        run = store if near is None else TwoRoots(near.store, store)
        state = RunState(job, CheckpointLocation(run, "", None, references=references, root=run), policies.keep)
        self._parts = RunParts(job, store, policies.keep, state)
        self._near = None if near is None else NearTier(job, near, self._parts, policies.keep, state, self._dispatcher)
        self._redo_log = redo_log_of(self._parts, self._due.root, differential, self._dispatcher)
        self._run, self._position = run, self._parts.position
        self._saves = SavesInFlight(job.progress)
        self._closed = self._follows_default_group = False
        self.load_report: LoadReport | None = None
        """Report of the last load."""

    def maybe_save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        metrics: Mapping[str, object] | None = None,
        tags: TagNames = (),
        move_tags: TagNames = (),
        only: Globs = None,
        skip: Globs = None,
        grads: bool = False,
    ) -> SaveHandle | None:
        """Save a step of the training loop if a save is due; return its handle, or None.

        Every rank calls this method after every step. All ranks make the same decision without waiting for each other.
        Other arguments and errors as `save`. Without a save, no tag is set or moved. A step that was just saved or
        loaded is not saved again.

        Example:
            manager.maybe_save(400, state, metrics={"loss": 0.25})
        Raises:
            InvalidError: The manager was made without `save`, `every` and `near`.
            Preempted: A rank received a signal. All ranks stop at this step; `code` shows whether the step is saved. A
                `SystemExit`, not an `Exception`.
        """
        self._require_not_closed()
        self._due.require_policy()
        step = plain_step(step)
        passed = passed_state(step, state, "maybe_save(step, state)", (only, skip, grads), metrics, (tags, move_tags))
        if passed.misuse is not None and (self._job.comm.world_size == 1 or not is_step(step)):
            # Without a step this rank cannot decide whether the others save. They raise at their next save.
            return refuse_call(self._job, passed.misuse)
        if self._redo_log is not None:
            self._redo_log.boundary(step, passed.state)
        if self._preemption is not None and self._preemption.should_stop(step):
            self._preemption.save_and_exit(
                step,
                self._saving_parts.location_of(step),
                lambda: least_write_bytes(self._parts, passed),
                lambda: self._begin_save(step, replace(passed, is_last=True)),
                is_committed=self._position.is_loaded(step),
                seal=None if self._redo_log is None else partial(self._redo_log.seal, step),
            )
        place = self._due.place_of(step)
        is_base_due = self._redo_log is not None and self._redo_log.is_base_due and step != self._position.loaded
        near_only = place == "near" and not (tags or move_tags)
        return self._begin_save(step, replace(passed, near_only=near_only)) if place or is_base_due else None

    @property
    def recoverable(self) -> int | None:
        """The last step to which a restart would come back, as far as this rank knows; None without a redo log or base.

        Example:
            print(f"a kill now costs the steps after {manager.recoverable}")
        """
        return None if self._redo_log is None else self._redo_log.recoverable

    def request_save(self) -> None:
        """Request a save soon, from any rank, thread or signal handler.

        The rank forwards the request at its next `maybe_save`. All ranks save at one step, about a second later.

        Example:
            signal.signal(signal.SIGUSR1, lambda *_: manager.request_save())
        Raises:
            InvalidError: The policy has no `OnRequest()`.
        """
        taking_requests(self._due.root, f"{self._store.url}: request_save").request()

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        metrics: Mapping[str, object] | None = None,
        tags: TagNames = (),
        move_tags: TagNames = (),
        only: Globs = None,
        skip: Globs = None,
        grads: bool = False,
        near_only: bool = False,
    ) -> SaveHandle:
        """Begin to save a step; return once the state is staged, or at once if it is copied lazily. As `async_save`.

        Example:
            handle = manager.save(400, state, metrics={"loss": 0.25}, move_tags={"best"})
            handle.wait("staged")  # Training may change the state from here on.
        Args:
            step: The training iteration.
            state: As `async_save`, and so `only`, `skip` and `grads`.
            metrics: Metrics of the step, numbers by name; only the metrics of rank 0 are stored.
            tags: Tags that the step gets once it is committed; only the tags of rank 0 are set. A tag of another step
                does not move. The log and `SaveReport.untagged` then have a warning; the step is saved.
            move_tags: Tags that the step gets too; a tag of another step moves to this step.
            near_only: Whether the step stays in the near tier, for a loop without `maybe_save`. Otherwise, and if the
                step has tags, the step is due at the root.
        """
        self._require_not_closed()
        step = plain_step(step)
        passed = passed_state(step, state, "save(step, state)", (only, skip, grads), metrics, (tags, move_tags))
        if near_only and self._near is None:
            raise InvalidError(f"{self._store.url}: near_only without a near tier; expected near=holdfast.Tier(…)")
        if self._redo_log is not None:
            self._redo_log.boundary(step, passed.state)
        return self._begin_save(step, replace(passed, near_only=near_only and not (tags or move_tags)))

    def load(
        self,
        state: Mapping[str, object],
        step: int | str | None = None,
        *,
        best: str | tuple[str, str] | None = None,
        strict: bool = True,
        cast: bool = False,
        only: Globs = None,
        skip: Globs = None,
        grads: bool = False,
        layout: Layouts = None,
        rename: Mapping[str, str] | None = None,
        partial: Iterable[str] | None = None,
        hyperparameters: bool = True,
        discard_newer: bool = False,
    ) -> int | None:
        """Fill a state from a step, or from the newest valid step; return the step, or None if the root has none yet.

        Arguments and errors as the function `load`; `step="latest"` is the same as None. `best` ranks as `BestN` ranks.
        All ranks skip damaged newer steps together, quarantine them, and report them in `load_report.passed_over`.

        Going back: if steps newer than the loaded step exist, the next save begins a new timeline there. The newer
        steps stay stored, but are superseded: a load without a step takes the newest step of the newest timeline. A
        superseded step is loaded by number and digest, as `holdfast ls` lists the step: `step="300@1f2e"`.

        With `discard_newer` the newer steps are superseded at once, also for a restart before the next save. Rank 0
        removes them in the background. Tagged steps stay. `load_report.discarded` and `left` name both kinds.
        `discard_newer` needs a step. Another writer is a `ConflictError`; the state is then unchanged.

        Example:
            step = manager.load({"model": model}, best=("accuracy", "max"))
        Raises:
            MissingError, CorruptError: The given step does not exist, or is damaged.
        """
        require_state(state, "load(state, step)")
        self._require_not_closed()
        find = finder_of(step, best)
        selection = selection_of(only, skip, grads, partial, hyperparameters=hyperparameters, cast=cast)
        request = LoadRequest(state, selection, strict, Renames.of(rename), layouts_of(layout))
        if not discard_newer:
            return self._load_with_log(request, find, step_name(step))
        discarding = Discarding(self._parts, find)
        choice = self._position.choice(discarding.find, discards=True)
        self._saves.await_ends()  # Saves in flight are newer steps, too.
        with load_attempt(self._job, choice, request, self._dispatcher) as attempt:
            with discarding:
                loaded = load(attempt)
            if loaded is None:
                return None
            # Before the reader lease ends: garbage collection must not remove the step in between.
            self._note_loaded(request, loaded)
            self.load_report = discarding.execute(loaded)
            return loaded.location.step

    def wait(self) -> None:
        """Wait for every save in flight.

        Example:
            manager.wait()
        Raises:
            CheckpointError: A save failed, and no call has raised its error yet. If several failed, the first error is
                raised; its cause is an `ExceptionGroup` of all errors, or of the first and the last 100.
        """
        self._saves.wait(closing=self._closed)

    def close(self, *, wait: bool = True) -> None:
        """Wait for every save in flight, delete the steps that `keep` does not keep, and release the resources.

        Raises as `wait`. Steps that a load discarded are deleted too. If steps are due for deletion, rank 0 waits for
        the rest of their grace, up to a minute, and logs the wait. After a signal, and while an exception is handled,
        rank 0 does not wait: the next job deletes the steps.

        Example:
            manager.close(wait=False)
        Args:
            wait: Whether to wait for the grace; saves in flight are awaited in any case.
        """
        self._close(hand_on=True, may_wait=wait and sys.exception() is None)

    def __enter__(self) -> Self:
        """Return the manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. An error while closing never hides an error of the block."""
        try:
            self._close(hand_on=error is None, may_wait=error is None)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"closing the checkpoint manager also failed: {failure}")

    def _note_loaded(self, request: LoadRequest, loaded: Loaded) -> None:
        """Continue training from a loaded step."""
        position = self._position
        self.load_report = loaded.report
        position.move_to(loaded, request)
        if self._redo_log is not None:
            self._redo_log.forget()
        if position.has_gone_back and self._preemption is not None:
            self._preemption.forget_last()
        if loaded.location.step is not None:
            self._due.note_loaded(loaded.location.step)
            if self._near is not None:
                self._near.note_loaded(loaded.location.step, loaded.manifest.digest)

    def _load_with_log(self, request: LoadRequest, find: StepQuery | None, named: StepName) -> int | None:
        """Load the newest valid step or a given one, follow the redo log, and continue training from there."""
        if self._redo_log is not None:
            self._redo_log.seal(-1, self._job.stall_seconds)  # The steps of this process count as those of a dead one.
        note, step = partial(self._note_loaded, request), None if named.digest else named.step
        redone = load_with_log(self._job, self._position, request, self._dispatcher, note, find, step)
        if redone is None:
            return None
        self.load_report = redone
        if redone.step is not None:
            self._due.note_loaded(redone.step)
        return redone.step

    def _begin_save(self, step: int, passed: StepState) -> SaveHandle:
        if passed.misuse is not None:
            return refuse_call(self._job, passed.misuse)
        self._position.leave(step)
        self._due.note_saved(step, near_only=passed.near_only)
        parts = self._saving_parts
        request = StepRequest(parts, parts.location_of(step), passed)
        requests = [(parts, request)]
        if self._near is not None and not passed.near_only:
            requests.append((self._parts, request.or_in_root(self._parts)))
        target, collect = request.target, request.collect
        if self._redo_log is not None:
            target, collect = self._redo_log.as_base(step, target, passed.state, passed.selection, collect)
        try:
            handle = begin_save(self._job, target, collect, self._dispatcher)
        except BaseException:
            for parts, each in requests:
                parts.pins.unpin(each.pin, is_committed=False)
            raise
        for parts, each in requests:
            ended = partial(note_failed, parts.run_facts, parts.pins, parts.collecting, each.pin, handle)
            handle.near.add_done_callback(ended)
        if self._redo_log is not None:
            self._redo_log.note_begun(step, handle.committed)
        self._position.lineage = request.lineage
        self._saves.add(handle)
        if self._near is not None:
            self._near.watch(handle, request, is_due=not passed.near_only)
        if self._preemption is not None:
            self._preemption.note_save(step, handle)
        return handle

    def _close(self, *, hand_on: bool, may_wait: bool) -> None:
        """Close. With `hand_on`, the restored handler receives a signal that no step handled."""
        if self._closed:
            return
        require_uninterrupted(f"{self._store.url}: close")
        self._closed = True
        # The stack runs the callbacks from last to first, and each runs even if another raises.
        with ExitStack() as ending:
            if self._preemption is not None:
                # Pushed first, so that it runs last: a signal that no step handled may end the process here.
                ending.callback(self._preemption.close, hand_on=hand_on)
            ending.callback(self._dispatcher.close)
            ending.push(partial(self._end_run, may_wait))
            if self._redo_log is not None:
                ending.callback(self._redo_log.close)
            ending.callback(self._job.close)
            self.wait()

    def _end_run(
        self, may_wait: bool, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """End garbage collection and release the writer lease; an `ExitStack` passes the error of the close so far."""
        # A failed save is not a reason to leave steps undeleted; Ctrl-C while saves end is a reason.
        may_wait = may_wait and (error is None or isinstance(error, Exception))
        preemption = self._preemption
        close_parts = self._parts.close if self._near is None else self._near.close
        close_parts(lambda: may_wait and not (preemption is not None and preemption.has_received_signal))

    @property
    def _saving_parts(self) -> RunParts:
        """The place into which steps are saved."""
        return self._parts if self._near is None else self._near.parts

    def _require_not_closed(self) -> None:
        if self._closed:
            raise InvalidError(f"{self._store.url}: the manager is closed; make a new CheckpointManager")
        if self._follows_default_group:
            wiring.require_group(None, self._job.comm)  # The script may have made a process group since.
