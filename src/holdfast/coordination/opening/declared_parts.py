"""Rank 0's judgement of declared parts at the opening of a save: they must cover every tensor exactly once.

The statements say whether all of them do, in 8 bytes a rank. If not, rank 0 asks for sums by interval of names, until
it knows which tensors are wrong, and then for the parts of three of those. So no answer grows with the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from holdfast.coordination.message_codec import decode_message, encode_message
from holdfast.coordination.opening.records import DescribedState, PartsQuestion, Stated
from holdfast.errors import InvalidError, first_three
from holdfast.plan.declared_parts import (
    NO_PARTS,
    DeclaredParts,
    DeclaredTensor,
    Sum,
    decode_sum,
    problem_of,
    sums_of_wholes,
    total,
)

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
            "dtype and one global_shape of holdfast.Sharded. If these are different tensors (e.g. two pipeline stages "
            "that reuse a name), give each a name of its own"
        )
    return tensors


def answer_on_parts(question: PartsQuestion, state: DescribedState) -> bytes:
    """Return what a rank publishes on a question."""
    if question.fqns:
        return encode_message(state.declared_parts(question.fqns))
    sums = state.part_sums()
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
        return _question_on(1, sorted(tensors))

    def next_question(self, question: PartsQuestion, answers: Sequence[bytes]) -> PartsQuestion:
        """Return the question that follows.

        Args:
            question: The question that the ranks have answered.
            answers: The answer of every rank.
        Raises:
            InvalidError: Rank 0 knows what is wrong.
        """
        if question.fqns:
            raise self._refusal(question.fqns, [decode_message(answer, dict[str, DeclaredParts]) for answer in answers])
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
            "holdfast.Sharded, and pass a process_group of all ranks. If these are different tensors (e.g. two "
            "pipeline stages that reuse a name), give each a name of its own"
        )


def _question_on(number: int, fqns: Sequence[str]) -> PartsQuestion:
    count = min(len(fqns), _INTERVALS_MAX)
    starts = [len(fqns) * interval // count for interval in range(count + 1)]
    return PartsQuestion(number, [(fqns[start], fqns[stop - 1]) for start, stop in pairwise(starts)])


def _within(sums: Mapping[str, Sum], interval: tuple[str, str]) -> list[Sum]:
    """Return the sums of the tensors in an interval of names."""
    first, last = interval
    return [found for fqn, found in sums.items() if first <= fqn <= last]


def _format(tensor: DeclaredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.global_shape)}"
