"""Rebuilds the index and the manifest of a checkpoint from its parts and packs, only where digests prove them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from holdfast.base.geometry.region import Region
from holdfast.base.ports.codec import Codecs
from holdfast.base.types.manifest import FORMAT_MAJOR, FORMAT_MINOR_MAX, FileRecord, Manifest
from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.index import Index, IndexMerger
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.index_file import INDEX_BYTES_MAX
from holdfast.core.format.log import LOG_FOLDER
from holdfast.core.format.names import (
    is_attempt_folder,
    is_coded_pack_name,
    is_pack_name,
    is_part_name,
    part_name,
    rank_of_pack,
    rank_of_part,
    step_of_pack,
)
from holdfast.core.format.pack import pack_digest
from holdfast.core.format.part import decode_part, is_sealed, require_part_of
from holdfast.core.format.timeline import timeline_in_damaged
from holdfast.errors import CheckpointError, first_three
from holdfast.settings import MIB, Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.copying.pack_proof import PackPieces, digests_of, header_of
from holdfast.stored.repository.catalog import read_file
from holdfast.stored.repository.timelines import RunTimelines
from holdfast.training.coordination.commit_vote import Vote
from holdfast.training.saving.commit import build_manifest, write_index
from holdfast.training.saving.merge import merge_parts

LOST_TIMELINE = Timeline(2, "0" * 16)
"""The timeline of a rebuilt manifest whose own one is lost. It is never the newest where another second one exists."""

_FORMAT_WITHOUT_TIMELINES = re.compile(rb'\{\n "holdfast": \{\n  "format": \[\n   1,\n   [0-2]\n  \],\n')
_FORMAT = re.compile(rb'\{\n "holdfast": \{\n  "format": \[\n   (\d{1,9}),\n   (\d{1,9})\n  \],\n')


class Unprovable(Exception):
    """An index or a manifest cannot be rebuilt from the files that exist."""

    def __init__(self, why: str, fqns: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.fqns = sorted(set(fqns))
        """FQNs of tensors that are lost with it."""


def rebuilt_index(location: CheckpointLocation, manifest: Manifest, codecs: Codecs) -> tuple[Index, tuple[int, ...]]:
    """Return the index of a checkpoint with a valid manifest, and the ranks whose packs were read for it.

    The parts list the pieces of their ranks. The packs of a rank are read if its part is damaged.

    Args:
        location: The checkpoint.
        manifest: Its manifest.
        codecs: What decodes coded chunks.
    Raises:
        Unprovable: A pack differs from its record, and the part that could locate the damage is damaged too.
    """
    parts: dict[int, Index] = {}
    for record in manifest.parts:
        rank = rank_of_part(record.name)
        try:
            part = decode_part(read_file(location.store, location.folder, manifest.attempt, record), record.name)
            require_part_of(part, rank, manifest.attempt, record.name)
        except CheckpointError:
            continue
        parts[rank] = part.index
    if not manifest.parts:
        raise Unprovable("it was imported without a copy: it has no parts and no packs from which to rebuild the index")
    from_packs = tuple(rank for rank in range(manifest.world_size) if rank not in parts)
    known = {index.chunk_bytes for index in parts.values()}
    listings = []
    packs_of_rank: dict[int, list[FileRecord]] = {}
    for pack in manifest.packs:
        if is_pack_name(pack.name):
            packs_of_rank.setdefault(rank_of_pack(pack.name), []).append(pack)
    for rank in from_packs:
        packs = packs_of_rank.get(rank)
        if packs:
            listings.append(_index_of_packs(location, manifest, packs, codecs, known))
            known = {listings[-1].chunk_bytes}
    indexes = [*parts.values(), *listings]
    elsewhere = [pack for pack in manifest.packs if step_of_pack(pack.name) is not None]
    if from_packs and elsewhere:
        # A rank without a part may have referenced pieces in packs of other steps. These are the pieces there that no
        # other index lists. If two packs hold such a piece, the pieces overlap, and the merge below proves nothing.
        listed = {(piece.tensor.fqn, piece.region) for part_index in indexes for piece in part_index.all_pieces()}
        indexes.append(_index_of_packs(location, manifest, elsewhere, codecs, known, listed))
    if not indexes:
        raise Unprovable("no part and no pack is left from which to rebuild the index")
    merger = IndexMerger(indexes[0].chunk_bytes)
    try:
        for part_index in indexes:
            merger.add(part_index, location.url)
        return merger.merged(), from_packs
    except CheckpointError as error:
        raise Unprovable(str(error)) from error


def _index_of_packs(
    location: CheckpointLocation,
    manifest: Manifest,
    packs: Sequence[FileRecord],
    codecs: Codecs,
    known: set[int],
    listed: Collection[tuple[str, Region]] = (),
) -> Index:
    """Return an index from the headers of packs. Chunks are decoded, hashed and proven by the digests of the packs.

    Args:
        location: The checkpoint.
        manifest: Its manifest.
        packs: The records of the packs.
        codecs: What decodes coded chunks.
        known: The bytes of a chunk, if known; empty otherwise.
        listed: FQNs and regions to leave out.
    Raises:
        Unprovable: A pack differs from its record.
    """
    builder = None
    listing = PackPieces(manifest, location.packs_of(manifest), codecs)
    for record in packs:
        stored = listing.packs(record.name)
        try:
            header = header_of(stored, record.bytes)
            # No part tells the bytes of a chunk: try every possible power of two, the default first. Only the right one
            # gives the recorded digest.
            candidates = known or {1 << power for power in range(12, 23)}
            if is_coded_pack_name(record.name):
                candidates = {MIB}  # Its header states another, if it has one.
            for chunk_bytes in sorted(candidates, key=lambda count: (count != MIB, count)):
                pieces = listing.of(header, record.name, stored.url, chunk_bytes)
                chunk_bytes = pieces[0].chunk_bytes if pieces else chunk_bytes  # The header of a coded pack states it.
                digests = digests_of(stored, pieces, listing)
                if pack_digest(header, b"".join(digests)) == record.digest:
                    break
            else:
                raise Unprovable(
                    f"{record.name} differs from its record in the manifest, and the part of its rank, which could "
                    "locate the damage, is damaged too",
                    (piece.tensor.fqn for piece in pieces),
                )
        except CheckpointError as error:
            raise Unprovable(f"{record.name}: {error}") from error
        known = {chunk_bytes}
        builder = IndexBuilder(chunk_bytes) if builder is None else builder
        for piece, piece_digests in zip(pieces, digests, strict=True):
            if (piece.tensor.fqn, piece.region) in listed:
                continue
            builder.add(piece.tensor, piece.region, record.name, piece.offset, piece_digests, piece.coding)
    assert builder is not None, "there is a pack"
    return builder.index()


def rebuilt_manifest(
    location: CheckpointLocation,
    damaged: bytes,
    run_id: str | None,
    created: str,
    timeline: Timeline,
    settings: Settings,
) -> Manifest:
    """Return the commit record of a checkpoint with a damaged manifest, from its parts; writes its index again.

    Args:
        location: The checkpoint; the index goes into its store.
        damaged: The damaged manifest.
        run_id: The run, if the root names it.
        created: The time to record if it cannot be read from the damaged manifest.
        timeline: The timeline to record.
        settings: How an index is split.
    Raises:
        Unprovable: A part is missing, unproven, or contradicts another.
    """
    if re.search(rb'^ "masters":', damaged, re.MULTILINE):
        raise Unprovable("the damaged manifest lists the master copies of tensors, and no other file does")
    attempt, votes = _votes(location, damaged)
    where = f"{location.folder}{attempt}/{part_name(0)}"
    chunk_bytes = decode_part(location.store.get(where, INDEX_BYTES_MAX), where).index.chunk_bytes
    run_id = run_id or _line(damaged, "run_id")
    if run_id is None:
        raise Unprovable("neither holdfast.json nor the damaged manifest has a readable run id")
    try:
        merged_parts = merge_parts(location, attempt, votes, chunk_bytes)
        index = write_index(location, attempt, merged_parts.index, settings, [])
    except CheckpointError as error:
        raise Unprovable(str(error)) from error
    manifest = build_manifest(location, attempt, merged_parts, index, run_id, _line(damaged, "created") or created)
    logs = () if location.root is None else location.root.folders(LOG_FOLDER)
    # The first base of a log gives the log its id.
    log = next((each for each in (_line(damaged, "log") or "", attempt) if each in logs), "")
    return replace(manifest, timeline=timeline, log=log)


def require_known_format(damaged: bytes) -> None:
    """Refuse to rebuild a manifest of a newer format: what only a newer Holdfast knows of the step would be lost.

    Args:
        damaged: The damaged manifest.
    Raises:
        Unprovable: It states a newer version of the format.
    """
    stated = _FORMAT.match(damaged)
    if stated is not None and (int(stated[1]), int(stated[2])) > (FORMAT_MAJOR, FORMAT_MINOR_MAX):
        raise Unprovable(
            f"the damaged manifest states format {int(stated[1])}.{int(stated[2])}; this Holdfast writes format "
            f"{FORMAT_MAJOR}.{FORMAT_MINOR_MAX}. Nothing was changed. Repair it with a newer Holdfast"
        )


def timeline_of_damaged(damaged: bytes, stored: RunTimelines, *, has_timelines: bool) -> Timeline:
    """Return the timeline to record in a rebuilt manifest.

    A resume must not take a step that another timeline saved. So if the damaged manifest does not tell its timeline,
    the step counts to `LOST_TIMELINE`, which is in no chain: the step can be loaded by its digest.

    Args:
        damaged: The damaged manifest.
        stored: The other manifests of the run.
        has_timelines: Whether the list of the newest epoch is one with timelines.
    Raises:
        Unprovable: The timeline is lost, and the step may be the only one of the newest timeline.
    """
    if not has_timelines:
        return FIRST_TIMELINE
    stated = timeline_in_damaged(damaged)
    if stated is not None and not any(stated.contradicts(other) for other in stored.known):
        return stated
    if stated is None and _FORMAT_WITHOUT_TIMELINES.match(damaged):
        return FIRST_TIMELINE
    if stored.newest.number == 1:
        raise Unprovable(
            "the damaged manifest does not tell its timeline, and no other step is of a second timeline: whether a "
            "resume must take this step first is unknown"
        )
    return LOST_TIMELINE


def _votes(location: CheckpointLocation, damaged: bytes) -> tuple[str, list[Vote]]:
    """Return the attempt that was published, and the vote of each rank, proven.

    A sealed part proves itself by its own digest. Another part is proven if the damaged manifest still names its size
    and digest.
    """
    attempts = list(filter(is_attempt_folder, location.store.folders(location.folder)))
    if (named := _line(damaged, "attempt")) in attempts:
        attempts = [named]
    if len(attempts) != 1:
        raise Unprovable(f"the damaged manifest names no attempt, and {len(attempts)} attempts exist; expected one")
    (attempt,) = attempts
    votes: dict[int, Vote] = {}
    world_size = int(_line(damaged, "world_size") or 0)
    prefix = f"{location.folder}{attempt}/"
    names = (entry.key.removeprefix(prefix) for entry in location.store.list(f"{prefix}parts/"))
    for name in sorted(filter(is_part_name, names)):
        try:
            data = location.store.get(prefix + name, INDEX_BYTES_MAX)
            digest = hex_digest_of(data)
            if is_sealed(data):
                world_size = decode_part(data, name).world_size or world_size
            elif not _names(damaged, name, len(data), digest):
                raise Unprovable(f"{name}: nothing proves that it is what was saved")
        except CheckpointError as error:
            raise Unprovable(f"{name}: {error}") from error
        votes[rank_of_part(name)] = Vote(len(data), digest)
    absent = sorted(set(range(world_size)) - set(votes))
    if not world_size or absent:
        why = f"the parts of ranks {first_three(absent)} are missing" if absent else "the count of ranks is lost"
        raise Unprovable(f"{why}; values that are not tensors may be lost too")
    return attempt, [votes[rank] for rank in range(world_size)]


def stated_step(text: bytes) -> int | None:
    """Return the step that the text of a manifest states, damaged or not; None if it states none."""
    step = _line(text, "step")
    return int(step) if step is not None and step.isdecimal() else None


def _line(damaged: bytes, name: str) -> str | None:
    """Return a plain field of a damaged manifest as text; None if its line is damaged."""
    match = re.search(rb'^ "%s": ("[^"\\\n]*"|\d+),$' % name.encode(), damaged, re.MULTILINE)
    if match is None:
        return None
    try:
        return str(json.loads(match[1]))
    except (ValueError, UnicodeDecodeError):
        return None


def _names(damaged: bytes, name: str, count: int, digest: str) -> bool:
    """Return whether a damaged manifest still names a file with this size and digest."""
    pattern = rb'"%s",\s*%d,\s*"%s"' % (re.escape(name.encode()), count, digest.encode())
    return re.search(pattern, damaged) is not None


def lost_fields(damaged: bytes) -> list[str]:
    """Return the fields of a damaged manifest that no part repeats, as far as they can be recognized."""
    optional = ("origin", "masters", "metrics", "health")
    lost = [name for name in optional if re.search(rb'^ "%s":' % name.encode(), damaged, re.MULTILINE)]
    if not re.search(rb'^ "state":', damaged, re.MULTILINE):
        # The optional fields stand around the line of `state`. Without it, their lines may be unreadable too.
        lost.append("possibly origin, masters, metrics and health")
    return ["parent", "software", *lost]
