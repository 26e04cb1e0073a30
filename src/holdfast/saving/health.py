"""What one rank finds of the health of what it saves, and what the committing rank knows of the checkpoint before."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache

from holdfast.checkpoint.location import CheckpointLocation
from holdfast.coordination.agreement import Agreement
from holdfast.coordination.job import Job
from holdfast.engine.buffers import allocate_aligned
from holdfast.errors import CheckpointError, MissingError
from holdfast.format.digest import short_digest_of
from holdfast.format.names import step_folder
from holdfast.geometry.tensor import Role, Shard
from holdfast.ports.framework import Collected
from holdfast.ports.store import Store
from holdfast.repository.catalog import read_index, read_manifest
from holdfast.saving.replica_digest import REPLICA_WINDOW_BYTES, content_digest
from holdfast.settings import Settings
from holdfast.types.health import Counted, Expectation, Health, ReplicaGroup, Replicas
from holdfast.types.manifest import Manifest, Parent

logger = logging.getLogger(__name__)

_ANCESTORS_MAX = 100
"""Steps saved without counting that are looked past at most, each a manifest to read."""


class HealthScan:
    """One save's look at what a rank writes and at the copies it holds; made at the call, before training goes on."""

    def __init__(self, collected: Collected, agreement: Agreement, job: Job) -> None:
        """Hash the copies, if that is asked for."""
        settings = job.settings
        self._settings = settings
        self._roles: dict[str, Role] = {}
        if settings.count_nonfinite:
            self._roles = {each.shard.tensor.fqn: each.shard.role for each in collected.shards}
        self.replicas = _replicas(collected, agreement) if settings.compare_replicas else None
        """The copies this rank holds of what others hold too; None where they are not compared."""

    def counted(self, found: Iterable[Mapping[str, int]]) -> Counted | None:
        """Return the non-finite elements of what was written or left; None where they are not counted.

        Args:
            found: Counts of parts of it, by FQN.
        """
        if not self._settings.count_nonfinite:
            return None
        counts: dict[str, int] = {}
        for part in found:
            for fqn, count in part.items():
                counts[fqn] = counts.get(fqn, 0) + count
        return {fqn: (count, _expectation(fqn, self._roles[fqn], self._settings)) for fqn, count in counts.items()}


def _expectation(fqn: str, role: Role, settings: Settings) -> Expectation:
    return "expected" if any(fnmatchcase(fqn, each) for each in settings.nonfinite_expected) else role.value


def _replicas(collected: Collected, agreement: Agreement) -> Replicas:
    buffer = allocate_aligned(REPLICA_WINDOW_BYTES)
    held: dict[tuple[int, ...], list[tuple[int, bytes]]] = {}
    for position, each in enumerate(collected.shards):
        shard = each.shard
        holders = _holders(shard, agreement)
        if len(holders) > 1 and any(piece.numel for piece in shard.pieces):
            digest = content_digest(each.source, shard.pieces, shard.tensor.itemsize, buffer)
            held.setdefault(holders, []).append((position, digest))
    names = tuple(each.shard.tensor.fqn for each in collected.shards) if agreement.is_leader else ()
    groups = [
        ReplicaGroup(
            short_digest_of(repr(holders).encode()),
            tuple(position for position, _ in own),
            b"".join(digest for _, digest in own),
        )
        for holders, own in held.items()
    ]
    return Replicas(platform.node(), agreement.class_ranks[0], names, tuple(groups))


def _holders(shard: Shard, agreement: Agreement) -> tuple[int, ...]:
    """Return the ranks whose copies of a shard must be equal; none where they may differ."""
    if shard.holders is not None:
        return shard.holders
    return () if shard.role is Role.BUFFER else agreement.holders_of(shard.tensor.fqn)


def last_counted_health(
    location: CheckpointLocation, parent: Parent | None
) -> tuple[Health | None, Callable[[str], bool]]:
    """Return what was found in the last checkpoint before a step in which it was counted, and whether that held an FQN.

    A checkpoint that was saved without counting does not make anybody forget what was counted before it.

    Args:
        place: The step.
        parent: The checkpoint that it continues.
    Returns:
        None where it is not known.
    """
    try:
        manifest = _last_counted(location.store, parent)
    except CheckpointError as error:
        logger.warning(
            "how many non-finite values the steps before %s had is not known; those in buffers are taken as meant: %s",
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
            logger.warning("which tensors %s holds is not known; buffers are taken as new: %s", folder, error)
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
            return None  # Collected, as older ones are.
        if manifest.digest != parent.digest:
            return None  # Saved anew since.
        if manifest.health is not None and manifest.health.nonfinite is not None:
            return manifest
        parent, is_first = manifest.parent, False
    return None
