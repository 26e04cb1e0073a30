"""What the committing rank does: write the index of all that the ranks wrote, publish the manifest, sweep up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from holdfast.checkpoint.location import CheckpointLocation
from holdfast.coordination.agreement import Agreement
from holdfast.coordination.commit_vote import Vote
from holdfast.coordination.outcome import Outcome, ask_storage, committed, unknown
from holdfast.coordination.save_context import SaveContext
from holdfast.engine.gc_pause import GcPause
from holdfast.engine.parallel_map import ordered_parallel_map
from holdfast.errors import CheckpointError, ConflictError, MissingError
from holdfast.format.digest import hex_digest_of
from holdfast.format.index.index import Index
from holdfast.format.index.index_file import encode_index
from holdfast.format.index.overview import Overview, encode_overview, split
from holdfast.format.manifest import encode_manifest
from holdfast.format.names import OVERVIEW_FILE, index_name, is_attempt_file, is_attempt_folder, step_folder
from holdfast.format.sealed_json import stated_digest
from holdfast.repository.catalog import committed_steps, exists, read_manifest
from holdfast.repository.epochs import current_fence, is_valid, require_newest
from holdfast.repository.publish import packs_named_by, publish
from holdfast.repository.quarantine import quarantined_attempts
from holdfast.saving.health import last_counted_health
from holdfast.saving.health_findings import Findings
from holdfast.saving.merge import MergedParts, merge_parts
from holdfast.saving.provenance import installed_versions
from holdfast.saving.request import SaveRequest
from holdfast.settings import Settings
from holdfast.types.health import Health
from holdfast.types.manifest import FileRecord, Manifest, Parent

logger = logging.getLogger(__name__)

_FILES = 8
"""Files of an index that is split at all, at least: so that a rank reads little that it does not need."""


def assemble(
    request: SaveRequest, agreement: Agreement, votes: Sequence[Vote], settings: Settings, written: list[str]
) -> tuple[bytes, Health | None]:
    """Merge what every rank wrote, prove it whole, and write its index.

    Args:
        request: What is saved, and where.
        agreement: What the ranks agreed on.
        votes: Every rank's vote, by rank.
        settings: Chunks of the index, and how many go into one file of it.
        written: Receives the key of every file before it is written.
    Returns:
        The manifest that names everything, and the health of the checkpoint if it is known.
    Raises:
        InvalidError: The parts do not make a whole.
        CorruptError: A part or pack is not what its rank voted for.
    """
    location, attempt, context = request.location, agreement.attempt, agreement.context
    whole = merge_parts(location, attempt, votes, settings.chunk_bytes)
    indexes, overview = write_index(location, attempt, whole.index, settings, written)
    # Not before: the save before this one may have been in flight until now.
    parent = request.parent()
    health = _health(location, context, parent, whole.findings)
    manifest = build_manifest(location, attempt, whole, (indexes, overview), context.run_id, context.created)
    data = encode_manifest(
        replace(
            manifest,
            parent=parent,
            origin=context.origin,
            masters=dict(context.masters),
            epoch=context.epoch,
            metrics=dict(context.metrics),
            health=health,
        )
    )
    return data, health


def build_manifest(
    location: CheckpointLocation,
    attempt: str,
    whole: MergedParts,
    index: tuple[tuple[FileRecord, ...], FileRecord | None],
    run_id: str,
    created: str,
) -> Manifest:
    """Return what a manifest says of the files of an attempt, and nothing that only who saved it knows.

    Args:
        place: The checkpoint.
        attempt: The attempt.
        whole: What its ranks wrote.
        index: Records of the files of its index, as `write_index` returns them.
        run_id: The run.
        created: When, for people.
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
    )


def _health(
    location: CheckpointLocation, context: SaveContext, parent: Parent | None, findings: Findings
) -> Health | None:
    """Return the health of a checkpoint; of a copy, the health that was found when the source was saved."""
    if context.health is not None:
        return context.health
    return findings.health(*last_counted_health(location, parent)) if findings.has_counts else findings.health(None)


def write_index(
    location: CheckpointLocation,
    attempt: str,
    index: Index,
    settings: Settings,
    written: list[str],
    *,
    whole: bool = False,
) -> tuple[tuple[FileRecord, ...], FileRecord | None]:
    """Write an index, in several files if it is large; return their records, and that of the overview if there is one.

    Args:
        place: Where the checkpoint goes.
        attempt: The attempt that is to be published.
        index: The index.
        settings: Chunks of an index that is kept in one file.
        written: Told the key of every file before it is written.
        whole: Whether it goes into one file, however large.
    """
    with GcPause():
        indexes, overview = ([index], None) if whole else _files_of(index, settings._tuning.index_chunks_max)
    folder = f"{location.folder}{attempt}/"

    def put(file: tuple[str, Callable[[], bytes]]) -> FileRecord:
        name, encode = file
        data = encode()
        location.store.put_if_absent(folder + name, data)
        return FileRecord(name, len(data), hex_digest_of(data))

    files = [(index_name(number), partial(encode_index, each)) for number, each in enumerate(indexes)]
    if overview is not None:
        files.append((OVERVIEW_FILE, partial(encode_overview, overview)))
    written += [folder + name for name, _ in files]
    with GcPause():
        records = list(ordered_parallel_map(put, files))
    return tuple(records[: len(indexes)]), records[-1] if overview is not None else None


def publish_manifest(location: CheckpointLocation, data: bytes, epoch: int) -> Outcome:
    """Publish a manifest.

    Args:
        location: Where.
        data: The manifest.
        epoch: The epoch under which it is published; 0 if none.
    Returns:
        `committed`; `unknown` if the store failed while it published; `ask_storage` if another writer took over
        meanwhile.
    Raises:
        ConflictError: Another attempt was published first, or another writer took over; nothing was published.
        CheckpointError: It is certain that nothing was published.
    """
    if epoch:
        require_newest(location.store, epoch)
    try:
        _put(location, data, epoch)
    except ConflictError:
        raise
    except Exception as error:
        # The name may be visible although the call failed (the folder was not synced), or become visible later.
        if _is_certainly_absent(location):
            raise
        return unknown(str(error))
    digest = stated_digest(data)
    assert digest is not None, "a manifest is sealed"
    if epoch:
        try:
            # A new writer looks for steps after it took its epoch. If no newer epoch exists yet, it will find this one.
            require_newest(location.store, epoch)
        except CheckpointError as doubt:
            return ask_storage(str(doubt))
    return committed(digest)


def _put(location: CheckpointLocation, data: bytes, epoch: int) -> None:
    try:
        publish(location.store, location.manifest_key, data)
    except ConflictError:
        if not epoch or not clear_fenced(location, epoch):
            raise
        publish(location.store, location.manifest_key, data)


def clear_fenced(location: CheckpointLocation, epoch: int) -> bool:
    """Remove a manifest that can never count from a step that the holder of the newest epoch wants to save.

    Args:
        place: The step.
        epoch: The epoch of who asks.
    Returns:
        Whether the step is free.
    Raises:
        ConflictError: Another writer took over.
    """
    assert location.step is not None, "only a run has epochs"
    if not exists(location.store, location.manifest_key):
        return True
    fence = current_fence(location.store)
    try:
        if fence.epoch != epoch or is_valid(location.store, fence, location.step):
            return False
    except MissingError:
        return True
    require_newest(location.store, epoch)
    logger.warning("step %d: the manifest of a writer whose epoch is over does not count and is removed", location.step)
    location.store.delete([location.manifest_key])
    return True


def _is_certainly_absent(location: CheckpointLocation) -> bool:
    """Return whether a manifest that could not be put is not there and will not come."""
    try:
        return location.store.failed_calls_are_over and not exists(location.store, location.manifest_key)
    except CheckpointError:
        return False


def sweep(location: CheckpointLocation, attempt: str, name: str, epoch: int) -> None:
    """Remove what failed attempts left at a place: with a manifest there, none of them can publish any more.

    An attempt may have been published before somebody removed its manifest, and other steps refer to its packs: such
    packs stay, and everything does while a manifest cannot be read.

    Args:
        place: The checkpoint.
        attempt: The attempt that was published.
        name: What was done, for messages.
        epoch: The epoch under which it was; 0 if none.
    """
    try:
        others = [
            each for each in location.store.folders(location.folder) if is_attempt_folder(each) and each != attempt
        ]
        kept = quarantined_attempts(location.store, location.step) if others and location.step is not None else set()
        named = _referred_to(location) if others else frozenset()
        for folder in others:
            if folder in kept:
                continue
            prefix = f"{location.folder}{folder}/"
            keys = [entry.key for entry in location.store.list(prefix)]
            if all(is_attempt_file(key.removeprefix(prefix)) for key in keys):
                if epoch:
                    # Asked after they were listed: what is in the list is not of a writer who took over.
                    require_newest(location.store, epoch)
                # A key that is absent still has its folder looked at: one that died early left nothing else.
                location.store.delete([*(key for key in keys if key not in named), f"{prefix}nothing"])
            else:
                logger.warning("%s: %s holds more than an attempt and is left alone", name, prefix)
    except CheckpointError as error:
        logger.warning("%s: leftovers of failed attempts stay for now: %s", name, error)


def _referred_to(location: CheckpointLocation) -> frozenset[str]:
    """Return the packs of a place's run that committed steps name, by their path from its root."""
    if location.step is None:
        return frozenset()
    return packs_named_by(read_manifest(location.store, step_folder(step)) for step in committed_steps(location.store))


def _files_of(index: Index, chunks_max: int) -> tuple[list[Index], Overview | None]:
    """Return what goes into each index file, and the overview of them where there are several."""
    if index.pieces.first_chunk[-1] <= chunks_max:
        return [index], None
    return split(index, max(chunks_max // _FILES, 1))
