"""One save on one rank: its state, its files, and how a failure ends it on every rank.

States of an attempt, and the thread or rank that moves the attempt from one state to the next:

    begun      -> agreed      the training thread, once rank 0's verdict is there
    agreed     -> committed   the commit thread, if every rank holds the step as loaded: nothing is written
    begun      -> refused     the training thread: the verdict says whether the call raises, or the handle fails
    agreed     -> staged      the thread that copied or wrote the last byte (`Transfer`); training may change the state
    staged     -> written     the commit thread, once this rank's packs and part are durable
    written    -> voted       the commit thread, with its vote in the key-value store
    voted      -> publishing  the commit thread of the one rank whose vote completed the count
    publishing -> committed   that rank; the others read the commit in the key-value store or in the manifest
    publishing -> aborted     that rank, if certain that nothing was published
    publishing -> unknown     a rank that cannot learn whether the manifest is published; nothing is removed
    any before publishing -> aborted   any rank that fails or waits too long; the files of that rank are removed

The effect of a failure on this rank depends on the progress of this rank: see `SaveProgress`. Exactly one side finishes
a save: the commit thread, or the training thread after a failure before the hand-over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TypeVar

from holdfast.base.interrupts import require_uninterrupted
from holdfast.base.types.health import findings_of
from holdfast.base.types.reports import SaveReport
from holdfast.core.engine.background import DAEMON_POOL, wait_in_slices
from holdfast.core.engine.gc_pause import GcPause, is_small_transfer
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.names import link_name, part_name
from holdfast.core.format.part import RankPart, encode_part
from holdfast.errors import CheckpointError, InvalidError, UnavailableError, text_of
from holdfast.stored.publishing.outcome import Outcome, OutcomeKind
from holdfast.training.coordination.agreement.records import Agreement, DescribedState, Statement
from holdfast.training.coordination.agreement.save_agreement import SaveAgreement
from holdfast.training.coordination.commit_vote import CommitVote, Vote
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.saving.commit import commit, delete_leftovers_in_time, outcome_on_storage
from holdfast.training.saving.handle import SaveHandle, collect_error, typed
from holdfast.training.saving.target import SaveTarget, claim_in_time
from holdfast.training.saving.transfer import Transfer
from holdfast.training.telemetry.dispatcher import EventDispatcher
from holdfast.training.telemetry.log_lines import saved_line
from holdfast.training.telemetry.operation import OperationTrace

logger = logging.getLogger(__name__)

T = TypeVar("T")

LATE_SECONDS = 10.0
"""How much longer than the time limits of agreement and verdict the training thread waits for both."""


class SaveProgress(Enum):
    """The progress of this rank, which decides the effect of a failure."""

    NUMBERING = "numbering"
    """The rank takes the number of the save. The other ranks do not know of the failure: the handle fails."""

    COLLECTING = "collecting"
    """The rank takes the state apart. A failure refuses the save on every rank; a lack of memory fails the handle."""

    AGREEING = "agreeing"
    """Rank 0 decides, also whether a refusal raises in the call of every rank. Other failures live in the handle."""

    AGREED = "agreed"
    """The rank copies, writes and votes. A failure aborts the attempt on all ranks, unless a rank may be publishing."""

    DECIDED = "decided"
    """The outcome is known. A failure cannot change the outcome now: the handle reports the outcome as unknown."""


class SaveAttempt:
    """One try to save, on one rank."""

    agreement: Agreement
    """The agreement of the ranks; set by `record_agreement`."""

    commit_vote: CommitVote
    """The vote of this attempt; set by `record_agreement`."""

    def __init__(
        self, job: Job, target: SaveTarget, dispatcher: EventDispatcher | None = None, *, awaited: bool = False
    ) -> None:
        """Begin nothing yet.

        Args:
            job: The ranks that save together.
            target: Where the checkpoint goes.
            dispatcher: Passes events to observers.
            awaited: Whether the caller waits for the commit in any case.
        """
        self.job, self.target = job, target
        location = target.location
        self.name = f"save of {location.url}" if location.step is None else f"save of step {location.step}"
        self.location = location.for_operation(self.name, job.comm.rank, job.comm.world_size)
        """Where the checkpoint goes. The retries of the save share one deadline."""
        self.awaited = awaited
        events, place = dispatcher or EventDispatcher((), job.clock), (location.step, location.url)
        self.trace = OperationTrace("save", *place, job.comm, job.clock, events, location.store)
        self.handle = SaveHandle(
            self.name, awaited=awaited, history=job.history, near_only=target.near_only, replicates=target.replicates
        )
        self.handle.near.add_done_callback(self.trace.fail_with)
        if target.on_end is not None:
            on_end = target.on_end
            self.handle.near.add_done_callback(lambda _: on_end())
        self.gc_pause = GcPause()
        """Keeps the cyclic garbage collector from walking a plan of many small values. Ended early when much data moves
        or this rank waits for others, and at the latest by the function that began it."""
        self.file_keys: list[str] = []
        """Keys of the files that this rank has begun to write."""
        self._negotiation: SaveAgreement | None = None
        self._deadline = 0.0
        """Monotonic time at which the agreement must end."""
        self._has_waited = False
        self._progress = SaveProgress.NUMBERING
        self._transfer: Transfer | None = None
        self._finisher = threading.Lock()  # No thread waits for this lock.
        """Taken by the side that finishes the save; never released."""

    @property
    def step(self) -> int:
        """The step as ranks state it; -1 for a checkpoint saved by path."""
        return -1 if self.location.step is None else self.location.step

    # ------------------------------------------------------------------------------- on the training thread

    def begin(self) -> None:
        """Begin the save in the call of the training thread.

        Raises:
            InvalidError: This process was forked after the job was made.
        """
        if self.job.is_inherited:
            raise InvalidError(
                f"{self.name}: this process was forked from the one that made the manager; expected saves from the "
                "process that made it. Make a CheckpointManager of its own here, with process_group=False"
            )
        self.trace.begin(self.location.step, self.location.url)

    def end_in_call(self, error: BaseException) -> None:
        """End the save after a failure in the call of the training thread, by the rules of its state.

        Returns if the handle holds the failure.

        Raises:
            InvalidError: The state or the call is wrong, or ranks disagree, and the ranks never agreed on a save of
                this job. Nothing was written on any rank.
            CheckpointError: `settings.failed_saves_max` saves in a row have failed.
        """
        has_agreed = self._progress in (SaveProgress.AGREED, SaveProgress.DECIDED)
        raised = self._end_agreed(error) if has_agreed else self._end_before_agreement(error)
        if raised is None:
            return
        if not has_agreed:
            self.trace.fail(raised)
            # No caller gets the handle; its end runs `on_end`. After the agreement, the thread that finishes the save
            # ends the handle. Here not with `raised`, whose traceback refers to the state and to this handle.
            self.handle.end_with(UnavailableError(f"{self.name}: the call raised {type(raised).__name__}"))
        try:
            if raised is error:
                raise raised
            raise raised from error
        finally:
            del raised, error  # A frame that an error refers to must not refer to that error.

    def take_number(self) -> int:
        """Return the number of this save; from now on a failure to collect the state is a refusal on every rank."""
        require_uninterrupted(self.name)
        negotiation = SaveAgreement(self.job, self.step, self.location.url_digest)
        self._deadline = self.job.agreement_deadline()
        try:
            self._negotiation = self._wait(DAEMON_POOL.submit(negotiation.take_number))
        except BaseException:
            negotiation.leave()
            raise
        self._progress = SaveProgress.COLLECTING
        self._negotiation.require_wanted()
        hung = self.job.progress.unanswered
        if hung is not None:
            # Before the save takes memory. The commit thread would begin this save only after the write that hangs.
            raise UnavailableError(f"{self.name}: {hung}. Nothing was saved; look at the storage")
        return self._negotiation.sequence

    def agree(self, statement: Statement, state: DescribedState) -> Agreement:
        """Return the agreement of the ranks. From now on a failure aborts the attempt on every rank.

        The waits for other ranks, and rank 0's look at the location, are on another thread.

        Raises:
            CheckpointError: As `SaveAgreement.agree`, or that call did not end.
        """
        # The state is collected. Rank 0 notices a later failure by the missing statement.
        self._progress = SaveProgress.AGREEING
        negotiation, claim = self._negotiation, self.target.hooks.claim
        assert negotiation is not None, "the save has a number"

        def claim_soon(is_held: bool) -> SaveContext | None:
            return claim_in_time(self.job, partial(claim, is_held), self.name, self._deadline, self.location.url)

        future = DAEMON_POOL.submit(lambda: negotiation.agree(statement, state, claim_soon))
        try:
            self._wait(future)
        except BaseException:
            # If the agreement arrives after this rank gave up, abort it: no one would vote.
            future.add_done_callback(self._abort_late)
            raise
        agreement = future.result()
        if agreement.context.place == "root" and (in_root := self.target.in_root) is not None:
            self.target, comm = in_root, self.job.comm
            self.location = in_root.location.for_operation(self.name, comm.rank, comm.world_size)
        self.record_agreement(agreement)
        return agreement

    def _wait(self, future: Future[T]) -> T:
        """Wait for a call, on the training thread.

        Raises:
            UnavailableError: The call hangs. Every wait for ranks in the call has an earlier deadline.
        """
        job = self.job
        seconds = job.seconds_left(job.agreement_deadline()) + job.verdict_seconds + LATE_SECONDS
        try:
            return wait_in_slices(future, seconds, self.job.clock, self._note_wait)
        except TimeoutError:
            if future.done():
                raise
        if self._progress is SaveProgress.NUMBERING:
            raise UnavailableError(
                f"{self.name}: the job's key-value store gave no answer within {seconds:,.0f} s. This rank saved "
                "nothing; look at the host of the store"
            )
        raise UnavailableError(
            f"{self.name}: the agreement of the ranks did not end within {seconds:,.0f} s on rank {job.comm.rank}; "
            "expected the verdict of rank 0. This rank saved nothing; look at rank 0 and at the host of the job's "
            "key-value store"
        )

    def _note_wait(self) -> None:
        """Take note that this rank waits for others: the collector slows down no work of a rank that waits."""
        if not self._has_waited:
            self._has_waited = True
            self.gc_pause.end()
            logger.info("%s: training waits until all ranks agree on it", self.name)

    def _abort_late(self, future: Future[Agreement]) -> None:
        """Abort an attempt that the ranks agreed on after this rank gave up, so that no rank waits for its vote."""
        if future.exception() is None:
            agreement = future.result()
            vote = CommitVote(self.job, agreement.sequence, agreement.attempt, self.name)
            vote.abort(UnavailableError(f"{self.name}: this rank gave up before the ranks agreed"))

    def record_agreement(self, agreement: Agreement) -> None:
        """Record the agreement: from now on a failure aborts the attempt on every rank."""
        self.agreement = agreement
        self.handle.attempt = agreement.attempt
        self.job.begin_attempt(agreement.attempt, self.handle.near)
        self.commit_vote = CommitVote(self.job, agreement.sequence, agreement.attempt, self.name)
        self._progress = SaveProgress.AGREED

    def end_pause_for(self, count: int) -> None:
        """Let the garbage collector run if so many bytes move that a pause gains nothing."""
        if not is_small_transfer(count):
            self.gc_pause.end()

    def attach_transfer(self, transfer: Transfer, keys: Iterable[str]) -> None:
        """Record the transfer, which must end with the save, and the keys of its packs.

        From now on the handle can `settle` and `cancel` the transfer.
        """
        self._transfer = transfer
        self.file_keys += keys
        # The handle drops this reference once the save commits or fails: the attempt refers to the state.
        self.handle.in_flight = self

    def settle(self, timeout: float | None) -> float | None:
        """Wait until the state is no longer read; return the seconds left of the timeout."""
        return timeout if self._transfer is None else self._transfer.settle(timeout)

    def cancel(self, error: CheckpointError) -> bool:
        """End the save on every rank; return False if a rank may be publishing: then the save ends by itself."""
        is_aborted = self.commit_vote.abort(error).kind is OutcomeKind.ABORTED
        if is_aborted and self._transfer is not None:
            self._transfer.give_up(error)
        return is_aborted

    def stop_waiting(self, error: CheckpointError) -> None:
        """End the save and fail its handle, although the commit thread may hang in a write."""
        # If the commit thread has not begun this save, it never will. The next save removes the files: to remove files
        # now would wait for the storage that does not answer.
        self._finisher.acquire(blocking=False)
        assert self._transfer is not None, "the handle knows the attempt from the transfer on"
        self._transfer.give_up(error)
        if self.commit_vote.abort(error).kind is OutcomeKind.ABORTED:
            self.handle.fail(error)

    @property
    def folder(self) -> str:
        """Key of the folder of this attempt, with a slash at the end."""
        return f"{self.location.folder}{self.agreement.attempt}/"

    @property
    def provenance(self) -> dict[str, str]:
        """The metadata of the packs of this rank."""
        step = "" if self.location.step is None else str(self.location.step)
        return {"step": step, "attempt": self.agreement.attempt, "rank": str(self.job.comm.rank)}

    def link_pack(self, pack: str, source: str) -> str | None:
        """Give a pack of another step a further name in the folder of this attempt; return the key of a link, if made.

        Args:
            pack: The path of the pack from the root of the run.
            source: The key there: this path, or the path of a link to the pack.
        Raises:
            MissingError: There is no such key any more.
        """
        key = self.folder + link_name(pack)
        # Before the link is made: an aborted attempt removes the link. The commit makes all names durable.
        self.file_keys.append(key)
        return key if self.location.store.link(source, key) else None

    def finish_in_background(self, finish: Callable[[], None]) -> None:
        """Hand the rest of the save over to the commit thread."""
        queued_seconds = self.trace.seconds
        if not self.job.commits.is_idle:
            self.gc_pause.end()

        def run() -> None:
            if not self._finisher.acquire(blocking=False):
                return
            self.trace.add_phase("queue", queued_seconds, self.trace.seconds)
            try:
                try:
                    finish()
                except Exception as error:
                    if self._progress is SaveProgress.DECIDED:
                        raise
                    self._lose(error)
            except BaseException as error:
                # Complete the handle even if ending the save failed: callers wait for the handle.
                if not self.handle.near.done():
                    self._fail_unknown(f"{type(error).__name__}: {text_of(error)}")
                raise

        self.job.commits.submit(run)

    def _end_before_agreement(self, error: BaseException) -> BaseException | None:
        """End a save before any rank writes; return the error for the call, None if the handle holds the error."""
        raised = error
        if self._progress is SaveProgress.COLLECTING:
            raised = collect_error(error, self.name)
            assert self._negotiation is not None, "the save has a number"
            negotiation, refused = self._negotiation, raised
            with suppress(UnavailableError):
                self._wait(DAEMON_POOL.submit(lambda: negotiation.refuse(refused)))
        if not isinstance(raised, Exception):
            return raised  # An interrupt such as Ctrl-C goes to the caller.
        failure = typed(raised, self.name)
        if self._negotiation is not None and self._negotiation.raises:
            self.job.history.note_raised()
            return failure
        self.handle.fail(failure)
        return None

    def _end_agreed(self, error: BaseException) -> BaseException | None:
        """Abort an attempt on every rank; return the error for the call, None if the handle holds the error."""
        if self._finisher.acquire(blocking=False):
            if self._transfer is not None:
                self._transfer.give_up(error)
            self._lose(error)
        # An interrupt such as Ctrl-C goes to the caller, but only after the abort: the other ranks must not wait.
        return None if isinstance(error, Exception) else error

    # --------------------------------------------------------------------------------- on the commit thread

    def write_part(self, part: RankPart) -> Vote:
        """Make this rank's part durable; return the vote for it."""
        with self.trace.phase("part"):
            with GcPause():
                data = encode_part(part)
            key = self.folder + part_name(part.rank)
            self.file_keys.append(key)
            # The committing rank makes the folders durable, once for all ranks.
            self.location.store.put_if_absent(key, data, folders_durable=False)
        return Vote(len(data), hex_digest_of(data))

    def vote_and_commit(self, vote: Vote) -> Outcome:
        """Vote, then commit or wait for the rank that commits; return the outcome."""
        with self.trace.phase("vote"):
            outcome = self.commit_vote.vote(vote)
        if outcome.kind is OutcomeKind.VOTING:
            self.gc_pause.end()
            with self.trace.phase("wait"):
                return self.commit_vote.await_outcome()
        return self._commit() if outcome.kind is OutcomeKind.PUBLISHING else outcome

    def end_unwritten(self, report: SaveReport) -> None:
        """End the save without a vote: the step is committed, and the state of every rank equals the loaded step."""
        self._progress = SaveProgress.DECIDED
        report = replace(report, untagged=self.target.hooks.committed(self.agreement.context, ""))
        if self.job.comm.rank == 0:
            logger.info("%s: it is saved already, and no tensor has changed since it was loaded", self.name)
        self.trace.end(report, self.agreement.attempt, None, self.location.folder, self.job.node_reports)
        (self.handle.reach_committed if self.target.tier == "root" else self.handle.reach_near)(report)

    def conclude(self, outcome: Outcome, report: Callable[[], SaveReport]) -> None:
        """End the save with its outcome.

        Args:
            outcome: The outcome of the attempt.
            report: Makes the report, if the checkpoint is committed.
        """
        self._progress = SaveProgress.DECIDED
        if outcome.kind is OutcomeKind.ASK_STORAGE:
            outcome = outcome_on_storage(self.location, self.agreement, self.name, outcome.reason)
        if outcome.kind is OutcomeKind.COMMITTED:
            self._succeed(outcome, report())
        elif outcome.error is not None:
            # The files of a fenced attempt stay: the new writer removes them.
            if outcome.kind is OutcomeKind.ABORTED:
                self._remove_files()
            self.handle.fail(outcome.error)
        else:
            self._fail_unknown(outcome.reason)

    def _commit(self) -> Outcome:
        """Publish the manifest, and announce the outcome to the waiting ranks."""
        job, agreement = self.job, self.agreement
        votes, keys = self.commit_vote.votes, self.file_keys
        outcome, may_delete = commit(
            self.target, self.location, agreement, votes, job=job, trace=self.trace, written=keys, name=self.name
        )
        self.commit_vote.announce(outcome)
        if may_delete:
            with self.trace.phase("sweep"):
                delete_leftovers_in_time(self.location, agreement, self.name, job)
        return outcome

    def _succeed(self, outcome: Outcome, report: SaveReport) -> None:
        untagged = self.target.hooks.committed(self.agreement.context, outcome.manifest_digest)
        report = replace(report, unhealthy=outcome.unhealthy, untagged=untagged)
        if self.job.comm.rank == 0:
            logger.info("%s", saved_line(report, outcome.tensor_bytes, self.agreement.context.metrics))
            # The agreement has warned once of replicas that drift.
            known = findings_of(self.agreement.drift)
            findings = [finding for finding in outcome.unhealthy if finding not in known]
            if findings:
                logger.warning(
                    "%s: committed, but marked unhealthy: %s. The report lists the findings (unhealthy)",
                    self.name,
                    "; ".join(findings[:3]),
                )
        store = self.location.store if self.job.settings.reports else None
        self.trace.end(report, self.agreement.attempt, store, self.location.folder, self.job.node_reports)
        (self.handle.reach_committed if self.target.tier == "root" else self.handle.reach_near)(report)
        try:
            self.job.delete_keys_before(self.agreement.sequence)
        except (CheckpointError, TimeoutError) as error:
            logger.warning("%s: old keys of the key-value store stay until the next commit: %s", self.name, error)

    # --------------------------------------------------------------------------------------------- failures

    def _lose(self, error: BaseException) -> None:
        """Abort the save on every rank after a failure on this rank, unless a rank may be publishing."""
        failure = typed(error, self.name)
        outcome = self.commit_vote.abort(failure)
        if outcome.kind is not OutcomeKind.ABORTED:
            self._fail_unknown(f"{failure}; {outcome.reason}", error)
            return
        # Where a write hangs, removing its files would hang too. The next save of the step removes these files.
        if self.job.progress.hung is None:
            self._remove_files()
        self.handle.fail(failure)

    def _fail_unknown(self, reason: str, cause: BaseException | None = None) -> None:
        failure = UnavailableError(
            f"{self.name}: outcome unknown: {reason}. The checkpoint may or may not be at {self.location.url}; nothing "
            "was removed. Check with holdfast ls before you save this step again"
        )
        failure.__cause__ = cause
        self.handle.may_be_committed = True
        self.handle.fail(failure)

    def _remove_files(self) -> None:
        """Remove this rank's files of the attempt. Only call this once the attempt cannot be committed any more."""
        try:
            self.location.store.delete(self.file_keys)
        except CheckpointError as error:
            logger.warning("%s: files of the failed attempt stay, the next save removes them: %s", self.name, error)
