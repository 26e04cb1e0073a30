"""Imports another system's checkpoint as a step that references its files."""

from __future__ import annotations

import logging
from dataclasses import replace

from holdfast.base.ports.observer import Observer
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.core.format.index.index import Index
from holdfast.core.format.manifest import encode_manifest
from holdfast.core.format.names import file_url, is_file_url
from holdfast.core.format.pack import pack_digest
from holdfast.core.format.values import values
from holdfast.errors import CheckpointError, InvalidError, UnavailableError
from holdfast.offline.imports.checksums import require_checksums
from holdfast.offline.imports.hash_chunks import digested
from holdfast.offline.imports.viewed_source import viewed_index
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation, require_no_checkpoint
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.publishing.leftovers import delete_leftovers
from holdfast.stored.publishing.manifest import publish_manifest
from holdfast.stored.publishing.outcome import OutcomeKind
from holdfast.stored.repository.catalog import check_size
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.runs.claim_step import claim_step
from holdfast.training.saving.commit import installed_versions, write_index

logger = logging.getLogger(__name__)


def referenced(
    source: Checkpoint,
    location: CheckpointLocation,
    writer_lease: WriterLease,
    job: Job,
    observer: Observer | None = None,
) -> str:
    """Publish a step whose tensors stay in another system's files; return the attempt's id.

    Every byte of those files is read for its digest, and before that for a checksum that the files hold of it.

    Args:
        source: Another system's checkpoint.
        location: The step.
        writer_lease: The run's; taken once everything is read.
        job: This process alone.
        observer: Receives progress.
    Raises:
        ConflictError: The step exists; it was not touched. Or another job writes to the run, or a file of the source
            was rewritten meanwhile; nothing was published.
        InvalidError: The source is a checkpoint of Holdfast, or a file's path is not plain text.
        CorruptError: A file of the source is damaged; nothing was published.
        UnavailableError: Storage failed, or the outcome is unknown.
    """
    if source.manifest.attempt:
        raise InvalidError(
            f"{source.url}: a checkpoint of Holdfast; expected another system's, since only those are referenced. Copy "
            "it (--copy, copy=True), or load it where it is"
        )
    require_no_checkpoint(location.store)
    location.require_empty()
    name = f"import of step {location.step}"
    _require_plain_paths(source)
    require_checksums(source)
    index = source.index if not source.layouts else viewed_index(source)
    index = digested(index, source.packs, job.settings, observer)
    files = _file_records(source, index)
    # With an overview, tensors may not have more bytes than the files. Tied tensors share bytes, so they may.
    is_tied = source.manifest.tensor_bytes > sum(file.bytes for file in files)
    attempt, written = job.clock.random_bytes(8).hex(), list[str]()
    try:
        context = claim_step(location, writer_lease, job.clock)
        index_records = write_index(location, attempt, index, job.settings, written, whole=is_tied)
        manifest = _manifest(source, location, context, attempt, files, index_records)
        # All bytes have been read by now: a file that changed meanwhile has digests of a mixture.
        source.require_unchanged()
        outcome = publish_manifest(location, encode_manifest(manifest), writer_lease.epoch)
    except BaseException:
        _remove(location, written, name)
        raise
    if outcome.kind is not OutcomeKind.COMMITTED:
        raise UnavailableError(
            f"{name}: outcome unknown: {outcome.reason}. The step may or may not be at {location.url}; nothing was "
            "removed. Look there (holdfast ls) before importing again"
        )
    delete_leftovers(location, attempt, name, writer_lease.epoch)
    return attempt


def _require_plain_paths(source: Checkpoint) -> None:
    for pack in source.manifest.packs:
        url = file_url(source.packs(pack.name).url)
        if not is_file_url(url) or not values.is_json_scalar(url):
            raise InvalidError(
                f"{url[:300]!r}: expected a path of plain text, since the manifest stores it. Import it with --copy"
            )


def _file_records(source: Checkpoint, index: Index) -> tuple[FileRecord, ...]:
    """Return the records of all files with pieces, after checking that no size has changed since the listing."""
    records = []
    for pack in source.manifest.packs:
        stored = source.packs(pack.name)
        pieces = index.pieces_in(file_url(stored.url))
        if pieces:
            check_size(stored.files, stored.key, pack)
            digests = b"".join(piece.digests for piece in pieces)
            records.append(FileRecord(file_url(stored.url), pack.bytes, pack_digest(b"", digests)))
    return tuple(records)


def _manifest(
    source: Checkpoint,
    location: CheckpointLocation,
    context: SaveContext,
    attempt: str,
    files: tuple[FileRecord, ...],
    index_records: tuple[tuple[FileRecord, ...], FileRecord | None],
) -> Manifest:
    indexes, overview = index_records
    content, manifest = source.content, source.manifest
    if source.layouts:
        specs = content.tensors.values()
        manifest = replace(
            manifest,
            tensors=len(specs),
            tensor_bytes=sum(spec.global_bytes for spec in specs),
            aliases=dict(content.aliases),
            tree=content.tree,
            masters={},
            order=b"",
        )
    return replace(
        manifest,
        run_id=context.run_id,
        step=location.step,
        attempt=attempt,
        created=context.created,
        software=installed_versions(),
        packs=files,
        indexes=indexes,
        overview=overview,
        epoch=context.epoch,
        timeline=context.timeline,
    )


def _remove(location: CheckpointLocation, keys: list[str], name: str) -> None:
    try:
        location.store.delete(keys)
    except CheckpointError as error:
        logger.warning("%s: files of the failed attempt remain for now: %s", name, error)
