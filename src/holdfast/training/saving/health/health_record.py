"""Collects health findings of one rank, and finds the health of the last counted checkpoint for the committing rank.

A rank counts non-finite elements while it writes, and hashes its replicas so that the committing rank can compare them.
"""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache

from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import Role, Shard
from holdfast.base.ports.framework import Collected, Source
from holdfast.base.ports.store import Store
from holdfast.base.types.health import Counted, Expectation, Health, ReplicaGroup, Replicas
from holdfast.base.types.manifest import Manifest, Parent
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.format.digest import new_short_digest, short_digest_of
from holdfast.core.format.names import step_folder
from holdfast.errors import CheckpointError, MissingError
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.repository.catalog import read_index, read_manifest
from holdfast.training.coordination.agreement.records import Agreement

logger = logging.getLogger(__name__)

_ANCESTORS_MAX = 100
"""Most ancestors whose manifests are read to find one that was saved with counting."""

REPLICA_WINDOW_BYTES = 1 << 18
"""Bytes copied and hashed at a time. They stay in the processor's cache, and are whole elements of any dtype."""


def counted_in(partial_counts: Iterable[Mapping[str, int]], roles: Mapping[str, Role], settings: Settings) -> Counted:
    """Return the number of non-finite elements in this rank's pieces, by FQN, each with the tensor's `Expectation`.

    Args:
        partial_counts: Counts by FQN, of each pack and of the deduplicated pieces.
        roles: Role of every tensor by FQN.
        settings: Names the tensors that may have non-finite elements.
    """
    counts = Counter[str]()
    for pack_counts in partial_counts:
        counts.update(pack_counts)
    counted: dict[str, tuple[int, Expectation]] = {}
    for fqn, count in counts.items():
        is_expected = any(fnmatchcase(fqn, pattern) for pattern in settings.nonfinite_expected)
        counted[fqn] = count, "expected" if is_expected else roles[fqn].value
    return counted


def replicas_of(collected: Collected, agreement: Agreement) -> Replicas:
    """Return the digests of the shards that other ranks hold too. Call it before training may change the state."""
    buffer = allocate_aligned(REPLICA_WINDOW_BYTES)
    by_holders: dict[tuple[int, ...], list[tuple[int, bytes]]] = {}
    for position, local in enumerate(collected.shards):
        shard = local.shard
        holders = _holders(shard, agreement)
        if len(holders) > 1 and any(piece.numel for piece in shard.pieces):
            digest = content_digest(local.source, shard.pieces, shard.tensor.itemsize, buffer)
            by_holders.setdefault(holders, []).append((position, digest))
    names = tuple(local.shard.tensor.fqn for local in collected.shards) if agreement.is_leader else ()
    groups = [
        ReplicaGroup(
            short_digest_of(repr(holders).encode()),
            tuple(position for position, _ in digests),
            b"".join(digest for _, digest in digests),
        )
        for holders, digests in by_holders.items()
    ]
    return Replicas(platform.node(), agreement.class_ranks[0], names, tuple(groups))


def _holders(shard: Shard, agreement: Agreement) -> tuple[int, ...]:
    """Return the ranks whose copies of a shard must be equal; empty if they may differ."""
    if shard.holders is not None:
        return agreement.siblings.get(shard.tensor.fqn, shard.holders)
    return () if shard.role is Role.BUFFER else agreement.holders_of(shard.tensor.fqn)


def content_digest(source: Source, pieces: Sequence[Region], itemsize: int, buffer: memoryview) -> bytes:
    """Return an 8-byte digest of the bytes that one rank holds of a tensor; different bytes collide with chance 2⁻⁶⁴.

    Args:
        source: The bytes of the shard.
        pieces: The pieces that the rank holds, in order.
        itemsize: Bytes of an element.
        buffer: Scratch memory of `REPLICA_WINDOW_BYTES`.
    """
    state = new_short_digest()
    for piece in pieces:
        piece_bytes = piece.numel * itemsize
        for start in range(0, piece_bytes, REPLICA_WINDOW_BYTES):
            stop = min(start + REPLICA_WINDOW_BYTES, piece_bytes)
            part = buffer[: stop - start]
            source.copy_into(piece, start, stop, part).wait()
            state.update(part)
    return state.digest()


def last_counted_health(
    location: CheckpointLocation, parent: Parent | None
) -> tuple[Health | None, Callable[[str], bool]]:
    """Return the health of the newest ancestor with counts, and a function that tells whether it held an FQN.

    Ancestors saved without counting are skipped, so they do not hide earlier counts.

    Args:
        location: The step being saved.
        parent: The checkpoint that it continues.
    Returns:
        None instead of the health if no such ancestor is known.
    """
    try:
        manifest = _last_counted(location.store, parent)
    except CheckpointError as error:
        logger.warning(
            "%s: the non-finite counts of earlier steps are not known, so those in buffers are not reported: %s",
            location.url,
            error,
        )
        return None, lambda _: False
    if manifest is None or manifest.step is None:
        return None, lambda _: False
    folder = step_folder(manifest.step)

    @cache
    def names() -> frozenset[str]:
        try:
            return frozenset(read_index(location.store, folder, manifest).tensors)
        except CheckpointError as error:
            logger.warning("the tensors of %s are not known, so its buffers count as new: %s", folder, error)
            return frozenset()

    return manifest.health, lambda fqn: fqn in names()


def _last_counted(store: Store, parent: Parent | None) -> Manifest | None:
    """Return the newest ancestor in which non-finite elements were counted; None if none is known.

    Raises:
        CheckpointError: The parent itself cannot be read.
    """
    is_first = True
    for _ in range(_ANCESTORS_MAX):
        if parent is None:
            return None
        try:
            manifest = read_manifest(store, step_folder(parent.step))
        except MissingError:
            if is_first:
                raise
            return None  # Garbage collection removed it, and the older ones.
        if manifest.digest != parent.digest:
            return None  # The step was saved again since.
        if manifest.health is not None and manifest.health.nonfinite is not None:
            return manifest
        parent, is_first = manifest.parent, False
    return None
