"""What one rank finds of the health of what it saves, and what the committing rank knows of the checkpoint before."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from holdfast.engine.replica import REPLICA_WINDOW_BYTES, content_digest
from holdfast.engine.slabs import new_slab
from holdfast.errors import CheckpointError
from holdfast.manager.job import Job
from holdfast.manager.opening import Agreement
from holdfast.manager.place import Place
from holdfast.ports.framework import Collected
from holdfast.repository.catalog import read_manifest
from holdfast.repository.digest import short_digest_of
from holdfast.repository.names import step_folder
from holdfast.settings import Settings
from holdfast.spec.health import Counted, Expectation, Health, ReplicaGroup, Replicas
from holdfast.spec.manifest import Parent
from holdfast.spec.tensor import Role, Shard

logger = logging.getLogger(__name__)


class Watch:
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
    slab = new_slab(REPLICA_WINDOW_BYTES)
    held: dict[tuple[int, ...], list[tuple[int, bytes]]] = {}
    for position, each in enumerate(collected.shards):
        shard = each.shard
        holders = _holders(shard, agreement)
        if len(holders) > 1 and any(piece.numel for piece in shard.pieces):
            digest = content_digest(each.source, shard.pieces, shard.tensor.itemsize, slab)
            held.setdefault(holders, []).append((position, digest))
    names = tuple(each.shard.tensor.fqn for each in collected.shards) if agreement.speaks else ()
    groups = [
        ReplicaGroup(
            short_digest_of(repr(holders).encode()),
            tuple(position for position, _ in own),
            b"".join(digest for _, digest in own),
        )
        for holders, own in held.items()
    ]
    return Replicas(platform.node(), agreement.own_class[0], names, tuple(groups))


def _holders(shard: Shard, agreement: Agreement) -> tuple[int, ...]:
    """Return the ranks whose copies of a shard must be equal; none where they may differ."""
    if shard.holders is not None:
        return shard.holders
    return () if shard.role is Role.BUFFER else agreement.holders_of(shard.tensor.fqn)


def health_of_parent(place: Place, parent: Parent | None) -> Health | None:
    """Return what was found of the checkpoint that a step continues; None where that is not known."""
    if parent is None:
        return None
    try:
        return read_manifest(place.store, step_folder(parent.step)).health
    except CheckpointError as error:
        logger.warning(
            "how many non-finite values step %d had is not known; those in buffers are taken as meant: %s",
            parent.step,
            error,
        )
        return None
