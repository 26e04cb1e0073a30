"""Rank 0's judgement of declared parts in the agreement on a save: they must cover every tensor exactly once.

The statements say whether all of them do, in 8 bytes a rank. If not, rank 0 asks for sums by interval of names, until
it knows which tensors are wrong, and then for the parts of three of those. So no answer grows with the tensors.

A tensor that carries its coordinates states no replicas: ranks with equal sums are replicas. If the replicas of one
tensor are not those of another, rank 0 asks for the sum of each, about 10 bytes a tensor. It asks once for each layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from holdfast.base.geometry.rank_ranges import RankRanges, rank_ranges
from holdfast.core.plan.declared_parts import (
    NO_PARTS,
    DeclaredParts,
    DeclaredTensor,
    ReplicaDivisions,
    Sum,
    decode_sum,
    problem_of,
    sums_of_wholes,
    total,
)
from holdfast.errors import InvalidError, first_three
from holdfast.training.coordination.agreement.records import DescribedState, PartsQuestion, Stated
from holdfast.training.coordination.message_codec import decode_message, encode_message

_INTERVALS_MAX = 16
"""Most sums that a rank publishes at a time; rank 0 reads at most 400 bytes of each rank."""

_NAMED_MAX = 3
"""Most tensors of which ranks publish their parts, and which the refusal names."""


def declared_by_all(
    save_name: str, declared_by: Mapping[int, Mapping[str, DeclaredTensor]]
) -> dict[str, DeclaredTensor]:
    """Return all declared tensors.

    Args:
        save_name: Name of the save, for messages.
        declared_by: Those of the lowest rank of each class.
    Raises:
        InvalidError: Ranks declare different dtypes or shapes of one tensor.
    """
    tensors: dict[str, DeclaredTensor] = {}
    ranks: dict[str, int] = {}
    texts: list[str] = []
    for rank, declared in declared_by.items():
        for fqn, tensor in declared.items():
            first = tensors.setdefault(fqn, tensor)
            first_rank = ranks.setdefault(fqn, rank)
            if tensor != first:
                texts.append(f"{fqn} ({_format(first)} on rank {first_rank} ≠ {_format(tensor)} on rank {rank})")
    if texts:
        raise InvalidError(
            f"{save_name}: ranks declare parts of different tensors under one name: {first_three(texts)}. Expected one "
            "dtype and one global_shape, of holdfast.Sharded or of the coordinates that a tensor carries. If these are "
            "different tensors (e.g. two pipeline stages that reuse a name), give each a name of its own"
        )
    return tensors


def answer_on_parts(question: PartsQuestion, state: DescribedState) -> bytes:
    """Return what a rank publishes on a question."""
    if question.fqns:
        return encode_message(state.declared_parts(question.fqns))
    sums = state.part_sums()
    if question.by_name:
        return zlib.compress(encode_message(sums), 1)
    return encode_message([total(_within(sums, interval)) for interval in question.intervals])


class PartsJudgement:
    """What rank 0 knows of the declared parts of all ranks, in one save."""

    def __init__(self, save_name: str, stated: Sequence[Stated]) -> None:
        """Add up what the ranks declare.

        Args:
            save_name: Name of the save, for messages.
            stated: The statements of all ranks.
        """
        self._save_name = save_name
        self.held = total(
            (first * len(each.ranks), second * len(each.ranks))
            for each in stated
            for first, second in [decode_sum(each.statement.parts)]
        )
        """The sum of all parts."""
        self._tensors: Mapping[str, DeclaredTensor] = {}
        self._expected: dict[str, Sum] = {}
        """By FQN the sum that the parts of all ranks must have."""
        self._whole: Collection[str] = ()
        """FQNs of tensors that some ranks hold whole."""
        self._statements = stated
        self.replicas = ReplicaDivisions()
        """The replicas of tensors with coordinates; set by `question` or `next_question`."""

    @property
    def layout(self) -> frozenset[object]:
        """What the replicas follow from: equal in two saves only if all ranks hold equal parts in both."""
        return frozenset((each.statement.layout, each.statement.parts, *each.ranks) for each in self._statements)

    def question(self, tensors: Mapping[str, DeclaredTensor], whole: Collection[str]) -> PartsQuestion | None:
        """Return the first question about declared parts; None if they cover every tensor exactly once.

        Args:
            tensors: All declared tensors.
            whole: FQNs of plain tensors and DTensors, which other ranks hold whole: of these, all parts are empty.
        """
        self._tensors, self._whole = tensors, whole
        self._expected = sums_of_wholes(tensors) | {fqn: NO_PARTS for fqn in tensors if fqn in whole}
        if total(self._expected.values()) == self.held:
            return None
        located = [fqn for fqn, tensor in tensors.items() if tensor.is_located and fqn not in whole]
        if not located:
            return _question_on(1, sorted(tensors))
        ranks: dict[Sum, list[int]] = {}
        for each in self._statements:
            ranks.setdefault(decode_sum(each.statement.parts), []).extend(each.ranks)
        if len(located) == len(tensors) and total(ranks) == total(self._expected.values()):
            self.replicas = ReplicaDivisions([_division(ranks)])
            return None
        return PartsQuestion(1, by_name=True)

    def next_question(self, question: PartsQuestion, answers: Sequence[bytes]) -> PartsQuestion | None:
        """Return the question that follows; None if ranks with equal coordinates cover every tensor exactly once.

        Args:
            question: The question that the ranks have answered.
            answers: The answer of every rank.
        Raises:
            InvalidError: Rank 0 knows what is wrong.
        """
        if question.fqns:
            raise self._refusal(question.fqns, [decode_message(answer, dict[str, DeclaredParts]) for answer in answers])
        if question.by_name:
            self._find_replicas([decode_message(zlib.decompress(answer), dict[str, Sum]) for answer in answers])
            is_covered = total(self._expected.values()) == self.held
            return None if is_covered else _question_on(question.number + 1, sorted(self._tensors))
        sums = [decode_message(answer, list[Sum]) for answer in answers]
        wrong = [
            interval
            for number, interval in enumerate(question.intervals)
            if total(each[number] for each in sums) != total(_within(self._expected, interval))
        ]
        if all(first == last for first, last in question.intervals):
            return PartsQuestion(question.number + 1, fqns=[fqn for fqn, _ in wrong[:_NAMED_MAX]])
        searched = wrong[:_NAMED_MAX]
        fqns = [fqn for fqn in sorted(self._tensors) if any(first <= fqn <= last for first, last in searched)]
        return _question_on(question.number + 1, fqns)

    def _find_replicas(self, sums: Sequence[Mapping[str, Sum]]) -> None:
        """Find the replicas of each tensor with coordinates; what all its ranks together hold is then expected."""
        numbers: dict[tuple[RankRanges, ...], int] = {(): 0}
        division_of: dict[str, int] = {}
        for fqn in self._tensors:
            ranks: dict[Sum, list[int]] = {}
            for rank, each in enumerate(sums):
                if fqn in each:
                    ranks.setdefault(each[fqn], []).append(rank)
            if self._tensors[fqn].is_located and total(ranks) == self._expected[fqn]:
                division = _division(ranks)
                division_of[fqn] = numbers.setdefault(division, len(numbers))
                self._expected[fqn] = total(each[fqn] for each in sums if fqn in each)
        self.replicas = ReplicaDivisions([*numbers], division_of)

    def _refusal(self, fqns: Sequence[str], parts: Sequence[Mapping[str, DeclaredParts]]) -> InvalidError:
        texts = []
        for fqn in fqns:
            tensor = self._tensors[fqn]
            held = {rank: each[fqn] for rank, each in enumerate(parts) if fqn in each}
            if fqn in self._whole:
                problem = f"declared in parts on ranks [{first_three(sorted(held))}], whole on others"
            else:
                problem = problem_of(tensor, held)
            texts.append(f"{fqn} {list(tensor.global_shape)} ({problem})")
        return InvalidError(
            f"{self._save_name}: declared parts do not cover every tensor exactly once: {first_three(texts)}. Expected "
            "each element on one rank, or on all ranks of its replicas. Correct start=, flat_start= or replicas= of "
            "holdfast.Sharded, or the global_offsets and local_sizes that the tensor carries, where ranks with equal "
            "ones are replicas. Pass a process_group of all ranks. If these are different tensors (e.g. two "
            "pipeline stages that reuse a name), give each a name of its own"
        )


def _division(ranks: Mapping[Sum, Sequence[int]]) -> tuple[RankRanges, ...]:
    """Return each group of several ranks with equal parts."""
    groups = (sorted(group) for found, group in ranks.items() if found != NO_PARTS and len(group) > 1)
    # As tuples, which have a hash.
    return tuple(tuple(map(tuple, rank_ranges(group))) for group in sorted(groups))


def _question_on(number: int, fqns: Sequence[str]) -> PartsQuestion:
    count = min(len(fqns), _INTERVALS_MAX)
    starts = [len(fqns) * interval // count for interval in range(count + 1)]
    return PartsQuestion(number, [(fqns[start], fqns[stop - 1]) for start, stop in pairwise(starts)])


def _within(sums: Mapping[str, Sum], interval: tuple[str, str]) -> list[Sum]:
    """Return the sums of the tensors in an interval of names."""
    first, last = interval
    return [found for fqn, found in sums.items() if first <= fqn <= last]


def _format(tensor: DeclaredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.global_shape)}{' with coordinates of its own' if tensor.is_located else ''}"
