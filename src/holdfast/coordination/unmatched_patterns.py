"""Judges patterns of `only` and `skip` that match no name on any rank: refuses them, or warns once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.coordination.job import Job
from holdfast.errors import InvalidError, first_three
from holdfast.ports.framework import UnmatchedPattern

logger = logging.getLogger(__name__)


def judge_unmatched(job: Job, name: str, by_rank: Sequence[Sequence[UnmatchedPattern]]) -> InvalidError | None:
    """Return the error for patterns that match no name on any rank; on rank 0, warn once of those that may.

    A rank of a pipeline holds few of the names, so a pattern counts only if every rank lists it.

    Args:
        job: The ranks.
        name: Name of the save or load, for the messages.
        by_rank: The patterns that match no name of a rank's state, by rank.
    """
    everywhere = set(by_rank[0]).intersection(*by_rank[1:])
    unmatched = [pattern for pattern in by_rank[0] if pattern in everywhere]
    errors = [pattern for pattern in unmatched if pattern.is_error]
    if errors:
        return InvalidError(
            f"{name}: {first_three(errors)}: matches no name on any rank. Expected names of the state, as in "
            "'model.layers.0.weight' or 'model.*'. Correct the pattern, or leave it out"
        )
    for pattern in unmatched:
        text = f"{pattern} matches no name on any rank. Correct the pattern, or leave it out"
        if job.comm.rank == 0 and job.is_first_occurrence(text):
            logger.warning("%s: %s", name, text)
    return None
