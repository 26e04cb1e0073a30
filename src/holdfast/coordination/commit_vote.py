"""The commit vote of one attempt: the rank whose vote completes the count commits; before that, any rank may abort.

States of an attempt, and who moves it from one to the next:

    voting      -> publishing   the rank whose vote completed the count, by compare-and-set on the key `outcome`
    voting      -> aborted      any rank, by the same compare-and-set: on its error, or at its deadline
    publishing  -> committed    the committing rank, once the manifest is durable and visible
    publishing  -> aborted      the committing rank, if it is certain to have left no manifest
    publishing  -> ask storage  a waiting rank at its deadline; the committing rank, if its lease may have ended
    publishing  -> unknown      the committing rank, if putting the manifest failed half-way

One compare-and-set decides between publishing and aborting, so all ranks see the same decision. The key `result` only
wakes the waiting ranks.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from holdfast.coordination.job import Job
from holdfast.coordination.message_codec import decode_message, encode_message
from holdfast.coordination.outcome import Outcome, OutcomeKind, aborted, aborted_by, ask_storage
from holdfast.errors import CheckpointError, UnavailableError, first_three

_VOTING = Outcome(OutcomeKind.VOTING)


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of a rank: its part is whole and durable."""

    part_bytes: int
    """Size of its part file."""

    part_digest: str
    """xxh3-128 of its part file, hex."""


class CommitVote:
    """The keys of one attempt in the key-value store, as one rank sees them."""

    def __init__(self, job: Job, sequence: int, attempt: str, name: str) -> None:
        """Set no key yet.

        Args:
            job: The ranks.
            sequence: Number of the save.
            attempt: Id of the attempt.
            name: Name of the save, for messages.
        """
        self._job, self._sequence, self._attempt, self._name = job, sequence, attempt, name
        self._has_voted = False
        self._may_publish = False
        """Whether the commit thread of this rank publishes, or is about to decide that it does."""

    def vote(self, vote: Vote) -> Outcome:
        """Cast this rank's vote.

        Returns:
            `publishing` if the vote completed the count: this rank must commit. `voting` if others have to vote.
            `aborted` if another rank had aborted by then.
        Raises:
            CheckpointError: The key-value store failed before the vote counted: the attempt cannot commit.
        """
        job = self._job
        deadline = job.deadline()
        key = self._key("vote", job.comm.rank)
        job.key_value_store.set(key, encode_message(vote), job.seconds_left(deadline))
        # From here on another rank may count this vote, even if the call below fails.
        self._has_voted = True
        # Never retry: a rank counted twice would let the attempt commit without the vote of another rank.
        count = job.key_value_store.add(self._key("count"), 1, job.seconds_left(deadline))
        shared = [self._key(name) for name in ("count", "outcome", "result")] if job.comm.rank == 0 else []
        job.record_keys(self._sequence, [key, *shared])
        if count < job.comm.world_size:
            return _VOTING
        # Set before the decision: another thread of this rank may abort the attempt meanwhile.
        self._may_publish = True
        try:
            return self._decide(Outcome(OutcomeKind.PUBLISHING, rank=job.comm.rank), deadline)
        except BaseException:
            self._may_publish = False
            raise

    def votes(self) -> list[Vote]:
        """Return every rank's vote, by rank; for the committing rank."""
        job = self._job
        keys = [self._key("vote", rank) for rank in range(job.comm.world_size)]
        records = job.key_value_store.get_many(keys, job.seconds_left(job.deadline()))
        return [decode_message(record, Vote) for record in records]

    def abort(self, error: CheckpointError) -> Outcome:
        """Abort the attempt after a failure on this rank, unless a rank may be publishing. Never raises.

        Returns:
            `aborted`, or `ask_storage` if this rank had voted and the attempt may still be committed.
        """
        job = self._job
        try:
            decided = self._decide(aborted_by(job.comm.rank, error), job.deadline())
            if decided.kind is OutcomeKind.PUBLISHING:
                if decided.rank != job.comm.rank or self._may_publish:
                    return ask_storage("another rank is publishing")
                # This rank decided to publish, but the reply was lost, and it has given up. Nobody else publishes.
                decided = aborted_by(job.comm.rank, error)
            self._announce(decided, job.deadline())
        except (CheckpointError, TimeoutError) as failure:
            # Without this rank's vote no rank can complete the count, whatever the key-value store holds.
            if self._has_voted:
                return ask_storage(str(failure))
        return aborted(error)

    def announce(self, outcome: Outcome) -> None:
        """Announce the outcome of publishing to the waiting ranks. Never raises: they can read the manifest instead."""
        with suppress(CheckpointError, TimeoutError):
            self._announce(outcome, self._job.deadline())

    def await_outcome(self) -> Outcome:
        """Wait for the outcome of the attempt. Never raises.

        At its deadline this rank aborts an attempt that no rank publishes, and names the silent ranks.
        """
        job = self._job
        try:
            (result,) = job.key_value_store.get_many([self._key("result")], job.seconds_left(job.deadline()))
        except TimeoutError:
            return self._abort_for_silence()
        except CheckpointError as failure:
            return ask_storage(str(failure))
        return decode_message(result, Outcome)

    def _abort_for_silence(self) -> Outcome:
        job = self._job
        timeout = job.settings.commit_timeout_seconds
        try:
            keys = job.key_value_store
            silent = [rank for rank in range(job.comm.world_size) if not keys.present(self._key("vote", rank))]
            problem = f"ranks [{first_three(silent)}] did not finish their part"
            advice = "Look at those ranks"
            if not silent:
                problem, advice = "all ranks voted and none committed", "Look for a rank that ended after its vote"
            error = UnavailableError(
                f"{self._name}: {problem} within {timeout} s of this rank; the attempt is aborted. {advice}"
            )
            decided = self._decide(aborted_by(job.comm.rank, error), job.deadline())
            if decided.kind is OutcomeKind.PUBLISHING:
                return ask_storage(f"the committing rank was publishing and reported nothing for {timeout} s")
            self._announce(decided, job.deadline())
        except (CheckpointError, TimeoutError) as failure:
            return ask_storage(str(failure))
        return decided

    def _decide(self, wanted: Outcome, deadline: float) -> Outcome:
        """Set the outcome unless one is set already; return the outcome that is set."""
        job = self._job
        key, text = self._key("outcome"), encode_message(wanted)
        return decode_message(job.key_value_store.compare_set(key, b"", text, job.seconds_left(deadline)), Outcome)

    def _announce(self, outcome: Outcome, deadline: float) -> None:
        self._job.key_value_store.set(self._key("result"), encode_message(outcome), self._job.seconds_left(deadline))

    def _key(self, *parts: object) -> str:
        return self._job.key("attempt", self._attempt, *parts)
