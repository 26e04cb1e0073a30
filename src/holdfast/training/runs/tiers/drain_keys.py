"""What rank 0 tells the other ranks of the drain, through the key-value store: one key for each step."""

from __future__ import annotations

from contextlib import suppress

from holdfast.base.types.removal import StepAndDigest
from holdfast.errors import CheckpointError
from holdfast.training.coordination.job import Job

COPYING, DRAINED = "copying", "drained"
"""Texts of a step; any other text is the reason why the root does not get the step."""

TOLD_MAX = 1024
"""Steps that are remembered after their end, for ranks that ask late."""

_END_SECONDS = 5.0


class DrainKeys:
    """The keys of one drain, on one rank."""

    def __init__(self, job: Job) -> None:
        """Set no key yet."""
        self._job, self._told = job, list[str]()

    def tell(self, name: StepAndDigest, text: str) -> None:
        """Tell the other ranks of a step. On rank 0; does nothing on others."""
        job, key = self._job, self._job.key("drain", name[1])
        if job.comm.rank != 0 or job.comm.world_size == 1:
            return
        with suppress(CheckpointError, TimeoutError):
            job.key_value_store.set(key, text.encode(), job.seconds_left(job.deadline()))
            if key not in self._told:
                self._told.append(key)
            if len(self._told) > TOLD_MAX:
                job.key_value_store.delete([self._told.pop(0)])

    def told_of(self, name: StepAndDigest) -> str | None:
        """Return what rank 0 tells of a step; None if nothing yet.

        Raises:
            UnavailableError, TimeoutError: Rank 0 may have ended, and the key-value store with that process.
        """
        job, key = self._job, self._job.key("drain", name[1])
        if not job.key_value_store.present(key):
            return None
        (text,) = job.key_value_store.get_many([key], job.seconds_left(job.deadline()))
        return text.decode()

    def end_last(self) -> None:
        """Let rank 0, whose process may have the key-value store, end after the ranks that ask."""
        job = self._job
        keys = job.keys_of(range(job.comm.world_size), "drain", "closed")
        with suppress(CheckpointError, TimeoutError):
            if job.comm.rank != 0:
                job.key_value_store.set(keys[job.comm.rank], b"1", _END_SECONDS)
            elif keys[1:]:
                job.key_value_store.wait(keys[1:], _END_SECONDS)
