"""The agreement that opens a save: every rank sets a statement, rank 0 decides. No collective runs.

Each rank sets one record: 56 bytes, and the digests of its meshes. Rank 0 reads all records in one call and sets one
verdict; the other ranks wait for it with a deadline. Ranks with equal layouts form a class. Only if layouts or plain
tensors differ do the lowest rank of each class and the ranks that differ publish details. Only if declared parts
overlap or leave gaps do all ranks publish sums of them, and then the parts of a few tensors. Only if there are sibling
meshes (`core/plan/siblings.py`) do their ranks publish samples.

States of a numbered save (its `sequence`), and who moves it from one to the next:

    open      -> described  rank 0, with the verdict `describe`: some ranks must publish details
    open or described -> parts  rank 0, with the verdict `parts`: some declared tensor is wrong, and rank 0 asks which.
                      It asks again until it knows, and then refuses.
    open or described -> compared  rank 0, with the verdict `compare`: ranks on sibling meshes must publish samples
    compared  -> named      rank 0, with the verdict `name`: samples differ, and some ranks must publish them by name
    any       -> agreed     rank 0, with a verdict that carries the context
    any       -> refused    rank 0, or any rank at its deadline: the first compare-and-set of the verdict counts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self

from holdfast.base.geometry.rank_ranges import RankRanges, ranks_in
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.training.coordination import absent_ranks
from holdfast.training.coordination.agreement.decision import Decision
from holdfast.training.coordination.agreement.declared_parts import answer_on_parts
from holdfast.training.coordination.agreement.details import (
    SharedTensors,
    decode_details,
    encode_details,
    encode_difference,
)
from holdfast.training.coordination.agreement.numbered_save import NumberedSave
from holdfast.training.coordination.agreement.records import (
    Agreement,
    DescribedState,
    SaveVerdict,
    Statement,
    absence_error_of,
    as_failure,
    as_unavailable,
    encode_refusal,
)
from holdfast.training.coordination.agreement.sibling_meshes import encode_tensors, publish_samples, siblings_in
from holdfast.training.coordination.commit_vote import CommitVote
from holdfast.training.coordination.job import VERDICT_GRACE_SECONDS, Job, error_from, error_text
from holdfast.training.coordination.message_codec import decode_message
from holdfast.training.coordination.save_context import SaveContext


class SaveAgreement:
    """The agreement on one save, on one rank."""

    def __init__(self, job: Job, step: int, location: bytes) -> None:
        """Take no number yet.

        Args:
            job: The ranks.
            step: The step being saved; -1 for a save by path.
            location: 8-byte digest of the URL of the location; empty if the call is wrong on this rank.
        """
        self._job, self._save = job, NumberedSave(job, step, location)
        self._refused: str | None = None
        self.raises = False
        """Whether the call raises the refusal; decided by the verdict, so the same on every rank."""
        self._failure: UnavailableError | None = None
        self._is_elected: bool | None = None
        """Whether this rank asks which ranks are absent; None before the election."""
        self._absent: Sequence[int] = range(job.comm.world_size)
        """Ranks that may not have called: every rank until this rank has asked."""

    def take_number(self) -> Self:
        """Take the number of this save before anything else; return this agreement. It asks the key-value store."""
        try:
            verdict = self._save.take_number()
        except (UnavailableError, TimeoutError) as error:
            self._save.sequence, self._failure = self._job.sequence, as_unavailable(error)
        else:
            if verdict is not None:
                self._refused, self.raises = verdict.refused, verdict.raises
        return self

    @property
    def sequence(self) -> int:
        """The number of this save in the job, the same on every rank; valid once it is taken."""
        return self._save.sequence

    def leave(self) -> None:
        """Take no number any more, if none is taken: the caller waits no longer."""
        self._save.leave()

    def refuse(self, error: BaseException, *, is_misuse: bool = False) -> None:
        """Publish that this rank cannot save, so that no other rank waits for it. Never raises.

        After an `Exception` this rank also waits for the verdict. It says whether the refusal raises on every rank.

        Args:
            error: Why this rank refuses.
            is_misuse: Whether the call is wrong on this rank. Then every rank raises.
        """
        job = self._job
        if self._refused is not None or self._save.is_left:
            return
        with suppress(CheckpointError, TimeoutError):
            self._publish_refusal(error, is_misuse=is_misuse)
            if job.comm.rank == 0:
                refused = error_from(error_text(error), f"{self._save.name}: rank 0 refused: ")
                self._take(self._save.set_verdict("verdict", self._save.refusal(refused, is_misuse=is_misuse)))
            elif isinstance(error, Exception):
                self._take(self._await_verdict("verdict"))

    def agree(
        self,
        statement: Statement,
        state: DescribedState,
        claim: Callable[[bool], SaveContext | None],
    ) -> Agreement:
        """Set the statement of this rank, wait for the verdict, and return the agreement.

        Args:
            statement: The statement of this rank.
            state: The state, to describe it if rank 0 asks this rank.
            claim: Claims the location and returns the context; called on rank 0 before it agrees. Its argument is
                whether every rank holds the step as it was loaded; then None means that the step is gone.

        If this rank fails here, in whatever way, it refuses the save, so that no other rank waits for it. If a verdict
        is there already, it holds.

        Raises:
            InvalidError: Ranks disagree; the message names the ranks and the differing tensors.
            CheckpointError: Rank 0's claim failed, or another rank refused.
            UnavailableError: A rank did not call in time, or the key-value store failed.
        """
        if self._refused is not None:
            raise error_from(self._refused)
        failure: CheckpointError | None = None
        try:
            if self._failure is not None:
                raise self._failure
            verdict, described = self._state_and_wait(statement, state, claim)
        except Exception as error:  # noqa: BLE001 - the other ranks wait, whatever the error is
            failure = as_failure(error)
            failure.__cause__ = None if failure is error else error
            verdict, described = self._refuse_for(failure)
        self._take(verdict)
        if verdict.refused is not None:
            raise error_from(verdict.refused) from failure
        try:
            self._remember(statement.layout, verdict, described)
            return self._agreement(verdict, state)
        except Exception as error:
            self._abort(error)
            raise

    def require_wanted(self) -> None:
        """Raise the refusal if the other ranks have refused this save before this rank called."""
        if self._refused is not None:
            raise error_from(self._refused)

    def refusal(self) -> CheckpointError | None:
        """Return the refusal that the verdict gave to every rank; None if there is none."""
        return None if self._refused is None else error_from(self._refused)

    def _publish_refusal(self, error: BaseException, *, is_misuse: bool = False) -> None:
        """Set a refusal in place of this rank's statement."""
        job, key = self._job, self._save.key("open", self._job.comm.rank)
        record = encode_refusal(error_text(error), is_misuse=is_misuse)
        job.key_value_store.set(key, record, job.seconds_left(job.agreement_deadline()))
        job.record_keys(self._save.sequence, [key])
        job.sequence = max(job.sequence, self._save.sequence + 1)

    def _refuse_for(self, error: CheckpointError) -> tuple[SaveVerdict, RankRanges | None]:
        """Refuse the save because this rank failed in the agreement; return the verdict that stands.

        Rank 0 may have decided already, and the other ranks go on then: so does this rank.

        Raises:
            CheckpointError: The key-value store fails again: the error that this rank refuses for.
        """
        rank = self._job.comm.rank
        refusal = self._save.refusal(type(error)(f"{self._save.name}: rank {rank} could not agree on it: {error}"))
        try:
            self._publish_refusal(error)
            verdict = self._save.set_verdict("verdict", refusal)
            described = verdict.describe
            while (name := verdict.next_key) is not None:
                verdict = self._save.set_verdict(name, refusal)
        except (CheckpointError, TimeoutError):
            raise error from None
        if verdict.save_id != self._save.id and verdict.refused is None:
            raise error  # A save that ended without this rank, which could not read the number of this one.
        return verdict, described

    def _state_and_wait(
        self,
        statement: Statement,
        state: DescribedState,
        claim: Callable[[bool], SaveContext | None],
    ) -> tuple[SaveVerdict, RankRanges | None]:
        """Set the statement and what this rank is asked for; return the last verdict, and who was asked."""
        save = self._save
        is_deciding, decision = self._job.comm.rank == 0, Decision(save, claim, state)
        save.publish("open", statement.encode())
        verdict = save.set_verdict("verdict", self._decide(decision)) if is_deciding else self._await_verdict("verdict")
        described = verdict.describe
        while (name := verdict.next_key) is not None:
            try:
                self._answer(verdict, state)
            except Exception as error:
                # Rank 0 waits for the answer of this rank.
                save.publish(verdict.answer_key, encode_refusal(error_text(error)))
                raise
            verdict = (
                save.set_verdict(name, _after_all(decision.on_answers(verdict)))
                if is_deciding
                else self._await_verdict(name)
            )
        return verdict, described

    def _answer(self, verdict: SaveVerdict, state: DescribedState) -> None:
        """Publish what rank 0 asks of this rank."""
        save = self._save
        if verdict.describe is not None:
            self._publish_details(verdict, state)
        elif verdict.parts is not None:
            save.publish(verdict.parts.key, answer_on_parts(verdict.parts, state))
        else:
            publish_samples(verdict, state, self._job.comm.rank, save.classes(verdict), save.publish)

    def _take(self, verdict: SaveVerdict) -> None:
        """Take note of the verdict on this save."""
        self._refused, self.raises = verdict.refused, verdict.raises
        self._job.history.has_agreed |= verdict.context is not None
        if verdict.has_all or (verdict.context is not None and self._job.history.failures):
            # The next commit would remove them, but it may be far away.
            with suppress(CheckpointError, TimeoutError):
                self._job.delete_agreement_keys_before(self._save.sequence)

    def _publish_details(self, verdict: SaveVerdict, state: DescribedState) -> None:
        """Publish what rank 0 asked this rank for: all details, or how they differ from those of the lowest rank."""
        rank = self._job.comm.rank
        if rank not in ranks_in(verdict.describe or ()):
            return
        lowest = next(ranks for ranks in self._save.classes(verdict) if rank in ranks)[0]
        if rank == lowest:
            self._save.publish("meshes", encode_tensors(state.tensors_on_meshes()))
            record = encode_details(state.details())
        else:
            try:
                (found,) = self._save.read("details", [lowest])
            except TimeoutError:
                return  # Rank 0 does not get that record either, and refuses.
            record = encode_difference(decode_details(found), state.details())
        self._save.publish("details", record)

    def _remember(self, layout: bytes, verdict: SaveVerdict, described: RankRanges | None) -> None:
        """Record what differs, the same on every rank of a layout, so that the next save does not ask for it again."""
        lowest = {ranks[0] for ranks in self._save.classes(verdict)}
        names = frozenset((*verdict.divergent, *verdict.uneven))
        # Ranks may differ in no name, only in an order. Then, too, the next statements compare name by name.
        if layout in self._job.differing or names or not lowest.issuperset(ranks_in(described or ())):
            self._job.record_differing(layout, names)

    def _agreement(self, verdict: SaveVerdict, state: DescribedState) -> Agreement:
        rank, classes = self._job.comm.rank, self._save.classes(verdict)
        number, class_ranks = next((number, ranks) for number, ranks in enumerate(classes) if rank in ranks)
        shared: dict[str, tuple[int, ...]] = {}
        if number in ranks_in(verdict.sharing):
            key = self._save.key("shared", number)
            (record,) = self._job.key_value_store.get_many([key], self._job.seconds_left(self._job.deadline()))
            shared = SharedTensors.decode(record).holders(classes)
        assert verdict.context is not None, "a verdict to go ahead carries the context"
        siblings, writers = siblings_in(verdict, state, number)
        return Agreement(
            sequence=self._save.sequence,
            attempt=self._job.attempt_id(self._save.sequence, self._save.step),
            class_ranks=class_ranks,
            shared=shared,
            is_leader=rank == class_ranks[0],
            divergent=verdict.divergent,
            drift=verdict.drift,
            context=verdict.context,
            siblings=siblings,
            sibling_writers=writers,
        )

    def _abort(self, error: Exception) -> None:
        """Abort the attempt that the ranks agreed on: they would wait for the vote of this rank."""
        save = self._save
        vote = CommitVote(self._job, save.sequence, self._job.attempt_id(save.sequence, save.step), save.name)
        vote.abort(error_from(error_text(error)))

    def _decide(self, decision: Decision) -> SaveVerdict:
        """Return rank 0's verdict on the statements of all ranks."""
        job = self._job
        keys = self._save.keys_of(range(job.comm.world_size), "open")
        try:
            records = self._await(keys, self._save.deadline)
        except TimeoutError:
            absence = self._absence_error(f"within {job.agreement_seconds:g} s")
            if absence is not None:
                return self._save.refusal(absence)
            # The last statement arrived after the timeout, while this rank looked for absent ones.
            records = job.key_value_store.get_many(keys, job.seconds_left(job.agreement_deadline()))
        return _after_all(decision.on_statements(records))

    def _await_verdict(self, name: str) -> SaveVerdict:
        job, key = self._job, self._save.key(name)
        try:
            (text,) = self._await([key], self._save.deadline + VERDICT_GRACE_SECONDS, job.asking_seconds)
        except TimeoutError:
            limit = f"within {job.agreement_seconds:g} s of rank {job.comm.rank}"
            is_asking = self._is_elected is not False and not job.key_value_store.present(key) and self._elect()
            if not is_asking:
                with suppress(TimeoutError):
                    (text,) = job.key_value_store.get_many([key], job.asking_seconds)
                    return decode_message(text, SaveVerdict)
            # Rank 0 itself may wait for other ranks: then name those.
            error = (self._absence_error(limit) if is_asking else None) or UnavailableError(
                f"{self._save.name}: rank 0 {'called save and ' if is_asking else ''}gave no verdict {limit}; look at "
                "rank 0"
            )
            return self._save.set_verdict(name, self._save.refusal(error))
        return decode_message(text, SaveVerdict)

    def _await(self, keys: Sequence[str], deadline: float, asking_seconds: float = 0.0) -> list[bytes]:
        """Return the values of keys once all are set; log after ten seconds which ranks have not called.

        Only the lowest ranks look after ten seconds: of thousands of ranks, each makes one call until the refusal.

        Args:
            keys: The keys.
            deadline: When this rank gives up.
            asking_seconds: How much later it gives up if another rank decides at its deadline, once it has asked.
        Raises:
            TimeoutError: The deadline has passed.
        """
        job = self._job
        if job.comm.rank >= absent_ranks.ASKING_RANKS:
            deadline += asking_seconds
        elif self._is_elected is None and job.seconds_left(deadline) > absent_ranks.ASK_SECONDS:
            with suppress(TimeoutError):
                return job.key_value_store.get_many(keys, absent_ranks.ASK_SECONDS)
            absent = self._ask_for_absent() if self._elect() else None
            deadline += asking_seconds if absent is None else 0.0
            absent_ranks.log_absent(self._save.name, "save", absent, job.comm)
        return job.key_value_store.get_many(keys, job.seconds_left(deadline))

    def _elect(self) -> bool:
        """Return whether this rank asks for all. If each asked for every rank, the store would answer for hours."""
        if self._is_elected is None:
            key = self._save.key("asking")
            self._is_elected = self._job.is_elected(key)
            self._job.record_keys(self._save.sequence, [key])
        return self._is_elected

    def _ask_for_absent(self) -> Sequence[int]:
        """Return the ranks that have set neither a statement nor a refusal."""
        is_present, keys_of = self._job.key_value_store.present, self._save.keys_of
        self._absent = absent_ranks.ranks_without(self._absent, lambda ranks: is_present(*keys_of(ranks, "open")))
        return self._absent

    def _absence_error(self, limit: str) -> UnavailableError | None:
        """Return the error that names the ranks that did not call; None if every rank has called."""
        return absence_error_of(self._save.name, self._ask_for_absent(), self._job.comm.world_size, limit)


def _after_all(verdict: SaveVerdict) -> SaveVerdict:
    """Return a verdict that rank 0 gives once every rank has stated or refused."""
    return replace(verdict, has_all=verdict.refused is not None)
