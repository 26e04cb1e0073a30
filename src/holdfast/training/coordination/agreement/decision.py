"""What rank 0 decides on a save: it judges statements and answers of all ranks, and returns one verdict at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from holdfast.base.geometry.rank_ranges import RankRanges, rank_ranges, ranks_in
from holdfast.base.name_patterns import judge_unmatched
from holdfast.core.plan.rank_differences import Differences, refusal_of
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.training.coordination.agreement.declared_parts import PartsJudgement, declared_by_all
from holdfast.training.coordination.agreement.details import (
    details_by_rank,
    fitting_names,
    mismatches,
    shared_tensors,
    silent_ranks,
)
from holdfast.training.coordination.agreement.numbered_save import NumberedSave
from holdfast.training.coordination.agreement.records import (
    DescribedState,
    Details,
    PartsQuestion,
    SaveVerdict,
    Stated,
    Statement,
    compression_error_of,
    is_misuse,
    overwrite_error_of,
    ranks_listed,
    ranks_of,
    ranks_that_differ,
    refusal_in,
    skew_error_of,
)
from holdfast.training.coordination.agreement.sibling_meshes import MeshJudgement
from holdfast.training.coordination.job import error_from
from holdfast.training.coordination.save_context import SaveContext


class Decision:
    """Rank 0's decision on one save."""

    def __init__(
        self,
        save: NumberedSave,
        claim: Callable[[bool], SaveContext | None],
        state: DescribedState,
    ) -> None:
        """Decide nothing yet.

        Args:
            save: The save.
            claim: As in `SaveAgreement.agree`.
            state: The state of rank 0.
        """
        self._save, self._job, self._claim, self._state = save, save.job, claim, state
        self._meshes: MeshJudgement
        """What rank 0 knows of meshes; set by `on_statements`."""
        self._parts: PartsJudgement
        """What rank 0 knows of declared parts; set by `on_statements`."""

    def on_statements(self, records: Sequence[bytes]) -> SaveVerdict:
        """Return the verdict on the statements and refusals of all ranks.

        Args:
            records: By rank, what it set.
        """
        job = self._job
        ranks_by_record: dict[bytes, list[int]] = {}
        for rank, record in enumerate(records):
            ranks_by_record.setdefault(record, []).append(rank)
        # Misuse first: it raises on every rank, whatever else is wrong.
        refusals = [
            (not is_misuse(record), ranks[0], text)
            for record, ranks in ranks_by_record.items()
            if (text := refusal_in(record)) is not None
        ]
        if refusals:
            is_other, rank, text = min(refusals)
            error = error_from(text, f"{self._save.name}: rank {rank} refused: ")
            return self._save.refusal(error, is_misuse=not is_other)
        stated = [Stated(Statement.decode(record), ranks) for record, ranks in ranks_by_record.items()]
        failures, failures_max = job.history.failures, job.settings.failed_saves_max
        if failures_max is not None and failures >= failures_max:
            text = (
                f"{self._save.name}: the last saves failed, {failures} in a row; expected fewer than {failures_max} "
                "(settings.failed_saves_max). Nothing was saved. The log has their errors: look there first"
            )
            return self._save.refusal(UnavailableError(text))
        skew_error = skew_error_of(self._save.name, stated) or compression_error_of(self._save.name, stated)
        if skew_error is not None:
            return self._save.refusal(skew_error)
        overwrite_error = overwrite_error_of(self._save.name, stated)
        if overwrite_error is not None:
            return self._save.refusal(overwrite_error, is_misuse=True)
        unmatched_error, warnings = judge_unmatched(self._save.name, [each.statement.unmatched for each in stated])
        if unmatched_error is not None:
            return self._save.refusal(unmatched_error)
        for text in warnings:
            job.warn_once(self._save.name, text)
        if (held := self._held_by_all(stated)) is not None:
            return held
        by_layout: dict[bytes, list[Stated]] = {}
        for each in stated:
            by_layout.setdefault(each.statement.layout, []).append(each)
        classes = list(by_layout.values())
        groups = [ranks_of(members) for members in classes]
        differing = ranks_that_differ(classes)
        kept = self._still_differing(classes)
        self._meshes = MeshJudgement(self._save.name, classes)
        self._parts = PartsJudgement(self._save.name, stated)
        if len(groups) == 1 and not differing and self._meshes.are_matched_without_names:
            verdict = SaveVerdict(self._save.id, divergent=kept)
            # All ranks declare the same tensors, so their names are needed only for a refusal.
            if self._parts.held == self._state.whole_sum():
                return self._go_ahead(verdict)
            return self._on_parts(verdict, self._parts.question(self._state.declared_tensors(), ()))
        describe = sorted({members[0] for members in groups} | set(differing))
        several = [rank_ranges(members) for members in groups] if len(groups) > 1 else []
        return SaveVerdict(self._save.id, describe=rank_ranges(describe), classes=several, divergent=kept)

    def _still_differing(self, classes: Sequence[Sequence[Stated]]) -> tuple[str, ...]:
        """Return the names known to differ; none if their values are equal again within each class."""
        names = self._job.differing.get(classes[0][0].statement.layout, frozenset())
        is_equal = all(len({each.statement.known for each in members}) == 1 for members in classes)
        return () if is_equal else tuple(sorted(names))

    def on_answers(self, verdict: SaveVerdict) -> SaveVerdict:
        """Return rank 0's next verdict, once the ranks that it asked have answered."""
        asked = self._meshes.sibling_ranks if verdict.compare else ranks_in(verdict.describe or verdict.name or ())
        try:
            if verdict.describe is not None:
                return self._on_details(verdict, asked)
            if verdict.parts is not None:
                asked = tuple(range(self._job.comm.world_size))
                question = self._parts.next_question(verdict.parts, self._save.read(verdict.parts.key, asked))
                return self._on_parts(verdict, question)
            if verdict.name is not None:
                verdict = self._meshes.judge_difference(verdict, asked, self._save.read, self._job)
            elif different := self._meshes.differing_ranks(asked, self._save.read):
                return replace(verdict, compare=False, name=rank_ranges(different))
        except TimeoutError:
            what = "details" if verdict.describe else "declared parts" if verdict.parts else "samples"
            missing = f"{ranks_listed(asked)} did not publish {what}"
            limit = f"{self._job.agreement_seconds:g} s"
            text = f"{self._save.name}: some of ranks {missing} within {limit}; look at those ranks"
            return self._save.refusal(UnavailableError(text))
        except CheckpointError as error:
            return self._save.refusal(error)
        return self._go_ahead(replace(verdict, compare=False))

    def _on_details(self, verdict: SaveVerdict, asked: Sequence[int]) -> SaveVerdict:
        classes = self._save.classes(verdict)
        details, uneven = details_by_rank(asked, classes, partial(self._save.read, "details"))
        plain = [details[ranks[0]].plain for ranks in classes]
        parts = [details[ranks[0]].declared.keys() for ranks in classes]
        on_meshes = self._meshes.judge_names(self._save.read("meshes", [ranks[0] for ranks in classes]), plain, parts)
        found = Differences.between(
            {rank: each.agreeing for rank, each in details.items()},
            {rank: each.other for rank, each in details.items()},
        )
        # A save by path has no save before it that would have warned.
        job = self._job
        is_first = self._save.step < 0 or not job.history.has_agreed
        lossy = {name for each in details.values() for name in each.lossy}
        refused = found.refused(lossy, is_first=is_first) if job.settings.replicas == "refuse" else []
        refused += mismatches(details)
        if refused:
            return self._save.refusal(refusal_of(self._save.name, refused))
        declared = declared_by_all(self._save.name, {ranks[0]: details[ranks[0]].declared for ranks in classes})
        new = [name for name in found.others if job.is_first_occurrence(f"{name} differs between ranks")]
        silent = silent_ranks(asked, classes)
        for text in found.warnings(new, silent):
            job.warn_once(self._save.name, text)
        drift = found.drift(silent)
        if drift.health is not None and job.is_first_occurrence("replicas differ"):
            job.warn_once(self._save.name, drift.warning("those of the lowest rank"))
        agreed = replace(
            verdict,
            describe=None,
            divergent=tuple(sorted({*found.others, *verdict.divergent})),
            drift=drift.health,
            uneven=fitting_names(uneven, job.comm.world_size),
            sharing=self._share(classes, details),
        )
        return self._on_parts(agreed, self._parts.question(declared, {*on_meshes, *chain(*plain)}))

    def _on_parts(self, verdict: SaveVerdict, question: PartsQuestion | None) -> SaveVerdict:
        """Return the verdict that asks about declared parts, or goes ahead if there is nothing to ask."""
        replicas, known = self._parts.replicas, self._job.part_sums
        if question is not None and question.by_name and (layout := self._parts.layout) in known.replicas:
            replicas = known.replicas[layout]
        elif question is not None:
            return replace(verdict, parts=question)
        elif replicas.division_of:
            known.replicas = {self._parts.layout: replicas}
        self._meshes.add(replicas)
        return self._go_ahead(replace(verdict, parts=None))

    def _share(self, classes: Sequence[tuple[int, ...]], details: Mapping[int, Details]) -> RankRanges:
        """Publish for each class which of its plain tensors other classes hold; return the numbers of those classes."""
        job = self._job
        shared = shared_tensors([details[ranks[0]].plain for ranks in classes]) if len(classes) > 1 else {}
        for number, tensors in shared.items():
            key = self._save.key("shared", number)
            job.key_value_store.set(key, tensors.encode(), job.seconds_left(job.deadline()))
            job.record_keys(self._save.sequence, [key])
        return rank_ranges(sorted(shared))

    def _go_ahead(self, verdict: SaveVerdict) -> SaveVerdict:
        """Return the verdict with the context, or a refusal if the location cannot be claimed.

        If there are sibling meshes whose samples were not compared yet, return the verdict that asks for them.
        """
        if verdict.siblings is None and (siblings := self._meshes.siblings) is not None:
            return replace(verdict, compare=True, siblings=siblings)
        claimed = self._claimed(verdict, is_held=False)
        assert claimed is not None, "only a step that every rank holds may be gone"
        return claimed

    def _held_by_all(self, stated: Sequence[Stated]) -> SaveVerdict | None:
        """Return the verdict that nothing is written, if every rank holds the step as it was loaded."""
        is_held = all(each.statement.is_loaded for each in stated)
        return self._claimed(SaveVerdict(self._save.id), is_held=True) if is_held else None

    def _claimed(self, verdict: SaveVerdict, *, is_held: bool) -> SaveVerdict | None:
        """Return the verdict with the context, a refusal if the claim fails, or None if the held step is gone."""
        try:
            context = self._claim(is_held)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a verdict, whatever the error is
            return self._save.refusal(error)
        return None if context is None else replace(verdict, context=context)
