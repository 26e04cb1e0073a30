"""Loading the manifest and the index of one checkpoint: ours, or what a foreign format lists."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from holdfast.checkpoint.coverage import require_wanted_covered
from holdfast.checkpoint.location import CheckpointLocation, manifest_bytes_at
from holdfast.clock import Clock
from holdfast.engine.parallel_map import ordered_parallel_map
from holdfast.errors import InvalidError
from holdfast.format.index.index import Index
from holdfast.format.index.index_checks import index_from, overview_from
from holdfast.format.index.split_index import SplitIndex
from holdfast.format.manifest import decode_manifest
from holdfast.geometry.box import Box
from holdfast.repository.catalog import exists, manifest_in, read_file
from holdfast.types.listing import ForeignListing
from holdfast.types.manifest import FileRecord, Manifest

logger = logging.getLogger(__name__)


def listing_at(location: CheckpointLocation) -> ForeignListing | None:
    """Return what another system left at a place, if no checkpoint of Holdfast's is there and a format knows it.

    Raises:
        InvalidError: It is a file that no format knows.
        CheckpointError: A format knows it, and it cannot be read.
    """
    foreign = location.foreign
    if foreign is None or (not foreign.name and exists(location.store, location.manifest_key)):
        return None
    listing = foreign.listing()
    if listing is None and foreign.name:
        raise InvalidError(f"{location.url}: a file of no format that Holdfast reads; docs/formats.md lists them")
    for remark in listing.remarks if listing is not None else ():
        logger.warning("%s: %s", location.url, remark)
    return listing


def given_frames(location: CheckpointLocation) -> list[bytes]:
    """Return what rank 0 reads for every rank: the manifest, and the index or the overview of a split one.

    Raises:
        MissingError: There is no checkpoint.
        CorruptError: A file is not what the manifest says.
    """
    data = manifest_bytes_at(location)
    manifest = manifest_in(location.folder, data, f"{location.url}/manifest.json")
    records = manifest.indexes if manifest.overview is None else (manifest.overview,)
    return [data, *(read_file(location.store, location.folder, manifest.attempt, record) for record in records)]


def resolved_frames(frames: Sequence[bytes], location: CheckpointLocation) -> tuple[Manifest, Index | SplitIndex]:
    """Return the manifest and the index that rank 0 gave, every number of them checked.

    Raises:
        CorruptError: They are not possible ones, or contradict each other.
    """
    manifest = decode_manifest(frames[0], f"{location.url}/manifest.json")
    where = f"{location.store.url}/{location.folder}"
    if manifest.overview is None:
        return manifest, index_from(manifest, list(frames[1:]), where)
    return manifest, split_index_at(location, manifest, frames[1])


def split_index_at(location: CheckpointLocation, manifest: Manifest, overview: bytes) -> SplitIndex:
    """Return the index of a checkpoint of which nothing but the overview has been read.

    Raises:
        CorruptError: The overview is not a possible one.
    """
    where = f"{location.store.url}/{location.folder}"

    def read_files(records: Sequence[FileRecord]) -> Iterator[bytes]:
        return ordered_parallel_map(
            lambda each: read_file(location.store, location.folder, manifest.attempt, each), records
        )

    return SplitIndex(overview_from(manifest, overview, where), manifest, read_files, where)


def index_for(
    stored: Index | SplitIndex, wanted: Sequence[tuple[str, Box]], clock: Clock, location: CheckpointLocation
) -> Index:
    """Return an index that lists all pieces of what a rank wants, proven to hold it exactly once.

    Args:
        stored: The index; a whole one has been proven by rank 0.
        wanted: Boxes of stored tensors.
        clock: For chance.
        place: The checkpoint, for messages.
    Raises:
        CorruptError: Index files are not what the manifest says, or leave holes in what is wanted.
    """
    if isinstance(stored, Index):
        return stored
    index = stored.read_for(wanted)
    require_wanted_covered(index, wanted, clock, location.url)
    return index
