"""A load that discards the steps it leaves: `load(state, step=S, discard_newer=True)`.

In order, and who does it:

    find         Rank 0, before it finds the step: takes the writer lease. Beside another writer the load is refused,
                 and no value has changed.
    (the load)   Every rank.
    decided      Rank 0: puts a record of a timeline that leaves at the step. With it the newer steps are superseded,
                 and those that it names are discarded. A crash before it changes nothing.
    told         Rank 0 broadcasts the outcome. From here no rank waits for another.
    removed      The collector of rank 0, in the background, with its marks and grace; after a crash that of the next
                 process that writes here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import LoadReport, SkippedStep
from holdfast.core.engine.background import DAEMON_POOL, wait_in_slices
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError, first_three
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.catalog import read_run_id
from holdfast.stored.repository.epochs import declare_timelines
from holdfast.stored.repository.latest import name_latest
from holdfast.stored.repository.near_tier import ensure_near
from holdfast.stored.repository.quarantine import quarantined
from holdfast.stored.repository.tags import read_tags
from holdfast.stored.repository.timeline_records import TimelineRecord, put_record
from holdfast.stored.repository.timelines import StoredManifest, run_timelines
from holdfast.stored.repository.two_roots import TwoRoots, places_of
from holdfast.training.coordination.job import error_from, error_text
from holdfast.training.coordination.message_codec import decode_message, encode_message
from holdfast.training.loading.load import Loaded
from holdfast.training.loading.named_step import FoundStep, StepQuery
from holdfast.training.runs.position import move_damaged
from holdfast.training.runs.run_parts import RunParts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Discarded:
    """What rank 0 tells every rank."""

    error: str | None = None
    """Why every rank raises, as an `error_text`."""

    discarded: tuple[str, ...] = ()
    left: tuple[SkippedStep, ...] = ()
    is_newest: bool = False
    """Whether a restart resumes from the loaded step."""


class Discarding:
    """The discarding of the steps that one load leaves, on one rank."""

    def __init__(self, parts: RunParts, find: StepQuery | None) -> None:
        """Take nothing yet.

        Args:
            parts: The run.
            find: Finds the step that is loaded; None if the caller named none.
        Raises:
            InvalidError: The caller named none.
        """
        if find is None:
            raise InvalidError(
                "load(state, discard_newer=True) without a step; expected the step to go back to, as in step=100 or "
                "step='best'. Nothing was loaded or removed"
            )
        self._parts, self._find = parts, find
        self._failure: CheckpointError | None = None
        self._has_taken_lease = False

    def find(self, store: Store) -> FoundStep:
        """Take the writer lease, on rank 0, and find the step. If storage refuses the lease, the load removes nothing.

        Raises:
            ConflictError: Another job writes here.
        """
        self._take_lease()
        return self._find(store)

    def _take_lease(self) -> None:
        job, store, lease = self._parts.job, self._parts.run_store, self._parts.writer_lease
        is_held, seconds = lease.epoch > 0, job.agreement_seconds
        try:
            if (run_id := read_run_id(store)) is not None:
                # On another thread: a signal handler may save meanwhile, and then shares the lease.
                holding = DAEMON_POOL.submit(partial(_hold, store, lease, run_id, job.clock))
                # Before the wait: a lease that is taken late is given up too if the load fails.
                self._has_taken_lease = not is_held
                wait_in_slices(holding, seconds, job.clock, lambda: None)
        except TimeoutError:
            self._failure = UnavailableError(f"the writer lease was not taken within {seconds:,.0f} s; look at storage")
        except ConflictError as error:
            raise ConflictError(
                f"discard_newer: {error}. The state was not changed, and no step was removed"
            ) from error
        except CheckpointError as error:
            self._failure = error

    def __enter__(self) -> Self:
        """Begin the load."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Give the lease back that this load took, if the load failed: nothing is discarded."""
        if error is not None and self._has_taken_lease:
            self._parts.writer_lease.release()

    def execute(self, loaded: Loaded) -> LoadReport:
        """Discard the steps newer than the loaded one; return its report with what was discarded. A collective.

        Raises:
            ConflictError: Another job took over; on every rank. The state is filled, and nothing was removed.
        """
        job, own, message = self._parts.job, None, None
        if job.comm.rank == 0:
            try:
                outcome = self._decide(loaded)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
                own, outcome = error, _Discarded(error_text(error))
            message = encode_message(outcome)
        outcome = decode_message(job.comm.broadcast(message), _Discarded)
        if outcome.error is not None:
            raise own if own is not None else error_from(outcome.error, "rank 0: ")
        if outcome.is_newest:
            self._parts.position.forget_newer()
        if job.comm.rank == 0 and outcome.discarded:
            self._parts.collect_soon()
        return replace(loaded.report, discarded=outcome.discarded, left=outcome.left)

    def _decide(self, loaded: Loaded) -> _Discarded:
        try:
            if self._failure is not None:
                raise self._failure
            return self._discard(loaded)
        except ConflictError as error:
            raise ConflictError(
                f"discard_newer: step {loaded.location.step} was loaded, so the state is filled, but {error}. No step "
                "was removed"
            ) from error
        except CheckpointError as error:
            logger.warning(
                "%s: step %s was loaded, but the newer steps stay, and a restart would resume from them: %s. The next "
                "save begins a timeline at the loaded step",
                self._parts.run_store.url,
                loaded.location.step,
                error,
            )
            return _Discarded(left=tuple(SkippedStep(step, f"not removed: {error}") for step in loaded.newer))

    def _discard(self, loaded: Loaded) -> _Discarded:
        """Begin a timeline at the loaded step, unless nothing is newer; return what it discards and what stays."""
        parts, step = self._parts, loaded.location.step
        store, position, epoch = parts.run_store, parts.position, parts.writer_lease.epoch
        assert step is not None, "a step was asked for"
        parts.writer_lease.require(store)
        stored = run_timelines(store)
        timeline = position.fork(stored)
        newer = [
            manifest
            for manifest in stored.chain
            if (
                step < manifest.step
                if manifest.timeline is None
                else not timeline.holds(manifest.timeline.id, manifest.step)
            )
        ]
        digest = loaded.manifest.digest
        # A log may reach further than the step: the record of a timeline ends the log.
        if not (newer or loaded.manifest.log) and any(
            (step, digest) == (manifest.step, manifest.digest) for manifest in stored.chain
        ):
            return _Discarded(is_newest=True)
        left = self._why_left(newer)
        discarded = [manifest for manifest in newer if manifest not in left]
        declare_timelines(store, epoch, timeline)
        parts.run_facts.forget()
        names = frozenset((manifest.step, str(manifest.digest)) for manifest in discarded)
        put_record(store, TimelineRecord(timeline, epoch, names))
        parts.writer_lease.require(store)
        position.adopt(timeline)
        move_damaged(store, step, stored, epoch)
        for place in places_of(store):
            # Of two places each names the newest step that it has.
            name_latest(place, None if isinstance(store, TwoRoots) else step, parts.job.is_first_occurrence)
        outcome = _Discarded(
            None,
            tuple(f"{manifest.step}@{str(manifest.digest)[:8]}" for manifest in discarded),
            tuple(SkippedStep(manifest.step, why) for manifest, why in left.items()),
            is_newest=True,
        )
        self._log(step, outcome)
        return outcome

    def _why_left(self, newer: list[StoredManifest]) -> dict[StoredManifest, str]:
        """Return the newer steps that no collection may remove, each with the reason."""
        store, left = self._parts.run_store, dict[StoredManifest, str]()
        tags, records = read_tags(store), quarantined(store)
        for manifest in newer:
            tagged = tags.of(manifest.step, manifest.digest or "")
            if manifest.digest is None or manifest.timeline is None:
                left[manifest] = "its manifest cannot be read"
            elif tagged:
                left[manifest] = f"tag {', '.join(sorted(tagged))}"
            elif manifest.digest[:16] in records.get(manifest.step, {}):
                left[manifest] = "under quarantine"
        return left

    def _log(self, step: int, outcome: _Discarded) -> None:
        url = self._parts.run_store.url
        if outcome.discarded:
            logger.info(
                "%s: step %d was loaded; newer steps are discarded, and removed after %g s: %s",
                url,
                step,
                self._parts.job.settings.collect_grace_seconds,
                first_three(outcome.discarded),
            )
        if outcome.left:
            logger.warning(
                "%s: step %d was loaded; newer steps stay stored as superseded, no resume takes them: %s",
                url,
                step,
                first_three(f"step {each.step} ({each.why})" for each in outcome.left),
            )


def _hold(store: Store, lease: WriterLease, run_id: str, clock: Clock) -> int:
    if isinstance(store, TwoRoots):
        ensure_near(store, run_id, f"{clock.unix_seconds():.0f}")
    return lease.hold(run_id)
