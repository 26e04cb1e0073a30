"""Fills targets on one rank, before the ranks have agreed.

A state may tie tensors that share a part of their memory. Digests do not decide then: the caller reads both, into
memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.base.ports.framework import Wanted
from holdfast.core.engine.read import execute
from holdfast.stored.checkpoint.index_loading import index_for
from holdfast.training.coordination.job import Job
from holdfast.training.loading.exchange import planned_reads
from holdfast.training.loading.resolve import Resolved


def fill_alone(job: Job, resolved: Resolved, wanted: Sequence[Wanted]) -> None:
    """Read, check and place what some targets want, on this rank alone; no collective.

    Raises:
        CorruptError: A chunk differs from what was saved, or a pack is too short.
        UnavailableError: The store failed.
    """
    for tensor in wanted:
        resolved.require_stored(tensor.stored_fqn)
    boxes = ((tensor.stored_fqn, box) for tensor in wanted for box in tensor.boxes)
    plan = planned_reads(wanted, index_for(resolved.index, boxes, job.clock, resolved.location), job)
    packs = resolved.location.packs_of(resolved.manifest)
    execute(plan, packs, [tensor.target for tensor in wanted], job.settings, job.codecs)
