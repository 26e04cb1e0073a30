"""A call of save that is wrong on this rank: every rank raises, or no rank raises."""

from __future__ import annotations

import logging
from contextlib import suppress

from holdfast.core.engine.background import DAEMON_POOL, wait_in_slices
from holdfast.errors import InvalidError
from holdfast.training.coordination.agreement.save_agreement import SaveAgreement
from holdfast.training.coordination.job import Job
from holdfast.training.saving.attempt import LATE_SECONDS
from holdfast.training.saving.handle import SaveHandle

logger = logging.getLogger(__name__)


def refuse_call(job: Job, misuse: InvalidError) -> SaveHandle:
    """Refuse a save because the call is wrong on this rank. The next save of the other ranks receives the refusal.

    Otherwise this rank would raise alone, and the others would wait for this rank until a timeout.

    Args:
        job: The ranks that save together.
        misuse: The error of the call.
    Returns:
        The handle of the failed save, if no rank raises: the others refused for another reason, or did not save.
    Raises:
        InvalidError: On every rank. The message names the lowest rank whose call is wrong.
    """
    if job.comm.world_size == 1 or job.is_inherited:
        raise misuse

    def note_wait() -> None:
        if job.is_first_occurrence(str(misuse)):
            logger.warning("save: this rank waits for the other ranks, to refuse its call together: %s", misuse)

    agreement = SaveAgreement(job, -1, b"")
    refused = DAEMON_POOL.submit(lambda: agreement.take_number().refuse(misuse, is_misuse=True))
    try:
        with suppress(TimeoutError):
            seconds = job.agreement_seconds + job.verdict_seconds + LATE_SECONDS
            wait_in_slices(refused, seconds, job.clock, note_wait)
    finally:
        agreement.leave()
    if agreement.raises:
        job.history.note_raised()
        raise agreement.refusal() or misuse from misuse
    handle = SaveHandle("save", history=job.history)
    handle.fail(misuse)
    return handle
