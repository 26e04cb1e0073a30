"""The drain: copies the due steps of the near tier to the root, behind training, on a thread of each rank.

States of a due step, and who moves it on:

    near      -> waiting   `note_commit`, on each rank; its first call also finds the steps that an earlier job left
    waiting   -> copying   rank 0 takes the oldest step, and sets a key of the key-value store
    copying   -> copied    each rank copies its share of the files; rank 0 copies the share of a rank that copies
                           nothing for a while
    copied    -> drained   rank 0 publishes the manifest in the root, under the epoch of the job
    waiting   -> skipped   rank 0: the root's own policy would not keep the step
    copying   -> failed    rank 0: the step is damaged near, or the root has another manifest of the step
    drained, skipped, failed -> told   the other ranks learn of the end by the same key

There is no journal: files without a manifest are copied on by the next job, or by `holdfast drain`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.base.interrupts import GUARD, start_thread
from holdfast.base.types.events import DrainSkipped
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.removal import StepAndDigest
from holdfast.core.format.names import step_of_pack
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    UnavailableError,
    first_three,
    shown_bytes,
)
from holdfast.policies import KeepPolicy
from holdfast.stored.publishing.outcome import OutcomeKind
from holdfast.stored.repository.epochs import current_fence
from holdfast.stored.repository.latest import name_latest
from holdfast.stored.repository.tags import read_tags
from holdfast.stored.repository.timelines import run_timelines
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.coordination.job import Job
from holdfast.training.runs.removal.chosen_steps import name_of
from holdfast.training.runs.removal.pins import Pins, StepPin
from holdfast.training.runs.removal.retention import KeptFacts, waiting
from holdfast.training.runs.run_parts import RunParts
from holdfast.training.runs.step_request import StepRequest
from holdfast.training.runs.tiers.drain_facts import facts_in, facts_of, manifest_in, undrained
from holdfast.training.runs.tiers.drain_keys import COPYING, DRAINED, TOLD_MAX, DrainKeys
from holdfast.training.runs.tiers.drain_try import POLL_SECONDS, DrainTry
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.telemetry.dispatcher import EventDispatcher

logger = logging.getLogger(__name__)

_TELL_SECONDS_MIN, _TELL_SECONDS = 0.05, 0.5
"""Shortest and longest time after which another rank asks rank 0 about the steps that wait; each is twice the last."""

_RETRY_SECONDS = 5.0
"""How long a failed drain waits before the next try."""

_END_SECONDS, _SAID_AFTER_SECONDS = 5.0, 1.0
_FAILURES_MAX = 3
"""Failed tries in a row after which a close waits no longer."""


@dataclass(slots=True)
class _Due:
    """A step that is due at the root."""

    pins: list[tuple[Pins, StepPin]] = field(default_factory=list)
    """What keeps its files in both places."""

    current: DrainTry | None = None
    """The try that goes on, or has copied the share of this rank."""


class Drain:
    """The drain of one near tier, on one rank."""

    def __init__(
        self,
        job: Job,
        run: TwoRoots,
        near: RunParts,
        root: RunParts,
        keep: KeepPolicy | None,
        dispatcher: EventDispatcher,
    ) -> None:
        """Start no thread yet.

        Args:
            job: The ranks.
            run: Both places.
            near, root: The parts of saves into each place.
            keep: The retention policy of the root.
            dispatcher: Passes events to observers.
        """
        self._dispatcher = dispatcher
        self._job, self._run, self._near, self._root, self._keep = job, run, near, root, keep
        self._is_first = job.comm.rank == 0
        self._due: dict[StepAndDigest, _Due] = {}
        self._newest: StepAndDigest | None = None
        self.has_adopted = False
        """Whether the due steps that earlier jobs left are pinned near."""
        self._earlier, self._failures = set[StepAndDigest](), 0
        """What earlier jobs left; and tries that failed since a close began."""
        self._handles: list[tuple[StepAndDigest, SaveHandle]] = []
        """Handles that wait for the root, each with its step."""
        self._ends: dict[StepAndDigest, CheckpointError | None] = {}
        """How the last drains ended: a handle is watched from the end of its save on."""
        self._at_root: dict[StepAndDigest, KeptFacts] | None = None
        self._keys = DrainKeys(job)
        self._given_up: set[StepAndDigest] = set()
        """Steps whose drain failed for good, in this job."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()  # Set under GUARD: a signal handler may save while the training thread sets it.
        self._is_stopped = False
        self._current: DrainTry | None = None

    # ------------------------------------------------------------------------------------- from other threads

    def note_commit(self, step: int, digest: str, is_due: bool) -> None:
        """Take note of a step that is near. On the commit thread of each rank."""
        self.adopt_earlier()
        self._earlier.discard((step, digest))
        self._newest = step, digest
        if is_due:
            self._add((step, digest))

    def watch(self, handle: SaveHandle, request: StepRequest) -> None:
        """End a handle once the root has the step of its request, or does not get the step."""
        handle.near.add_done_callback(lambda _: None if request.saved is None else self._watch(request.saved, handle))

    def _watch(self, name: StepAndDigest, handle: SaveHandle) -> None:
        with GUARD:
            if name not in self._ends and not self._is_stopped:
                self._handles.append((name, handle))
                return
        _end_handle(handle, self._ends.get(name, undrained(name[0], "the drain has ended")))

    @property
    def has_earlier(self) -> bool:
        """Whether a step that an earlier job left near waits for the drain."""
        return not self.has_adopted or any(name in self._due for name in list(self._earlier))

    def look_at_tags(self) -> None:
        """Drain the steps that have a tag, soon. Only rank 0 looks."""
        if self._is_first:
            self._wake_up()

    def close(self, may_wait: Callable[[], bool]) -> bool:
        """Drain the newest near step and those that wait, and end the thread.

        Returns:
            On rank 0, whether this job knows that the root has each due step, and the newest of the near tier.

        Args:
            may_wait: Whether to wait; asked again and again.
        """
        if self._newest is not None and may_wait():
            self._add(self._newest)
        clock, is_said, self._failures = self._job.clock, False, 0
        start = clock.monotonic_seconds()
        while self._due and self._thread is not None and self._thread.is_alive() and may_wait():
            if self._failures >= _FAILURES_MAX:
                break
            self._thread.join(POLL_SECONDS)
            if self._is_first and not is_said and clock.monotonic_seconds() - start > _SAID_AFTER_SECONDS:
                is_said = True
                logger.warning(
                    "%s: close waits until steps [%s] are in the root. Ctrl-C or close(wait=False) leaves them to the "
                    "next job, or to holdfast drain",
                    self._run.url,
                    first_three(step for step, _ in list(self._due)),
                )
        left = list(self._due)
        self._is_stopped = True
        self._wake_up()
        if self._current is not None:
            self._current.cancel()
        if self._thread is not None:
            self._thread.join(_END_SECONDS if self._job.process_deadline is None else POLL_SECONDS)
        for name in left:
            self._end(name, undrained(name[0], "the manager was closed"))
        for name, handle in self._handles:
            _end_handle(handle, undrained(name[0], "the manager was closed"))
        if left and self._is_first:
            logger.warning("%s", undrained(left[-1][0], "the manager was closed"))
        if self._newest is not None and may_wait():
            self._keys.end_last()
        # Without a near step of this job, each save since the adoption has gone straight to the root.
        has_newest = self.has_adopted and (self._newest is None or self._newest in (self._at_root or {}))
        return has_newest and not left and not self._given_up

    def _add(self, name: StepAndDigest) -> None:
        if name in self._due:
            return
        due = _Due()
        # Waits for a removal under way. From here on no collection takes the step near, or what a drain has copied.
        for pins in (self._near.pins, self._root.pins):
            self._pin(due, pins, name[0])
        self._ends.pop(name, None)
        self._due[name] = due
        self._wake_up()

    def _pin(self, due: _Due, pins: Pins, step: int) -> None:
        pin = StepPin(step, is_drain=True)
        pins.pin(pin, None)
        due.pins.append((pins, pin))

    def adopt_earlier(self) -> None:
        """Pin the due steps that an earlier job left near, once. Whether the root has them, the thread looks."""
        if self.has_adopted:
            return
        for stored in run_timelines(self._run.near).chain:
            manifest = None if stored.digest is None else manifest_in(self._run.near, (stored.step, stored.digest))
            if manifest is not None and not manifest.near_only:
                self._earlier.add((stored.step, manifest.digest))
                self._add((stored.step, manifest.digest))
        self.has_adopted = True

    def _wake_up(self) -> None:
        with GUARD:
            self._wake.set()
            if self._thread is None and not self._is_stopped:
                self._thread = threading.Thread(target=self._work, name="holdfast-drain", daemon=True)
                start_thread(self._thread)

    # ----------------------------------------------------------------------------------------- on the thread

    def _work(self) -> None:
        seconds: float | None = None
        while not self._is_stopped:
            waited = 0.0 if self._wake.wait(seconds) else seconds or 0.0
            self._wake.clear()
            seconds = None
            try:
                if self._is_first:
                    self._drain_all()
                else:
                    self._copy_shares()
                    seconds = min(max(2 * waited, _TELL_SECONDS_MIN), _TELL_SECONDS) if self._due else None
            except ConflictError as over:
                logger.warning("%s: the drain ends: %s", self._run.url, over)
                self._is_stopped = True
                for name in list(self._due):
                    self._end(name, over)
                return
            except Exception as error:  # noqa: BLE001 - the next try may go well
                self._failures += 1
                if self._current is not None:
                    self._current.end(error)
                if not self._is_stopped:
                    self._job.warn_once(self._run.url, f"the drain failed, and is tried again: {error}")
                seconds = _RETRY_SECONDS

    def _drain_all(self) -> None:
        """Drain what waits, in the order of steps. On rank 0."""
        while not self._is_stopped and (manifest := self._next()) is not None:
            name = name_of(manifest)
            self._keys.tell(name, COPYING)
            try:
                self._drain(manifest, name)
            except (ConflictError, CorruptError, InvalidError, MissingError) as error:
                if self._near.writer_lease.epoch:
                    self._near.writer_lease.require(self._run.root)
                # Of this step alone: the next ones must not wait for it.
                logger.warning("step %s is not drained: %s", manifest.step, error)
                self._given_up.add(name)
                self._end(name, error)
            self._root.collect_soon()
            self._near.collect_soon()

    def _drain(self, manifest: Manifest, name: StepAndDigest) -> None:
        start = self._job.clock.monotonic_seconds()
        current = self._try(manifest, name)
        for step in {step_of_pack(pack.name) for pack in manifest.packs}:
            if step is not None:
                self._pin(self._due[name], self._root.pins, step)
        current.copy_share()
        current.copy_rest(lambda: self._is_stopped)
        # A save that found its step as it was loaded has not taken the lease.
        epoch = 0 if self._is_stopped else self._near.writer_lease.hold(manifest.run_id)
        if not epoch or self._is_stopped:
            raise undrained(manifest.step, "the manager was closed")
        outcome = current.publish(epoch)
        if outcome.error is not None:
            raise outcome.error
        if outcome.kind is not OutcomeKind.COMMITTED:
            raise UnavailableError(f"step {manifest.step}: whether the root has the step is unknown: {outcome.reason}")
        assert self._at_root is not None, "it was read to find the step"
        self._at_root[name] = facts_of(manifest, ())
        with GUARD:  # A load on the training thread sets both.
            if manifest.timeline == self._near.position.timeline:
                # The root has the timeline of the job now: if the near tier is lost, the job goes on from here, and no
                # more from the step that was loaded.
                self._root.pins.current = name
        name_latest(self._root.store, manifest.step, self._job.is_first_occurrence)
        self._end(name, None)
        logger.info(
            "step %s is in the root: rank 0 drained %s in %.1f s",
            manifest.step,
            shown_bytes(current.bytes),
            self._job.clock.monotonic_seconds() - start,
        )

    def _next(self) -> Manifest | None:
        """Return the first step that waits, and end those that the root has or would not keep."""
        if self._at_root is None:
            self._at_root = dict(facts_in(self._run))
        manifests: dict[StepAndDigest, Manifest] = {}
        tags = read_tags(self._run)
        fence = current_fence(self._run)
        tagged = {(tag.step, tag.digest) for tag in tags.whole.values()}
        for name in tagged - self._at_root.keys() - self._given_up:
            manifest = manifest_in(self._run.near, name)
            if manifest is not None and fence.admits(name[0], manifest.epoch, manifest.digest):
                self._add(name)  # Tagged since it was saved for the near tier alone.
        for name in sorted(self._due):
            manifest = manifest_in(self._run.near, name)
            if name in self._at_root:
                self._end(name, None)
            elif manifest is None:
                self._end(name, undrained(name[0], "the near tier has lost the step"))
            else:
                manifests[name] = manifest
        due = [facts_of(manifest, tags.of(*name)) for name, manifest in manifests.items()]
        try:
            waits = waiting(self._keep, due, self._at_root.values(), self._near.position.timeline)
        except InvalidError as error:  # As of a metric that no step has yet.
            self._job.warn_once(self._run.url, f"every due step is drained: {error}")
            waits = sorted(due, key=lambda facts: facts.age)
        for facts in (each for each in due if each not in waits):
            why = "newer steps have come, and the root would not keep the step: the root is too slow for its steps"
            level = logging.INFO if facts.name in self._earlier else logging.WARNING
            logger.log(level, "step %d is not drained: %s", facts.step, why)
            self._dispatcher.dispatch(
                DrainSkipped(facts.step, self._run.root.url, 0, why, self._job.clock.unix_seconds())
            )
            self._end(facts.name, undrained(facts.step, why))
        return manifests[waits[0].name] if waits else None

    def _copy_shares(self) -> None:
        """Copy the share of this rank of the step that rank 0 drains, and end the steps that rank 0 has ended."""
        for name, due in list(self._due.items()):
            told = self._told_of(name)
            if told == COPYING:
                is_new = due.current is None or due.current.has_failed
                manifest = manifest_in(self._run.near, name) if is_new else None
                if manifest is not None and not self._is_stopped:
                    self._try(manifest, name).copy_share()
                    self._wake.set()  # Rank 0 ends the step soon.
            elif told is not None:
                self._end(name, None if told == DRAINED else undrained(name[0], told))

    def _try(self, manifest: Manifest, name: StepAndDigest) -> DrainTry:
        self._current = self._due[name].current = DrainTry(self._job, self._run, manifest, self._dispatcher)
        return self._current

    # -------------------------------------------------------------------------------------- the end of a step

    def _end(self, name: StepAndDigest, error: CheckpointError | None) -> None:
        """Record the end of a step, and tell the handles of all ranks."""
        due = self._due.pop(name, None)
        for pins, pin in () if due is None else due.pins:
            # A step that could not be drained stays near as long as the job; and so does what waits when the job ends.
            if pins is not self._near.pins or not (self._is_stopped or name in self._given_up):
                pins.unpin(pin, is_committed=True)
        self._keys.tell(name, DRAINED if error is None else str(error))
        with GUARD:
            self._ends[name] = error
            while len(self._ends) > TOLD_MAX:
                del self._ends[next(iter(self._ends))]
            ended = [handle for each, handle in self._handles if each == name]
            self._handles = [each for each in self._handles if each[0] != name]
        for handle in ended:
            _end_handle(handle, error)
        # The handles first: storage may take the report slowly.
        if due is not None and due.current is not None:
            due.current.end(error)

    def _told_of(self, name: StepAndDigest) -> str | None:
        """Return what rank 0 tells of a step; None if nothing yet."""
        try:
            return self._keys.told_of(name)
        except (CheckpointError, TimeoutError) as error:
            is_there = manifest_in(self._run.root, name) is not None
            return DRAINED if is_there else f"rank 0 does not answer: {error}"


def _end_handle(handle: SaveHandle, error: CheckpointError | None) -> None:
    if error is None:
        handle.reach_committed(handle.near.result())
    else:
        handle.end_undrained(error)
