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

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from holdfast.core.engine.background import DAEMON_POOL
from holdfast.errors import CheckpointError, UnavailableError, first_three
from holdfast.stored.publishing.outcome import Outcome, OutcomeKind, aborted, ask_storage
from holdfast.training.coordination.absent_ranks import ranks_without
from holdfast.training.coordination.job import Job, error_from, error_text
from holdfast.training.coordination.message_codec import decode_message, encode_message

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
        self._announced_at = job.clock.monotonic_seconds()
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
        job.record_keys(self._sequence, [key, *(self._shared_keys if job.comm.rank == 0 else ())])
        if count < job.comm.world_size:
            return _VOTING
        # Set before the decision: another thread of this rank may abort the attempt meanwhile.
        self._may_publish = True
        try:
            return self._decide(Outcome(OutcomeKind.PUBLISHING, rank=job.comm.rank), deadline)
        except BaseException:
            self._may_publish = False
            raise

    def carry(self, votes: Mapping[int, Vote]) -> None:
        """Cast the votes of other ranks, which their caller has carried here: they share no key-value store with it.

        Args:
            votes: The vote of each, by rank. Each rank is carried once, and before this one votes.
        """
        job = self._job
        deadline = job.deadline()
        for rank, vote in votes.items():
            job.key_value_store.set(self._key("vote", rank), encode_message(vote), job.seconds_left(deadline))
            job.key_value_store.add(self._key("count"), 1, job.seconds_left(deadline))

    def note_written(self) -> None:
        """Record that this rank writes, and announce it a few times within the timeout of the ranks that wait.

        Never waits.
        """
        job = self._job
        now = job.clock.monotonic_seconds()
        if now - self._announced_at >= job.settings.commit_timeout_seconds / 4:
            self._announced_at = now
            with suppress(UnavailableError):  # No thread: announced again later.
                DAEMON_POOL.submit(self._announce_progress)

    def _announce_progress(self) -> None:
        key = self._key("progress")
        with suppress(CheckpointError, TimeoutError):
            self._job.key_value_store.add(key, 1, self._job.seconds_left(self._job.deadline()))

    def votes(self) -> list[Vote]:
        """Return every rank's vote, by rank; for the committing rank."""
        job = self._job
        keys = self._vote_keys(range(job.comm.world_size))
        records = job.key_value_store.get_many(keys, job.seconds_left(job.deadline()))
        return [decode_message(record, Vote) for record in records]

    def abort(self, error: CheckpointError) -> Outcome:
        """Abort the attempt after a failure on this rank, unless a rank may be publishing. Never raises.

        Returns:
            `aborted`, or `ask_storage` if this rank had voted and the attempt may still be committed.
        """
        job = self._job
        try:
            decided = self._decide(_aborted_by(job.comm.rank, error), job.deadline())
            # Rank 0 may never vote, and so never record them.
            job.record_keys(self._sequence, [self._key("outcome"), self._key("result")])
            if decided.kind is OutcomeKind.PUBLISHING:
                if decided.rank != job.comm.rank or self._may_publish:
                    return ask_storage("another rank is publishing")
                # This rank decided to publish, but the reply was lost, and it has given up. Nobody else publishes.
                decided = _aborted_by(job.comm.rank, error)
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

        At its deadline this rank aborts an attempt that no rank publishes, and names the silent ranks. Ranks that wrote
        since the last look move the deadline: a rank that writes for longer than the others is slow, not dead.
        """
        job = self._job
        count = 0
        while True:
            try:
                (result,) = job.key_value_store.get_many([self._key("result")], job.seconds_left(job.deadline()))
                return decode_message(result, Outcome)
            except TimeoutError:
                count, count_before = self._announced_progress(), count
                if count <= count_before:
                    return self._abort_for_silence()
            except CheckpointError as failure:
                return ask_storage(str(failure))

    def _announced_progress(self) -> int:
        """Return how often ranks have announced that they write; 0 if this process has no time to wait for them."""
        job = self._job
        if job.process_deadline is not None:
            return 0
        try:
            return job.key_value_store.add(self._key("progress"), 0, job.seconds_left(job.deadline()))
        except (CheckpointError, TimeoutError):
            return 0

    def _abort_for_silence(self) -> Outcome:
        job = self._job
        timeout = job.settings.commit_timeout_seconds
        try:
            keys = job.key_value_store
            # Most ranks come here at the same time. If each asked for every rank, the store would answer for hours.
            is_asking = not keys.present(self._key("outcome")) and job.is_elected(self._key("asking"))
            if not is_asking:
                with suppress(TimeoutError):
                    (result,) = keys.get_many([self._key("result")], job.asking_seconds)
                    return decode_message(result, Outcome)
            error = UnavailableError(
                f"{self._name}: {self._silence(is_asking)} within {timeout:g} s of this rank "
                "(settings.commit_timeout_seconds) and wrote no byte meanwhile; the attempt is aborted. "
                "Look at those ranks"
            )
            decided = self._decide(_aborted_by(job.comm.rank, error), job.deadline())
            if decided.kind is OutcomeKind.PUBLISHING:
                return ask_storage(f"the committing rank was publishing and reported nothing for {timeout} s")
            self._announce(decided, job.deadline())
        except (CheckpointError, TimeoutError) as failure:
            return ask_storage(str(failure))
        return decided

    def _silence(self, is_asking: bool) -> str:
        """Return who is silent, in words; the elected rank asks for every rank."""
        if not is_asking:
            return "some ranks did not finish their part"
        keys = self._job.key_value_store
        silent = ranks_without(range(self._job.comm.world_size), lambda ranks: keys.present(*self._vote_keys(ranks)))
        if not silent:
            return "all ranks voted, and the last one to vote did not begin to commit"
        return f"ranks [{first_three(silent)}] did not finish their part"

    def _decide(self, wanted: Outcome, deadline: float) -> Outcome:
        """Set the outcome unless one is set already; return the outcome that is set."""
        job = self._job
        key, text = self._key("outcome"), encode_message(wanted)
        decided = decode_message(job.key_value_store.compare_set(key, b"", text, job.seconds_left(deadline)), Outcome)
        if decided.kind is OutcomeKind.ABORTED and decided.rank == job.comm.rank:
            # Rank 0 deletes these keys if it voted. It may have been aborted before.
            job.record_keys(self._sequence, self._shared_keys)
        return decided

    def _announce(self, outcome: Outcome, deadline: float) -> None:
        self._job.key_value_store.set(self._key("result"), encode_message(outcome), self._job.seconds_left(deadline))

    @property
    def _shared_keys(self) -> list[str]:
        return [self._key(name) for name in ("count", "outcome", "result", "asking", "progress")]

    def _vote_keys(self, ranks: Iterable[int]) -> list[str]:
        return self._job.keys_of(ranks, "attempt", self._attempt, "vote")

    def _key(self, *parts: object) -> str:
        return self._job.key("attempt", self._attempt, *parts)


def _aborted_by(rank: int, error: CheckpointError) -> Outcome:
    """Return the outcome with which a rank aborts an attempt; its message names the rank, for the other ranks."""
    return replace(aborted(error_from(error_text(error), f"rank {rank} aborted: ")), rank=rank)
