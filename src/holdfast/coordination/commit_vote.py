"""Votes and outcome of one attempt: whoever completes the count commits, anybody may abort before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.coordination.job import Job, error_from, error_text
from holdfast.errors import CheckpointError, UnavailableError

_PUBLISHING = b"publishing"


@dataclass(frozen=True, slots=True)
class Vote:
    """A rank's word that its part is whole and durable."""

    part_bytes: int
    """Size of its part file."""

    part_digest: str
    """xxh3-128 of its part file, hex."""


class Aborted(Exception):
    """The attempt is over without a checkpoint, for certain."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


class OutcomeUnknown(Exception):
    """The deadline passed, the key-value store went, or publishing failed: somebody may have published.

    `storage_knows`: the manifest, if it is there, settles it; not so where making it durable failed.
    """

    def __init__(self, reason: str, *, storage_knows: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.storage_knows = reason, storage_knows


class CommitVote:
    """The keys of one attempt on the board, as one rank sees them.

    The outcome is a single compare-and-set from nothing to `publishing` or to an abort, so no two ranks can
    believe different things. `result` only wakes who waits.
    """

    def __init__(self, job: Job, sequence: int, attempt: str, name: str) -> None:
        self._job, self._sequence, self._attempt, self._name = job, sequence, attempt, name
        self._voted = False
        self.unhealthy: tuple[str, ...] = ()
        """What the committing rank found against what it published, in words; once it is committed."""

    def vote(self, vote: Vote) -> bool:
        """Cast this rank's vote; return whether it completed the count, which makes this rank the committer.

        Raises:
            Aborted: Another rank had aborted by then.
            CheckpointError: The board failed before the vote counted: the attempt cannot commit.
        """
        job = self._job
        deadline = job.deadline()
        key = self._key("vote", job.comm.rank)
        text = json.dumps([vote.part_bytes, vote.part_digest]).encode()
        job.key_value_store.set(key, text, job.left(deadline))
        self._voted = True
        # Never retried: a counter added to twice would commit without a rank.
        count = job.key_value_store.add(self._key("count"), 1, job.left(deadline))
        shared = [self._key(name) for name in ("count", "outcome", "result")] if job.comm.rank == 0 else []
        job.remember(self._sequence, [key, *shared])
        if count < job.comm.world_size:
            return False
        standing = job.key_value_store.compare_set(self._key("outcome"), b"", _PUBLISHING, job.left(deadline))
        if standing != _PUBLISHING:
            raise Aborted(_abort_error(standing))
        return True

    @property
    def voted(self) -> bool:
        """Whether this rank may have told others that its part is whole."""
        return self._voted

    def votes(self) -> list[Vote]:
        """Return every rank's vote, by rank; for the committer."""
        job = self._job
        keys = [self._key("vote", rank) for rank in range(job.comm.world_size)]
        return [Vote(*json.loads(text)) for text in job.key_value_store.get_many(keys, job.left(job.deadline()))]

    def abort(self, error: BaseException) -> None:
        """End the attempt because of a failure here, unless somebody may be publishing.

        Raises:
            OutcomeUnknown: This rank had voted and the attempt may be committed all the same.
        """
        job = self._job
        text = f"abort:{job.comm.rank}:{error_text(error)}".encode()
        try:
            standing = job.key_value_store.compare_set(self._key("outcome"), b"", text, job.left(job.deadline()))
            if standing == _PUBLISHING:
                raise OutcomeUnknown("another rank is publishing")
            job.key_value_store.set(self._key("result"), standing, job.left(job.deadline()))
        except (CheckpointError, TimeoutError) as failure:
            # Without this rank's vote the count cannot be completed, whatever the board does.
            if self._voted:
                raise OutcomeUnknown(str(failure)) from failure

    def announce_committed(self, manifest_digest: str, unhealthy: Sequence[str] = ()) -> None:
        """Tell who waits that the manifest is published. Never raises: the manifest is the truth.

        Args:
            manifest_digest: Digest of it.
            unhealthy: What was found against the checkpoint, in words.
        """
        self.unhealthy = tuple(unhealthy)
        self._announce(f"committed:{manifest_digest}" + (f":{json.dumps(self.unhealthy)}" if unhealthy else ""))

    def announce_failure(self, error: BaseException, *, certain: bool) -> None:
        """Tell who waits that the committer failed. Never raises.

        Args:
            error: What it failed with.
            certain: Whether it is certain to have left no manifest.
        """
        self._announce(f"{'failed' if certain else 'unknown'}:{error_text(error)}")

    def announce_doubt(self, reason: str) -> None:
        """Tell who waits to ask storage whether the manifest counts. Never raises."""
        self._announce(f"doubt:{reason}")

    def _announce(self, result: str) -> None:
        try:
            self._job.key_value_store.set(self._key("result"), result.encode(), self._job.left(self._job.deadline()))
        except (CheckpointError, TimeoutError):
            return

    def await_result(self) -> str:
        """Wait until the attempt is committed; return the digest of its manifest.

        Raises:
            Aborted: It is over without a checkpoint.
            OutcomeUnknown: Nobody can say from the board alone.
        """
        job = self._job
        deadline = job.deadline()
        try:
            (result,) = job.key_value_store.get_many([self._key("result")], job.left(deadline))
        except TimeoutError:
            result = self._abort_for_silence()
        except CheckpointError as failure:
            raise OutcomeUnknown(str(failure)) from failure
        kind, _, text = result.decode().partition(":")
        if kind == "committed":
            digest, _, unhealthy = text.partition(":")
            self.unhealthy = tuple(json.loads(unhealthy)) if unhealthy else ()
            return digest
        if kind == "failed":
            raise Aborted(error_from(text))
        if kind == "abort":
            raise Aborted(_abort_error(result))
        if kind == "unknown":
            raise OutcomeUnknown(str(error_from(text)), storage_knows=False)
        if kind == "doubt":
            raise OutcomeUnknown(text)
        raise OutcomeUnknown(
            f"the committing rank was publishing and fell silent for {job.settings.commit_timeout_seconds} s"
        )

    def _abort_for_silence(self) -> bytes:
        """At the deadline: abort naming who did not vote, unless the outcome stands; return what stands."""
        job = self._job
        try:
            silent = [
                rank for rank in range(job.comm.world_size) if not job.key_value_store.present(self._key("vote", rank))
            ]
            who = f"ranks {silent[:16]} did not finish their part" if silent else "all ranks voted and none committed"
            error = UnavailableError(
                f"{self._name}: {who} within {job.settings.commit_timeout_seconds} s of this rank; "
                "the attempt is aborted. Look at those ranks"
            )
            text = f"abort:{job.comm.rank}:{error_text(error)}".encode()
            standing = job.key_value_store.compare_set(self._key("outcome"), b"", text, job.left(job.deadline()))
            if standing != _PUBLISHING:
                job.key_value_store.set(self._key("result"), standing, job.left(job.deadline()))
            return standing
        except (CheckpointError, TimeoutError) as failure:
            raise OutcomeUnknown(str(failure)) from failure

    def _key(self, *parts: object) -> str:
        return self._job.key("attempt", self._attempt, *parts)


def _abort_error(outcome: bytes) -> CheckpointError:
    """Return the error another rank aborted with, its rank in the message."""
    _, rank, text = outcome.decode().split(":", 2)
    return error_from(text, f"rank {rank} aborted: ")
