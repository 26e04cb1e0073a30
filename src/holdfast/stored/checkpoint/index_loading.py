"""Loads the manifest and the index of one checkpoint: Holdfast's, or what a foreign format lists."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from holdfast.base.clock import Clock
from holdfast.base.geometry.box import Box
from holdfast.base.types.listing import ForeignListing
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_checks import index_from, overview_from
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.core.format.manifest import decode_manifest
from holdfast.errors import InvalidError
from holdfast.stored.checkpoint.coverage import require_wanted_covered
from holdfast.stored.checkpoint.location import CheckpointLocation, manifest_bytes_at, manifest_if_any, require_no_run
from holdfast.stored.repository.catalog import read_file

logger = logging.getLogger(__name__)


def manifest_or_listing(location: CheckpointLocation) -> bytes | ForeignListing:
    """Return the manifest of a checkpoint of Holdfast, or the listing of another system's.

    Raises:
        MissingError: Neither is there.
        InvalidError: The path is a file that no format recognizes, or the root of a run.
        CheckpointError: A format recognizes the files but cannot read them.
    """
    foreign = location.foreign
    if foreign is None or location.chosen is not None:
        return manifest_bytes_at(location)
    data = None if foreign.is_file else manifest_if_any(location)
    if data is not None:
        return data
    try:
        listing = foreign.listing()
    except InvalidError:
        if not foreign.name and location.step is None:
            # A run may have more files than a checkpoint of another system, and that is not what is wrong.
            require_no_run(location.store, "read one checkpoint here")
        raise
    if listing is None and foreign.name:
        raise InvalidError(
            f"{location.url}: not a checkpoint of any format that Holdfast reads; docs/formats.md lists the formats"
        )
    if listing is None:
        return manifest_bytes_at(location)  # Raises, and says what is there instead.
    for remark in listing.remarks:
        logger.warning("%s: %s", location.url, remark)
    return listing


def index_frames(location: CheckpointLocation, manifest: Manifest) -> list[bytes]:
    """Return the index, or the overview of a split index, as stored.

    Raises:
        CorruptError: A file differs from its record in the manifest.
    """
    records = manifest.indexes if manifest.overview is None else (manifest.overview,)
    return [read_file(location.store, location.folder, manifest.attempt, record) for record in records]


def resolved_frames(frames: Sequence[bytes], location: CheckpointLocation) -> tuple[Manifest, Index | SplitIndex]:
    """Return the manifest and the index in the frames that rank 0 sent, after checking every number in them.

    Raises:
        CorruptError: They are invalid, or contradict each other.
    """
    manifest = decode_manifest(frames[0], f"{location.url}/manifest.json")
    where = f"{location.store.url}/{location.folder}"
    if manifest.overview is None:
        return manifest, index_from(manifest, frames[1:], where)
    return manifest, split_index_at(location, manifest, frames[1])


def split_index_at(location: CheckpointLocation, manifest: Manifest, overview: bytes) -> SplitIndex:
    """Return a split index that reads its files on demand.

    Args:
        location: The checkpoint.
        manifest: Its manifest.
        overview: Content of its overview file.
    Raises:
        CorruptError: The overview is invalid.
    """
    where = f"{location.store.url}/{location.folder}"

    def read_files(records: Sequence[FileRecord]) -> Iterator[bytes]:
        return ordered_parallel_map(
            lambda record: read_file(location.store, location.folder, manifest.attempt, record), records
        )

    return SplitIndex(overview_from(manifest, overview, where), manifest, read_files, where)


def index_for(
    stored: Index | SplitIndex, wanted: Iterable[tuple[str, Box]], clock: Clock, location: CheckpointLocation
) -> Index:
    """Return an index that lists all pieces of the wanted boxes, proven to cover them exactly once.

    Args:
        stored: The index; rank 0 has proven a whole one already.
        wanted: Boxes of stored tensors; a whole index does not ask for them.
        clock: Source of randomness.
        location: The checkpoint, for messages.
    Raises:
        CorruptError: Index files differ from their records, or leave holes in the wanted boxes.
    """
    if isinstance(stored, Index):
        return stored
    boxes = list(wanted)
    index = stored.read_for(boxes)
    require_wanted_covered(index, boxes, clock, location.url)
    return index
