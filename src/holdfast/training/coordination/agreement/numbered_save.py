"""A save under its number: its keys in the key-value store, the deadline of its agreement, and its refusal."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from holdfast.base.geometry.rank_ranges import ranks_in
from holdfast.errors import InvalidError, UnavailableError
from holdfast.training.coordination.agreement.records import SaveVerdict, Statement, refusal_in
from holdfast.training.coordination.job import Job, error_from, error_text
from holdfast.training.coordination.message_codec import decode_message, encode_message


class NumberedSave:
    """The keys of one numbered save, on one rank."""

    def __init__(self, job: Job, step: int, location: bytes) -> None:
        """Take no number yet.

        Args:
            job: The ranks.
            step: The step being saved; -1 for a save by path.
            location: 8-byte digest of the URL of the location; empty if the call is wrong.
        """
        self.job, self.step = job, step
        self.id = step, location.hex()
        """Step and digest of the location."""
        self.name = f"save of step {step}" if step >= 0 else "save"
        """Its name, for messages."""
        self.deadline = job.agreement_deadline()
        """When the agreement must end, on the monotonic clock."""
        self.sequence = job.sequence
        """Its number; final once `take_number` has returned."""
        self.is_left = False
        """Whether the caller has given up before the number was taken."""
        self._has_number = False
        # `leave` takes it on the training thread. The other taker is a call of this save, and no handler waits for it.
        self._taking = threading.Lock()

    def leave(self) -> None:
        """Take no number any more: the caller waits no longer, and the next save takes this one."""
        with self._taking:
            self.is_left = not self._has_number

    def take_number(self) -> SaveVerdict | None:
        """Take the number of this save; return the refusal of it if the other ranks have given up already.

        Raises:
            UnavailableError: The key-value store failed, or the caller has left; no number is taken.
            TimeoutError: It gave no answer; no number is taken.
        """
        job = self.job
        while True:
            sequence = job.sequence
            # A verdict that this rank missed is still there: it goes after a later commit, which needs its vote.
            verdict = self._find_verdict(sequence)
            # The other ranks may have opened and closed this number without this rank. Join them at the next.
            is_missed = verdict is not None and not self._is_refusal_of_this(verdict, sequence)
            if self._pass(sequence, has_number=not is_missed) and not is_missed:
                self.sequence = sequence
                return verdict

    def _is_refusal_of_this(self, verdict: SaveVerdict, sequence: int) -> bool:
        """Return whether the other ranks refused this very save before this rank called.

        This rank then takes the refusal and its number. With the next number, its count would stay one ahead of the
        others' count. The exception: rank 0 has already opened that number, because it retries the same save.
        """
        is_own = verdict.refused is not None and self._may_be(verdict.save_id)
        return is_own and not self._is_retried(sequence + 1)

    def _pass(self, sequence: int, *, has_number: bool) -> bool:
        """Advance the job past a number; return False if another save did so first, in a signal handler.

        Args:
            sequence: The number.
            has_number: Whether this save takes it.
        Raises:
            UnavailableError: The caller has left: another save may have the number.
        """
        with self._taking, self.job.numbering:
            if self.is_left:
                raise UnavailableError(f"{self.name}: its call has ended before it had a number")
            if self.job.sequence != sequence:
                return False
            self._has_number = has_number
            self.job.sequence = sequence + 1
            return True

    def _may_be(self, save_id: tuple[int, str]) -> bool:
        """Return whether a verdict is on this save. A rank whose call is wrong does not know its step and location."""
        return save_id == self.id or not (save_id[1] and self.id[1])

    def _find(self, key: str) -> bytes | None:
        """Return the value of a key, None if it is not set; without waiting."""
        store = self.job.key_value_store
        return store.get_many([key], self.job.seconds_left(self.deadline))[0] if store.present(key) else None

    def _find_verdict(self, sequence: int) -> SaveVerdict | None:
        """Return the verdict of a numbered save if there is one, without waiting."""
        record = self._find(self._key_of(sequence, "verdict"))
        return None if record is None else decode_message(record, SaveVerdict)

    def _is_retried(self, sequence: int) -> bool:
        """Return whether rank 0 opened this save again, under the given number."""
        record = self._find(self._key_of(sequence, "open", 0))
        if record is None or refusal_in(record) is not None:
            return False
        statement = Statement.decode(record)
        return (statement.step, statement.location.hex()) == self.id

    def publish(self, name: str, record: bytes) -> None:
        """Set what this rank publishes under a name."""
        job, key = self.job, self.key(name, self.job.comm.rank)
        job.key_value_store.set(key, record, job.seconds_left(self.deadline))
        job.record_keys(self.sequence, [key])

    def read(self, name: str, ranks: Sequence[int]) -> list[bytes]:
        """Return what ranks published under a name, once all of them have.

        Raises:
            CheckpointError: A rank published a refusal instead; the message names the rank.
        """
        keys = self.keys_of(ranks, name)
        records = self.job.key_value_store.get_many(keys, self.job.seconds_left(self.deadline))
        for rank, record in zip(ranks, records, strict=True):
            refusal = refusal_in(record)
            if refusal is not None:
                raise error_from(refusal, f"{self.name}: rank {rank} refused: ")
        return records

    def classes(self, verdict: SaveVerdict) -> list[tuple[int, ...]]:
        """Return the ranks of each class."""
        return [ranks_in(ranges) for ranges in verdict.classes] or [tuple(range(self.job.comm.world_size))]

    def refusal(self, error: Exception, *, is_misuse: bool = False) -> SaveVerdict:
        """Return a refusal. It raises only where no training can be far on, or where the caller asked for it.

        A wrong state raises until the ranks have agreed once. After that it would end a training that has run for days.
        Misuse of the call is a defect of the program and always raises. The rank that sets the verdict decides for all.
        """
        history, failures_max = self.job.history, self.job.settings.failed_saves_max
        raises = is_misuse or (isinstance(error, InvalidError) and not history.has_agreed)
        raises |= failures_max is not None and history.failures + 1 >= failures_max
        return SaveVerdict(self.id, refused=error_text(error), raises=raises)

    def set_verdict(self, name: str, verdict: SaveVerdict) -> SaveVerdict:
        """Set the verdict unless one is set already; return the verdict that is set."""
        job = self.job
        key = self.key(name)
        standing = job.key_value_store.compare_set(
            key, b"", encode_message(verdict), job.seconds_left(job.agreement_deadline())
        )
        if job.comm.rank == 0:
            job.record_keys(self.sequence, [key])
        return decode_message(standing, SaveVerdict)

    def key(self, name: str, *parts: object) -> str:
        """Return a key of this save."""
        return self._key_of(self.sequence, name, *parts)

    def keys_of(self, ranks: Iterable[int], name: str) -> list[str]:
        """Return the keys under which ranks publish something."""
        return self.job.keys_of(ranks, "opening", self.sequence, name)

    def _key_of(self, sequence: int, name: str, *parts: object) -> str:
        return self.job.key("opening", sequence, name, *parts)
