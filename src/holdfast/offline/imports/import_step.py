"""Imports a checkpoint as a step of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from holdfast.base.ports.observer import Observer
from holdfast.base.ports.store import Store
from holdfast.core.format.names import require_step, step_folder
from holdfast.errors import InvalidError
from holdfast.offline.imports.copy import saved_again
from holdfast.offline.imports.reference import referenced
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.latest import name_latest
from holdfast.training.coordination.job import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What one import did."""

    step: int
    """The step."""

    url: str
    """Where the step is stored."""

    attempt: str
    """Id of the attempt that was published."""

    origin: str | None
    """The system that wrote the imported checkpoint, with a version if known; None for Holdfast."""

    tensors: int
    """Tensors, tied ones once."""

    bytes: int
    """Bytes of them."""

    copied: bool
    """Whether the bytes were copied into packs of the run."""

    allowed_roots: tuple[str, ...]
    """Folders that readers of the step must allow in `Settings.allowed_roots`; empty for a copy."""

    seconds: float
    """From the call to the commit."""


def import_step(
    source: Checkpoint,
    store: Store,
    job: Job,
    step: int | None,
    *,
    copied: bool,
    observer: Observer | None = None,
    run: Store | None = None,
) -> ImportReport:
    """Import a checkpoint as a step of the run in a store.

    Args:
        source: The checkpoint.
        store: The root of the run.
        job: This process alone.
        step: The step's number; None for the number in the checkpoint.
        copied: Whether to copy its bytes into packs of the run. Otherwise the step references its files.
        observer: Receives progress.
        run: The near tier and the root as one, if the run has both: the lease is that of both.
    Raises:
        InvalidError: The checkpoint has no step number, or cannot be imported this way.
        CheckpointError: As `referenced` and `saved_again`.
    """
    start = job.clock.monotonic_seconds()
    if step is None and (step := source.step) is None:
        raise InvalidError(f"{source.url}: has no step number; pass --step N (step=N)")
    step = require_step(step)
    location = CheckpointLocation(store, step_folder(step), step)
    writer_lease = WriterLease(run or store, job.clock, job.settings.lease_seconds)
    try:
        if copied:
            with source.blaming_overwrite():
                attempt = saved_again(source, location, job, observer, writer_lease).attempt
            roots: set[str] = set()
        else:
            attempt = referenced(source, location, writer_lease, job, observer)
            roots = {source.packs(pack.name).files.url for pack in source.manifest.packs}
        name_latest(store, None)
    finally:
        writer_lease.release()
    report = ImportReport(
        step=step,
        url=location.url,
        attempt=attempt,
        origin=source.origin,
        tensors=len(source.tensors),
        bytes=sum(tensor.bytes for tensor in source.tensors.values()),
        copied=copied,
        allowed_roots=tuple(sorted(roots)),
        seconds=job.clock.monotonic_seconds() - start,
    )
    logger.info("imported %s as step %d: %d bytes in %.2f s", source.url, step, report.bytes, report.seconds)
    return report
