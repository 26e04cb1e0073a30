"""The work of the committing rank: write the merged index, publish the manifest, remove files of failed attempts."""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata

from holdfast.base.ports.store import Store
from holdfast.base.types.health import findings_of, with_drift
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.core.engine.background import DAEMON_POOL, is_done_soon
from holdfast.core.engine.gc_pause import GcPause
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_file import encode_index
from holdfast.core.format.index.overview import IndexParts, Overview, encode_overview, split
from holdfast.core.format.manifest import encode_manifest
from holdfast.core.format.names import (
    OVERVIEW_FILE,
    PARTS_FOLDER,
    index_name,
)
from holdfast.errors import CheckpointError, ConflictError, CorruptError, MissingError, UnavailableError, text_of
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.publishing.leftovers import delete_leftovers
from holdfast.stored.publishing.manifest import publish_manifest
from holdfast.stored.publishing.outcome import Outcome, OutcomeKind, aborted, committed, unknown
from holdfast.stored.repository.catalog import (
    confirmed_manifest,
)
from holdfast.stored.repository.epochs import require_counted
from holdfast.training.coordination.agreement.records import Agreement
from holdfast.training.coordination.commit_vote import Vote
from holdfast.training.coordination.job import Job
from holdfast.training.saving.handle import typed
from holdfast.training.saving.health.health_record import last_counted_health
from holdfast.training.saving.merge import MergedParts, merge_parts
from holdfast.training.saving.overwrite import lost_claim_of, replace_manifest
from holdfast.training.saving.target import SaveTarget
from holdfast.training.telemetry.operation import OperationTrace

logger = logging.getLogger(__name__)

_SPLIT_FILES_MIN = 8
"""Fewest files of a split index. With fewer, a rank would read much that it does not need."""


def commit(
    target: SaveTarget,
    location: CheckpointLocation,
    agreement: Agreement,
    votes: Callable[[], Sequence[Vote]],
    *,
    job: Job,
    trace: OperationTrace,
    written: list[str],
    name: str,
) -> tuple[Outcome, bool]:
    """Merge the parts of all ranks and publish the manifest, on the rank whose vote completed the count.

    Args:
        target: Where the checkpoint goes.
        location: The same place, through the retries of this save.
        agreement: The agreement of the ranks.
        votes: Returns the vote of every rank, by rank.
        job: The ranks.
        trace: Records the phases.
        written: Receives the key of every file before the write.
        name: Name of the save, for messages.
    Returns:
        The outcome, and whether files of failed attempts may be deleted.
    """
    context, overwrite = agreement.context, agreement.context.overwrite
    try:
        every_vote = votes()
        with trace.phase("index"):
            data, manifest = assemble(target, agreement, every_vote, job.settings, written)
        with trace.phase("publish"):
            target.hooks.check_again(manifest)
            replaced = overwrite and replace_manifest(location, agreement.attempt, data, overwrite, job)
            outcome = replaced or publish_manifest(location, data, context.epoch)
            # Other attempts stay for readers of the replaced checkpoint. The next overwrite removes them.
            may_delete = replaced is None and not (overwrite and overwrite.attempts)
    except Exception as error:  # noqa: BLE001 - it is certain that nothing was published
        lost = lost_claim_of(location, overwrite, error) if overwrite else lost_race_of(location, error)
        return aborted(lost or typed(error, name)), False
    if outcome.kind is not OutcomeKind.COMMITTED:
        return outcome, False
    return committed(outcome.manifest_digest, findings_of(manifest.health), manifest.tensor_bytes), may_delete


def delete_leftovers_in_time(location: CheckpointLocation, agreement: Agreement, name: str, job: Job) -> None:
    """Delete the files of failed attempts. The outcome is certain, so the save does not wait for a removal that hangs.

    Args:
        location, agreement, job: As in `commit`.
        name: Name of the save, for messages.
    """
    attempt, context = agreement.attempt, agreement.context
    claim = None if context.overwrite is None else context.overwrite.claim
    work = partial(delete_leftovers, location, attempt, name, context.epoch, job.attempts_under_way, claim=claim)
    try:
        if not is_done_soon(work, job.clock):
            logger.warning("%s: committed, but the removal of files of failed attempts hangs", name)
    except Exception as error:  # noqa: BLE001 - the next save of the step removes these files
        logger.warning("%s: committed, but files of failed attempts stay: %s", name, text_of(error))


def assemble(
    target: SaveTarget, agreement: Agreement, votes: Sequence[Vote], settings: Settings, written: list[str]
) -> tuple[bytes, Manifest]:
    """Merge the parts of all ranks, prove that the parts form a whole, write the index, and make all names durable.

    Args:
        target, agreement, written: As in `commit`.
        votes: The vote of every rank, by rank.
        settings: Chunk size, and chunks per index file.
    Returns:
        The manifest, encoded and as an object.
    Raises:
        InvalidError: The parts do not form a whole.
        CorruptError: A part or pack differs from the vote of its rank.
    """
    location, attempt, context = target.location, agreement.attempt, agreement.context
    location.store.trust_exclusive_creates()  # Rank 0 has voted.
    whole = merge_parts(location, attempt, votes, settings.chunk_bytes)
    indexes, overview = write_index(location, attempt, whole.index, settings, written)
    # Every rank made the content of its files durable before its vote, and left the names to this rank. Without the
    # names, the manifest would survive a power cut and the files would not.
    location.store.sync(f"{location.folder}{attempt}/{PARTS_FOLDER}")
    manifest = build_manifest(location, attempt, whole, (indexes, overview), context.run_id, context.created)
    manifest = replace(
        manifest,
        origin=context.origin,
        masters=dict(context.masters),
        epoch=context.epoch,
        timeline=context.timeline,
        metrics=dict(context.metrics),
        near_only=context.place == "near",
        log=attempt if target.log == "" else target.log or "",
    )
    # Only now: the previous save may have been in flight until now, and that commit decides the parent.
    parent = target.parent()
    health = context.health  # For a copy: the health recorded with its source.
    if health is None:
        before = last_counted_health(location, parent) if whole.findings.has_counts else (None,)
        health = with_drift(whole.findings.health(*before), agreement.drift)
    manifest = replace(manifest, parent=parent, health=health)
    return encode_manifest(manifest), manifest


def build_manifest(
    location: CheckpointLocation,
    attempt: str,
    whole: MergedParts,
    index: tuple[tuple[FileRecord, ...], FileRecord | None],
    run_id: str,
    created: str,
) -> Manifest:
    """Return the manifest fields that follow from the files of an attempt; `repair` too rebuilds manifests this way.

    Args:
        location: The checkpoint.
        attempt: Id of the attempt.
        whole: Merged parts of its ranks.
        index: Records of the index files and the overview, as `write_index` returns them.
        run_id: Id of the run.
        created: Wall-clock time, for people.
    """
    indexes, overview = index
    return Manifest(
        run_id=run_id,
        step=location.step,
        attempt=attempt,
        created=created,
        parent=None,
        world_size=len(whole.parts),
        layouts=whole.layouts,
        software=installed_versions(),
        tensors=whole.index.table.count,
        tensor_bytes=whole.index.table.bytes,
        aliases=whole.aliases,
        tree=whole.tree,
        packs=whole.packs,
        parts=whole.parts,
        indexes=indexes,
        overview=overview,
        optimizers=whole.optimizers,
        order=whole.order,
        newer_types=whole.index.table.newer_types,
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of the software that writes this checkpoint."""
    versions = {"python": platform.python_version()}
    for name in ("holdfast", "torch", "numpy"):
        version = _installed_version(name)
        if version is not None:
            versions[name] = version
    return versions


@functools.cache
def _installed_version(name: str) -> str | None:
    """Return the version of a package; None without the package. To read a version takes a millisecond."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def asking_for_exclusive_creates(store: Store, rank: int) -> Callable[[], None]:
    """Start a check on rank 0 whether two writers can create one object, in parallel with the writes of packs.

    Nothing is committed without the vote of rank 0. So rank 0 checks for all ranks, and waits for the answer before the
    vote.

    Args:
        store: The store.
        rank: This rank.
    Returns:
        A function that waits for the answer, and raises if the store cannot be used.
    """
    if rank or not store.traits.checks_exclusive_creates:
        return lambda: None
    try:
        answer = DAEMON_POOL.submit(store.require_exclusive_creates)
    except UnavailableError:  # No thread could be started: the check runs after the packs.
        return store.require_exclusive_creates

    def require() -> None:
        answer.result()

    return require


def write_index(
    location: CheckpointLocation,
    attempt: str,
    index: Index,
    settings: Settings,
    written: list[str],
    *,
    whole: bool = False,
) -> tuple[tuple[FileRecord, ...], FileRecord | None]:
    """Write an index; a large index is split into several files.

    Args:
        location: Where the checkpoint goes.
        attempt: Id of the attempt.
        index: The index.
        settings: Most chunks of an index in one file.
        written: Receives the key of every file before the write, so that a failed save can remove the file.
        whole: Whether to write one file, however large.
    Returns:
        Records of the index files, and the record of the overview if the index is split.
    """
    indexes: Sequence[Index] | IndexParts = [index]
    overview: Overview | None = None
    chunks_max = settings._tuning.index_chunks_max
    if not whole and index.pieces.first_chunk[-1] > chunks_max:
        with GcPause():
            indexes, overview = split(index, max(chunks_max // _SPLIT_FILES_MIN, 1))
    folder = f"{location.folder}{attempt}/"

    def put(file: tuple[str, Callable[[], bytes]]) -> FileRecord:
        name, encode = file
        data = encode()
        location.store.put_if_absent(folder + name, data)
        return FileRecord(name, len(data), hex_digest_of(data))

    def encoded(number: int) -> bytes:
        return encode_index(indexes[number])

    files = [(index_name(number), partial(encoded, number)) for number in range(len(indexes))]
    if overview is not None:
        files.append((OVERVIEW_FILE, partial(encode_overview, overview)))
    written += [folder + name for name, _ in files]
    with GcPause():
        records = list(ordered_parallel_map(put, files))
    return tuple(records[: len(indexes)]), records[-1] if overview is not None else None


def lost_race_of(location: CheckpointLocation, error: Exception) -> ConflictError | None:
    """Return the lost race if that caused an error of a commit: the writer that publishes removes the others' files."""
    if not isinstance(error, CorruptError | MissingError):
        return None
    try:
        location.require_empty("Another writer published first, and removed the files of this save. Save elsewhere")
    except ConflictError as lost:
        lost.__cause__ = error
        return lost
    except CheckpointError:
        pass  # The first error is more precise.
    return None


def outcome_on_storage(location: CheckpointLocation, agreement: Agreement, name: str, reason: str) -> Outcome:
    """Return the outcome of a save by the manifest on storage, if the key-value store does not hold the outcome.

    Args:
        location: Where the checkpoint is saved.
        agreement: The agreement of the ranks.
        name: The save, for messages.
        reason: Why the key-value store does not hold the outcome.
    """
    try:
        manifest = confirmed_manifest(location.store, location.folder)
    except CheckpointError:
        return unknown(reason)
    if manifest.attempt != agreement.attempt:
        if agreement.context.overwrite is not None:
            return unknown(f"{reason}; attempt {manifest.attempt} is there, and may still be replaced")
        return aborted(ConflictError(f"{name}: attempt {manifest.attempt} published first; {reason}"))
    try:
        if manifest.epoch and manifest.step is not None:
            require_counted(location.store, manifest.step, manifest.epoch, manifest.digest)
    except ConflictError as error:
        return Outcome(OutcomeKind.FENCED, error=error)
    except CheckpointError as failure:
        return unknown(f"{reason}; {failure}")
    return committed(manifest.digest, findings_of(manifest.health), manifest.tensor_bytes)
