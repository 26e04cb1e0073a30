"""Index and manifest of a checkpoint made again from what else is there; nothing that is not proven."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.location import CheckpointLocation
from holdfast.coordination.commit_vote import Vote
from holdfast.engine.buffers import allocate_aligned
from holdfast.errors import CheckpointError, CorruptError
from holdfast.format.digest import digest_of, hex_digest_of
from holdfast.format.index.index import Index, IndexMerger
from holdfast.format.index.index_builder import IndexBuilder
from holdfast.format.index.index_file import INDEX_BYTES_MAX
from holdfast.format.names import is_pack_name, is_part_name, part_name, rank_of_pack, rank_of_part, step_of_pack
from holdfast.format.pack import HEADER_BYTES_MAX, pack_digest
from holdfast.format.pack_recovery import StatedPiece, stated_pieces
from holdfast.format.part import decode_part, is_sealed, require_part_of
from holdfast.geometry.region import Region
from holdfast.ports.store import Stored
from holdfast.repository.catalog import read_file
from holdfast.saving.commit import build_manifest, write_index
from holdfast.saving.merge import MergedParts, merge_parts
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.types.manifest import FileRecord, Manifest

_CHUNK_BYTES_MAX = 4 * MIB


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """An index, and where it came from."""

    index: Index
    """Every tensor and piece."""

    from_packs: tuple[int, ...]
    """Ranks whose part was of no use, so that their packs told it."""


class Unprovable(Exception):
    """Something cannot be made again from what is there."""

    def __init__(self, why: str, fqns: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.fqns = sorted(set(fqns))
        """Tensors that are lost with it."""


def rebuilt_index(location: CheckpointLocation, manifest: Manifest) -> Rebuilt:
    """Return the index of a checkpoint whose manifest is whole, from its parts, or where they are damaged its packs.

    Raises:
        Unprovable: A pack is not what the manifest says, and the part that could tell where is not either.
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
        raise Unprovable("it was imported without a copy: no parts and no packs of its own tell what is in it")
    from_packs = tuple(rank for rank in range(manifest.world_size) if rank not in parts)
    known = {index.chunk_bytes for index in parts.values()}
    listings = []
    for rank in from_packs:
        packs = [pack for pack in manifest.packs if is_pack_name(pack.name) and rank_of_pack(pack.name) == rank]
        if packs:
            listings.append(_index_of_packs(location, manifest, packs, known))
            known = {listings[-1].chunk_bytes}
    indexes = [*parts.values(), *listings]
    elsewhere = [pack for pack in manifest.packs if step_of_pack(pack.name) is not None]
    if from_packs and elsewhere:
        # A rank refers to pieces in packs of other steps for what it did not write: all that nobody else lists. Where
        # two of these packs could be meant, the pieces overlap, and nothing is proven.
        listed = {(piece.tensor.fqn, piece.region) for each in indexes for piece in each.all_pieces()}
        indexes.append(_index_of_packs(location, manifest, elsewhere, known, listed))
    if not indexes:
        raise Unprovable("neither a part nor a pack tells what is in it")
    merging = IndexMerger(indexes[0].chunk_bytes)
    try:
        for each in indexes:
            merging.add(each, location.url)
        index = merging.merged()
    except CheckpointError as error:
        raise Unprovable(str(error)) from error
    return Rebuilt(index, from_packs)


def _index_of_packs(
    location: CheckpointLocation,
    manifest: Manifest,
    packs: Sequence[FileRecord],
    known: set[int],
    listed: Collection[tuple[str, Region]] = (),
) -> Index:
    """Return what packs say of themselves, their chunks hashed anew and proven by the digests of the packs."""
    found = None
    for record in packs:
        stored = location.packs_of(manifest)(record.name)
        try:
            header = _header_of(stored, record)
            pieces = stated_pieces(header, record.name, stored.url)
            tried = known or {1 << power for power in range(12, 23)}
            for chunk_bytes in sorted(tried, key=lambda each: (each != MIB, each)):
                digests = _digests_of(stored, pieces, chunk_bytes)
                if pack_digest(header, b"".join(digests)) == record.digest:
                    break
            else:
                raise Unprovable(
                    f"{record.name} is not what the manifest says, and the part of its rank that could tell where "
                    "is damaged too",
                    (piece.tensor.fqn for piece in pieces),
                )
        except CheckpointError as error:
            raise Unprovable(f"{record.name}: {error}") from error
        known = {chunk_bytes}
        found = IndexBuilder(chunk_bytes) if found is None else found
        for piece, each in zip(pieces, digests, strict=True):
            if (piece.tensor.fqn, piece.region) in listed:
                continue
            found.add(piece.tensor, piece.region, record.name, piece.start, each)
    assert found is not None, "there is a pack"
    return found.index()


def _header_of(stored: Stored, record: FileRecord) -> bytes:
    length = int.from_bytes(_bytes_of(stored, 0, 8), "little")
    if not 0 < length <= min(HEADER_BYTES_MAX, record.bytes - 8):
        raise CorruptError(f"{stored.url}: a header of {length} bytes; expected at most {HEADER_BYTES_MAX}")
    return _bytes_of(stored, 0, 8 + length)


def _bytes_of(stored: Stored, start: int, stop: int) -> bytes:
    (data,) = stored.files.get_ranges(stored.key, [(start, stop)], [allocate_aligned(stop - start + 2 * PAGE_BYTES)])
    return bytes(data)


def _digests_of(stored: Stored, pieces: Sequence[StatedPiece], chunk_bytes: int) -> list[bytes]:
    buffer = allocate_aligned(_CHUNK_BYTES_MAX + 2 * PAGE_BYTES)
    digests = []
    for piece in pieces:
        own = b""
        for start in range(piece.start, piece.stop, chunk_bytes):
            (data,) = stored.files.get_ranges(stored.key, [(start, min(start + chunk_bytes, piece.stop))], [buffer])
            own += digest_of(data)
        digests.append(own)
    return digests


def rebuilt_manifest(
    location: CheckpointLocation, damaged: bytes, run_id: str | None, created: str, settings: Settings
) -> Manifest:
    """Return the commit record of a checkpoint whose manifest is damaged, from its parts; its index is written anew.

    Args:
        place: The checkpoint; the index goes into its store.
        damaged: What is left of the manifest.
        run_id: The run, if the root tells it.
        created: The time to be told where the manifest no longer does.
        settings: How an index is split.
    Raises:
        Unprovable: A part is missing, or cannot be proven, or what they say does not make a whole.
    """
    if re.search(rb'^ "masters":', damaged, re.MULTILINE):
        raise Unprovable("it told which tensors are master copies of others, and nothing else does")
    attempt, votes = _votes(location, damaged)
    where = f"{location.folder}{attempt}/{part_name(0)}"
    chunk_bytes = decode_part(location.store.get(where, INDEX_BYTES_MAX), where).index.chunk_bytes
    run_id = run_id or _line(damaged, "run_id")
    if run_id is None:
        raise Unprovable("neither holdfast.json nor what is left of the manifest says which run it belongs to")
    try:
        whole: MergedParts = merge_parts(location, attempt, votes, chunk_bytes)
        index = write_index(location, attempt, whole.index, settings, [])
    except CheckpointError as error:
        raise Unprovable(str(error)) from error
    return build_manifest(location, attempt, whole, index, run_id, _line(damaged, "created") or created)


def _votes(location: CheckpointLocation, damaged: bytes) -> tuple[str, list[Vote]]:
    """Return the attempt that was published and what each of its ranks voted for, each proven."""
    attempts = _attempts(location, damaged)
    if len(attempts) != 1:
        raise Unprovable(
            f"the manifest does not say which attempt it published, and {len(attempts)} are there; expected one"
        )
    (attempt,) = attempts
    found: dict[int, Vote] = {}
    said = _line(damaged, "world_size")
    world_size = int(said) if said is not None else 0
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
        found[rank_of_part(name)] = Vote(len(data), digest)
    absent = sorted(set(range(world_size)) - set(found))
    if not world_size or absent:
        told = f"the parts of ranks {absent[:20]} are missing" if absent else "nothing says how many ranks saved it"
        raise Unprovable(f"{told}; with them the values that are not tensors may be lost")
    return attempt, [found[rank] for rank in range(world_size)]


def _attempts(location: CheckpointLocation, damaged: bytes) -> list[str]:
    there = [name for name in location.store.folders(location.folder) if re.fullmatch("[0-9a-f]{16}", name)]
    named = _line(damaged, "attempt")
    return [named] if named in there else there


def _line(damaged: bytes, name: str) -> str | None:
    """Return a plain field of a damaged manifest, as text, if its line is still one."""
    match = re.search(rb'^ "%s": ("[^"\\\n]*"|\d+),$' % name.encode(), damaged, re.MULTILINE)
    if match is None:
        return None
    try:
        return str(json.loads(match[1]))
    except (ValueError, UnicodeDecodeError):
        return None


def _names(damaged: bytes, name: str, count: int, digest: str) -> bool:
    """Return whether what is left of a manifest names a file with this content."""
    pattern = rb'"%s",\s*%d,\s*"%s"' % (re.escape(name.encode()), count, digest.encode())
    return re.search(pattern, damaged) is not None


def no_longer_told(damaged: bytes) -> list[str]:
    """Return what a manifest said that no part repeats, as far as can be seen."""
    optional = ("origin", "masters", "metrics", "health")
    lost = [name for name in optional if re.search(rb'^ "%s":' % name.encode(), damaged, re.MULTILINE)]
    if not re.search(rb'^ "state":', damaged, re.MULTILINE):
        lost.append("whatever of origin, masters, metrics and health it said")
    return ["parent", "software", *lost]
