"""A checkpoint that something else saved becomes a step of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.location import CheckpointLocation
from holdfast.coordination.job import Job
from holdfast.errors import InvalidError
from holdfast.format.names import require_step, step_folder
from holdfast.leases.writer import WriterLease
from holdfast.offline.imports.copy import saved_again
from holdfast.offline.imports.reference import referenced
from holdfast.ports.observer import Observer
from holdfast.ports.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What one import did."""

    step: int
    """The step that it became."""

    url: str
    """Where that lies."""

    attempt: str
    """Id of the attempt that was published."""

    origin: str | None
    """What wrote the checkpoint that was imported, with a version where it says one; None for Holdfast."""

    tensors: int
    """Tensors, tied ones once."""

    bytes: int
    """Bytes of them."""

    copied: bool
    """Whether they were copied into packs of the run."""

    allowed_roots: tuple[str, ...]
    """Where they were not: the folders that whoever reads the step must allow in `Settings.allowed_roots`."""

    seconds: float
    """From the call until it was committed."""


def import_step(
    source: Checkpoint, store: Store, job: Job, step: int | None, *, copied: bool, observer: Observer | None = None
) -> ImportReport:
    """Make a checkpoint a step of the run that a store holds.

    Args:
        source: The checkpoint.
        store: The root of the run.
        job: This process alone.
        step: Which step it becomes; None for the one that it tells.
        copied: Whether its bytes are copied into packs of the run, or stay where they are.
        observer: Told of progress.
    Raises:
        InvalidError: It tells no step, or cannot be imported so.
        CheckpointError: As `referenced` and `saved_again`.
    """
    start = job.clock.monotonic_seconds()
    if step is None:
        step = source.step
    if step is None:
        raise InvalidError(f"{source.url}: tells no step; expected one. Say which it becomes: --step N, or step=N")
    require_step(step)
    location = CheckpointLocation(store, step_folder(step), step)
    tenure = WriterLease(store, job.clock, job.settings.lease_seconds)
    try:
        if copied:
            attempt = saved_again(source, location, job, observer, tenure).attempt
            roots: set[str] = set()
        else:
            attempt = referenced(source, location, tenure, job.clock, job.settings, observer)
            roots = {source.packs(pack.name).files.url.removeprefix("file://") for pack in source.manifest.packs}
    finally:
        tenure.release()
    report = ImportReport(
        step=step,
        url=location.url,
        attempt=attempt,
        origin=source.origin,
        tensors=source.manifest.tensors,
        bytes=source.manifest.tensor_bytes,
        copied=copied,
        allowed_roots=tuple(sorted(roots)),
        seconds=job.clock.monotonic_seconds() - start,
    )
    logger.info("imported %s as step %d: %d bytes in %.2f s", source.url, step, report.bytes, report.seconds)
    return report
