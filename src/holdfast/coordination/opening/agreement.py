"""The agreement that opens a save: every rank sets a statement, rank 0 decides. No collective runs.

Each rank sets one record: 48 bytes, and the digests of its meshes. Rank 0 reads all records in one call and sets one
verdict; the other ranks wait for it with a deadline. Ranks with equal layouts form a class. Only if layouts or plain
tensors differ do the lowest rank of each class and the ranks that differ publish details. Only if there are sibling
meshes (`plan/siblings.py`) do their ranks publish samples.

States of a numbered save (its `sequence`), and who moves it from one to the next:

    open      -> described  rank 0, with the verdict `describe`: some ranks must publish details
    open or described -> compared  rank 0, with the verdict `compare`: ranks on sibling meshes must publish samples
    compared  -> named      rank 0, with the verdict `name`: samples differ, and some ranks must publish them by name
    any       -> agreed     rank 0, with a verdict that carries the context; `named` is always refused
    any       -> refused    rank 0, or any rank at its deadline: the first compare-and-set of the verdict counts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from holdfast.coordination.job import Job, error_from, error_text
from holdfast.coordination.message_codec import decode_message, encode_message
from holdfast.coordination.opening.details import (
    SharedTensors,
    decode_details,
    details_by_rank,
    encode_details,
    encode_difference,
    fitting_names,
    mismatches,
    shared_tensors,
    silent_ranks,
)
from holdfast.coordination.opening.records import (
    Agreement,
    DescribedState,
    Details,
    SaveVerdict,
    Statement,
    absence_error_of,
    as_unavailable,
    encode_refusal,
    ranks_listed,
    refusal_in,
    skew_error_of,
)
from holdfast.coordination.opening.sibling_meshes import MeshJudgement, encode_tensors, publish_samples
from holdfast.coordination.save_context import SaveContext
from holdfast.errors import CheckpointError, InvalidError, UnavailableError
from holdfast.geometry.rank_ranges import RankRanges, rank_ranges, ranks_in
from holdfast.plan.rank_differences import Differences, refusal_of
from holdfast.plan.unmatched_patterns import judge_unmatched

_GRACE_SECONDS = 2.0
"""Extra seconds that the other ranks wait: rank 0 sets its verdict at its own deadline."""


class SaveAgreement:
    """The agreement on one save, on one rank."""

    def __init__(self, job: Job, step: int, location: bytes) -> None:
        """Take the number of this save.

        Args:
            job: The ranks.
            step: The step being saved; -1 for a save by path.
            location: 8-byte digest of the URL of the location.
        """
        self._job, self._step = job, step
        self._save_id = step, location.hex()
        self._deadline = job.agreement_deadline()
        self._refused: str | None = None
        self._meshes: MeshJudgement
        """What rank 0 knows of meshes; set by `_decide`."""
        self.raises = False
        """Whether the call raises the refusal; decided by the verdict, so the same on every rank."""
        self._failure: UnavailableError | None = None
        try:
            self._take_number()
        except (UnavailableError, TimeoutError) as error:
            self._sequence, self._failure = job.sequence, as_unavailable(error)

    def _take_number(self) -> None:
        """Take the number of this save, and the refusal of it if the other ranks have given up already."""
        job = self._job
        # Read the next number before any verdict. In the other order, a verdict set in between would raise the number
        # and move this rank past a save that it belongs to.
        latest = int(self._find(job.key("opening", "next")) or 0)  # The number after the last save that rank 0 closed.
        verdict = self._find_verdict(job.sequence)
        if verdict is None and latest > job.sequence:
            job.sequence = latest
            verdict = self._find_verdict(latest)
        while verdict is not None:
            is_own = verdict.refused is not None and verdict.save_id == self._save_id
            if is_own and not self._is_retried(job.sequence + 1):
                # The other ranks refused this very save before this rank called. This rank takes the refusal and its
                # number. With the next number, its count would stay one ahead of the others' count. The exception:
                # rank 0 has already opened that number, because it retries the same save.
                self._refused, self.raises = verdict.refused, verdict.raises
                break
            # The other ranks opened and closed this number without this rank. Join them at the next.
            job.sequence = max(job.sequence + 1, latest)
            verdict = self._find_verdict(job.sequence)
        self._sequence = job.sequence
        job.sequence += 1

    def _find(self, key: str) -> bytes | None:
        """Return the value of a key, None if it is not set; without waiting."""
        store = self._job.key_value_store
        return store.get_many([key], self._job.seconds_left(self._deadline))[0] if store.present(key) else None

    def _find_verdict(self, sequence: int) -> SaveVerdict | None:
        """Return the verdict of a numbered save if there is one, without waiting."""
        record = self._find(self._key("verdict", sequence))
        return None if record is None else decode_message(record, SaveVerdict)

    def _is_retried(self, sequence: int) -> bool:
        """Return whether rank 0 opened this save again, under the given number."""
        record = self._find(self._key("open", sequence, 0))
        if record is None or refusal_in(record) is not None:
            return False
        statement = Statement.decode(record)
        return (statement.step, statement.location.hex()) == self._save_id

    def refuse(self, error: BaseException) -> None:
        """Publish that this rank cannot save, so that no other rank waits for it. Never raises.

        After an `Exception` this rank also waits for the verdict. It says whether the refusal raises on every rank.
        """
        job = self._job
        if self._refused is not None:
            return
        with suppress(CheckpointError, TimeoutError):
            self._publish_refusal(error)
            if job.comm.rank == 0:
                text = error_text(error)
                self._take(
                    self._set_verdict("verdict", self._refusal(error_from(text, f"{self._name}: rank 0 refused: ")))
                )
            elif isinstance(error, Exception):
                self._take(self._await_verdict("verdict"))

    def agree(
        self,
        statement: Statement,
        state: DescribedState,
        claim: Callable[[], SaveContext],
    ) -> Agreement:
        """Set the statement of this rank, wait for the verdict, and return the agreement.

        Args:
            statement: The statement of this rank.
            state: The state, to describe it if rank 0 asks this rank.
            claim: Claims the location and returns the context; called on rank 0 before it agrees.

        If the key-value store fails here, this rank refuses the save, so that no other rank waits for it. If a verdict
        is there already, it holds.

        Raises:
            InvalidError: Ranks disagree; the message names the ranks and the differing tensors.
            CheckpointError: Rank 0's claim failed, or another rank refused.
            UnavailableError: A rank did not call in time, or the key-value store failed.
        """
        if self._refused is not None:
            raise error_from(self._refused)
        try:
            if self._failure is not None:
                raise self._failure
            verdict, described = self._state_and_wait(statement, state, claim)
        except (UnavailableError, TimeoutError) as error:
            verdict, described = self._refuse_for(as_unavailable(error))
        self._take(verdict)
        if verdict.refused is not None:
            raise error_from(verdict.refused)
        self._remember(statement.layout, verdict, described)
        return self._agreement(verdict, state)

    def require_wanted(self) -> None:
        """Raise the refusal if the other ranks have refused this save before this rank called."""
        if self._refused is not None:
            raise error_from(self._refused)

    def _publish_refusal(self, error: BaseException) -> None:
        """Set a refusal in place of this rank's statement."""
        job, key = self._job, self._key("open", self._sequence, self._job.comm.rank)
        job.key_value_store.set(key, encode_refusal(error_text(error)), job.seconds_left(job.agreement_deadline()))
        job.record_keys(self._sequence, [key])
        job.sequence = max(job.sequence, self._sequence + 1)

    def _refuse_for(self, error: UnavailableError) -> tuple[SaveVerdict, RankRanges | None]:
        """Refuse the save because the key-value store failed on this rank; return the verdict that stands.

        Rank 0 may have decided already, and the other ranks go on then: so does this rank.

        Raises:
            UnavailableError: The key-value store fails again.
        """
        rank = self._job.comm.rank
        refusal = self._refusal(UnavailableError(f"{self._name}: rank {rank} could not agree on it: {error}"))
        try:
            self._publish_refusal(error)
            verdict = self._set_verdict("verdict", refusal)
            described = verdict.describe
            while (name := verdict.next_key) is not None:
                verdict = self._set_verdict(name, refusal)
        except (CheckpointError, TimeoutError):
            raise error from None
        if verdict.save_id != self._save_id and verdict.refused is None:
            raise error  # A save that ended without this rank, which could not read the number of this one.
        return verdict, described

    def _state_and_wait(
        self,
        statement: Statement,
        state: DescribedState,
        claim: Callable[[], SaveContext],
    ) -> tuple[SaveVerdict, RankRanges | None]:
        """Set the statement and what this rank is asked for; return the last verdict, and who was asked."""
        job = self._job
        rank = job.comm.rank
        self._publish("open", statement.encode())
        verdict = self._set_verdict("verdict", self._decide(claim)) if rank == 0 else self._await_verdict("verdict")
        described = verdict.describe
        while (name := verdict.next_key) is not None:
            if verdict.describe is not None:
                self._publish_details(verdict, state)
            else:
                publish_samples(verdict, state, rank, self._classes(verdict), self._publish)
            if rank == 0:
                verdict = self._set_verdict(name, self._decide_on_answers(verdict, claim))
            else:
                verdict = self._await_verdict(name)
        return verdict, described

    def _take(self, verdict: SaveVerdict) -> None:
        """Take note of the verdict on this save."""
        self.raises = verdict.raises
        self._job.history.has_agreed |= verdict.context is not None

    def _publish(self, name: str, record: bytes) -> None:
        job, key = self._job, self._key(name, self._sequence, self._job.comm.rank)
        job.key_value_store.set(key, record, job.seconds_left(self._deadline))
        job.record_keys(self._sequence, [key])

    def _publish_details(self, verdict: SaveVerdict, state: DescribedState) -> None:
        """Publish what rank 0 asked this rank for: all details, or how they differ from those of the lowest rank."""
        rank = self._job.comm.rank
        if rank not in ranks_in(verdict.describe or ()):
            return
        lowest = next(ranks for ranks in self._classes(verdict) if rank in ranks)[0]
        if rank == lowest:
            self._publish("meshes", encode_tensors(state.tensors_on_meshes()))
            record = encode_details(state.details())
        else:
            try:
                (found,) = self._read("details", [lowest])
            except TimeoutError:
                return  # Rank 0 does not get that record either, and refuses.
            record = encode_difference(decode_details(found), state.details())
        self._publish("details", record)

    def _remember(self, layout: bytes, verdict: SaveVerdict, described: RankRanges | None) -> None:
        """Record what differs, the same on every rank of a layout, so that the next save does not ask for it again."""
        lowest = {ranks[0] for ranks in self._classes(verdict)}
        names = frozenset((*verdict.divergent, *verdict.uneven))
        # Ranks may differ in no name, only in an order. Then, too, the next statements compare name by name.
        if layout in self._job.differing or names or not lowest.issuperset(ranks_in(described or ())):
            self._job.record_differing(layout, names)

    def _classes(self, verdict: SaveVerdict) -> list[tuple[int, ...]]:
        """Return the ranks of each class."""
        return [ranks_in(ranges) for ranges in verdict.classes] or [tuple(range(self._job.comm.world_size))]

    def _agreement(self, verdict: SaveVerdict, state: DescribedState) -> Agreement:
        rank, classes, siblings = self._job.comm.rank, self._classes(verdict), verdict.siblings
        number, class_ranks = next((number, ranks) for number, ranks in enumerate(classes) if rank in ranks)
        shared: dict[str, tuple[int, ...]] = {}
        if number in ranks_in(verdict.sharing):
            key = self._key("shared", self._sequence, number)
            (record,) = self._job.key_value_store.get_many([key], self._job.seconds_left(self._job.deadline()))
            shared = SharedTensors.decode(record).holders(classes)
        assert verdict.context is not None, "a verdict to go ahead carries the context"
        return Agreement(
            sequence=self._sequence,
            attempt=self._job.attempt_id(self._sequence, self._step),
            class_ranks=class_ranks,
            shared=shared,
            is_leader=rank == class_ranks[0],
            divergent=verdict.divergent,
            drift=verdict.drift,
            context=verdict.context,
            siblings={} if siblings is None else state.sibling_holders(siblings, number),
        )

    def _decide(self, claim: Callable[[], SaveContext]) -> SaveVerdict:
        """Return rank 0's verdict on the statements of all ranks."""
        job = self._job
        keys = self._open_keys()
        try:
            records = job.key_value_store.get_many(keys, job.seconds_left(self._deadline))
        except TimeoutError:
            absence = self._absence_error(f"within {job.agreement_seconds:g} s")
            if absence is not None:
                return self._refusal(absence)
            # The last statement arrived after the timeout, while this rank looked for absent ones.
            records = job.key_value_store.get_many(keys, job.seconds_left(job.agreement_deadline()))
        for rank, record in enumerate(records):
            refusal = refusal_in(record)
            if refusal is not None:
                error = error_from(refusal)
                return self._refusal(type(error)(f"{self._name}: rank {rank} refused: {error}"))
        statements = [Statement.decode(record) for record in records]
        failures, failures_max = job.history.failures, job.settings.failed_saves_max
        if failures_max is not None and failures >= failures_max:
            return self._refusal(
                UnavailableError(
                    f"{self._name}: the last saves failed, {failures} in a row; expected fewer than {failures_max} "
                    "(settings.failed_saves_max). Nothing was saved. The log has their errors: look there first"
                )
            )
        skew_error = skew_error_of(self._name, statements)
        if skew_error is not None:
            return self._refusal(skew_error)
        unmatched_error, warnings = judge_unmatched(self._name, [statement.unmatched for statement in statements])
        if unmatched_error is not None:
            return self._refusal(unmatched_error)
        for text in warnings:
            job.warn_once(self._name, text)
        classes: dict[bytes, list[int]] = {}
        for rank, statement in enumerate(statements):
            classes.setdefault(statement.layout, []).append(rank)
        groups = list(classes.values())
        differing = [
            rank
            for members in groups
            for rank in members
            if (statements[rank].agreeing, statements[rank].other)
            != (statements[members[0]].agreeing, statements[members[0]].other)
        ]
        kept = self._still_differing(statements, groups)
        self._meshes = MeshJudgement(self._name, groups, statements)
        if len(groups) == 1 and not differing and self._meshes.are_matched_without_names:
            return self._go_ahead(claim, SaveVerdict(self._save_id, divergent=kept))
        describe = sorted({members[0] for members in groups} | set(differing))
        several = [rank_ranges(members) for members in groups] if len(groups) > 1 else []
        return SaveVerdict(self._save_id, describe=rank_ranges(describe), classes=several, divergent=kept)

    def _still_differing(self, statements: Sequence[Statement], classes: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Return the names known to differ; none if their values are equal again within each class."""
        names = self._job.differing.get(statements[0].layout, frozenset())
        is_equal = all(len({statements[rank].known for rank in members}) == 1 for members in classes)
        return () if is_equal else tuple(sorted(names))

    def _decide_on_answers(self, verdict: SaveVerdict, claim: Callable[[], SaveContext]) -> SaveVerdict:
        """Return rank 0's next verdict, once the ranks that it asked have answered."""
        asked = self._meshes.sibling_ranks if verdict.compare else ranks_in(verdict.describe or verdict.name or ())
        try:
            if verdict.describe is not None:
                return self._decide_on_details(verdict, asked, claim)
            different = self._meshes.judge_samples(verdict, asked, self._read)
            if different:
                return replace(verdict, compare=False, name=rank_ranges(different))
        except TimeoutError:
            missing = f"{ranks_listed(asked)} did not publish {'samples' if verdict.describe is None else 'details'}"
            limit = f"{self._job.agreement_seconds:g} s"
            text = f"{self._name}: some of ranks {missing} within {limit}; look at those ranks"
            return self._refusal(UnavailableError(text))
        except CheckpointError as error:
            return self._refusal(error)
        return self._go_ahead(claim, replace(verdict, compare=False))

    def _decide_on_details(
        self, verdict: SaveVerdict, asked: Sequence[int], claim: Callable[[], SaveContext]
    ) -> SaveVerdict:
        classes = self._classes(verdict)
        details, uneven = details_by_rank(asked, classes, partial(self._read, "details"))
        plain = [details[ranks[0]].plain for ranks in classes]
        self._meshes.judge_names(self._read("meshes", [ranks[0] for ranks in classes]), plain)
        found = Differences.between(
            {rank: each.agreeing for rank, each in details.items()},
            {rank: each.other for rank, each in details.items()},
        )
        # A save by path has no save before it that would have warned.
        job = self._job
        is_first = self._step < 0 or not job.history.has_agreed
        lossy = {name for each in details.values() for name in each.lossy}
        refused = found.refused(lossy, is_first=is_first) if job.settings.replicas == "refuse" else []
        refused += mismatches(details)
        if refused:
            return self._refusal(refusal_of(self._name, refused))
        new = [name for name in found.others if job.is_first_occurrence(f"{name} differs between ranks")]
        for text in found.warnings(new):
            job.warn_once(self._name, text)
        if found.replicas and job.is_first_occurrence("replicas differ"):
            job.warn_once(self._name, found.drift_warning())
        drift = found.drift(silent_ranks(asked, classes))
        agreed = replace(
            verdict,
            describe=None,
            divergent=tuple(sorted({*found.others, *verdict.divergent})),
            drift=drift,
            uneven=fitting_names(uneven, job.comm.world_size),
            sharing=self._share(classes, details),
        )
        return self._go_ahead(claim, agreed)

    def _share(self, classes: Sequence[tuple[int, ...]], details: Mapping[int, Details]) -> RankRanges:
        """Publish for each class which of its plain tensors other classes hold; return the numbers of those classes."""
        job = self._job
        shared = shared_tensors([details[ranks[0]].plain for ranks in classes]) if len(classes) > 1 else {}
        for number, tensors in shared.items():
            key = self._key("shared", self._sequence, number)
            job.key_value_store.set(key, tensors.encode(), job.seconds_left(job.deadline()))
            job.record_keys(self._sequence, [key])
        return rank_ranges(sorted(shared))

    def _go_ahead(self, claim: Callable[[], SaveContext], verdict: SaveVerdict) -> SaveVerdict:
        """Return the verdict with the context, or a refusal if the location cannot be claimed.

        If there are sibling meshes whose samples were not compared yet, return the verdict that asks for them.
        """
        if verdict.siblings is None and (siblings := self._meshes.siblings) is not None:
            return replace(verdict, compare=True, siblings=siblings)
        try:
            return replace(verdict, context=claim())
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a verdict, whatever the error is
            return self._refusal(error)

    def _refusal(self, error: Exception) -> SaveVerdict:
        """Return a refusal. It raises only where no training can be far on, or where the caller asked for it.

        A wrong state or call raises until the ranks have agreed once. After that it would end a training that has run
        for days. The rank that sets the verdict decides for all ranks.
        """
        history, failures_max = self._job.history, self._job.settings.failed_saves_max
        raises = isinstance(error, InvalidError) and not history.has_agreed
        raises |= failures_max is not None and history.failures + 1 >= failures_max
        return SaveVerdict(self._save_id, refused=error_text(error), raises=raises)

    def _read(self, name: str, ranks: Sequence[int]) -> list[bytes]:
        """Return what ranks published under a name."""
        keys = [self._key(name, self._sequence, rank) for rank in ranks]
        return self._job.key_value_store.get_many(keys, self._job.seconds_left(self._deadline))

    def _set_verdict(self, name: str, verdict: SaveVerdict) -> SaveVerdict:
        """Set the verdict unless one is set already; return the verdict that is set."""
        job = self._job
        key = self._key(name, self._sequence)
        standing = job.key_value_store.compare_set(
            key, b"", encode_message(verdict), job.seconds_left(job.agreement_deadline())
        )
        if job.comm.rank == 0:
            # Rank 0 deletes old verdicts later. A rank that missed them learns the next number from this key.
            job.key_value_store.set(
                job.key("opening", "next"),
                str(self._sequence + 1).encode(),
                job.seconds_left(job.agreement_deadline()),
            )
            job.record_keys(self._sequence, [key])
        return decode_message(standing, SaveVerdict)

    def _await_verdict(self, name: str) -> SaveVerdict:
        job = self._job
        key = self._key(name, self._sequence)
        try:
            (text,) = job.key_value_store.get_many([key], job.seconds_left(self._deadline) + _GRACE_SECONDS)
        except TimeoutError:
            limit = f"within {job.agreement_seconds:g} s of rank {job.comm.rank}"
            # Ranks come here together. If each asked for every rank, the store would answer for hours.
            is_asking = not job.key_value_store.present(key) and job.is_elected(self._key("asking", self._sequence))
            if not is_asking:
                with suppress(TimeoutError):
                    (text,) = job.key_value_store.get_many([key], job.asking_seconds)
                    return decode_message(text, SaveVerdict)
            job.record_keys(self._sequence, [self._key("asking", self._sequence)])
            # Rank 0 itself may wait for other ranks: then name those.
            error = (self._absence_error(limit) if is_asking else None) or UnavailableError(
                f"{self._name}: rank 0 called save and gave no verdict {limit}; look at rank 0"
            )
            return self._set_verdict(name, self._refusal(error))
        return decode_message(text, SaveVerdict)

    def _absence_error(self, limit: str) -> UnavailableError | None:
        """Return the error that names the ranks without a statement or refusal; None if every rank has set one."""
        keys = self._open_keys()
        absent = [rank for rank, key in enumerate(keys) if not self._job.key_value_store.present(key)]
        return absence_error_of(self._name, absent, len(keys), limit)

    def _open_keys(self) -> list[str]:
        return [self._key("open", self._sequence, rank) for rank in range(self._job.comm.world_size)]

    @property
    def _name(self) -> str:
        return f"save of step {self._step}" if self._step >= 0 else "save"

    def _key(self, name: str, *parts: object) -> str:
        return self._job.key("opening", *parts[:1], name, *parts[1:])
