"""The part of one rank: the index of what it wrote, and what else the committing rank needs from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.coordination.job import Job
from holdfast.coordination.records import Agreement
from holdfast.engine.gc_pause import GcPause
from holdfast.engine.write import WrittenPack
from holdfast.format.index.index_builder import IndexBuilder
from holdfast.format.part import RankPart
from holdfast.geometry.tensor import TensorSpec
from holdfast.ports.framework import Collected
from holdfast.saving.deduplication import Deduplicator
from holdfast.saving.fingerprint import StateFingerprint
from holdfast.saving.health import HealthScan
from holdfast.types.plan import PlannedPack


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Contents of a rank's part besides its pieces. Holds no tensor memory, so that the state can be freed."""

    tensors: Sequence[TensorSpec]
    """On the leader of a class, all tensors of the class: the merge must notice a tensor that no rank wrote."""

    aliases: dict[str, str]
    """On the leader: tied names."""

    layouts: tuple[tuple[tuple[int, ...], tuple[str, ...], int], ...]
    """On the leader: meshes and placements, as provenance."""

    tree: bytes | None
    """On the leader: the non-tensor state, encoded."""

    per_rank: bytes | None
    """This rank's own values, encoded; None if it has none."""

    health_scan: HealthScan
    """Health of this rank's state."""

    @classmethod
    def of(
        cls, collected: Collected, fingerprint: StateFingerprint, agreement: Agreement, health_scan: HealthScan
    ) -> RankFacts:
        """Return the facts of a collected state."""
        is_leader = agreement.is_leader
        return cls(
            tensors=[local.shard.tensor for local in collected.shards] if is_leader else [],
            aliases=dict(collected.aliases) if is_leader else {},
            layouts=layouts_of(collected) if is_leader else (),
            tree=fingerprint.tree_bytes if is_leader else None,
            per_rank=fingerprint.per_rank_bytes,
            health_scan=health_scan,
        )


def layouts_of(collected: Collected) -> tuple[tuple[tuple[int, ...], tuple[str, ...], int], ...]:
    """Return mesh shapes and placements, each with the number of tensors on this rank that have them."""
    counts = Counter(
        (shard.layout.mesh_shape, tuple(map(str, shard.layout.placements)))
        for shard in (local.shard for local in collected.shards)
        if shard.layout is not None
    )
    return tuple((mesh, placements, count) for (mesh, placements), count in sorted(counts.items()))


def build_part(
    job: Job,
    attempt_id: str,
    facts: RankFacts,
    deduplicator: Deduplicator,
    packs: Sequence[PlannedPack],
    written: Sequence[WrittenPack],
) -> RankPart:
    """Return the part of this rank.

    Args:
        job: The ranks.
        attempt_id: Id of the attempt.
        facts: Contents of the part besides the pieces.
        deduplicator: Knows the pieces in earlier steps; records those written now.
        packs, written: Planned packs and the result of each.
    """
    with GcPause():
        builder = IndexBuilder(job.settings.chunk_bytes, facts.tensors)
        for pack, result in zip(packs, written, strict=True):
            builder.add_pack(pack.plan, len(pack.header), result.digests)
            deduplicator.record_written(pack, result, attempt_id)
        for piece in deduplicator.unchanged_pieces:
            builder.add(piece.tensor, piece.region, piece.pack, piece.offset, piece.digests)
        index = builder.index()
    return RankPart(
        rank=job.comm.rank,
        attempt=attempt_id,
        index=index,
        packs=(*(result.record for result in written), *deduplicator.packs),
        tree=facts.tree,
        aliases=facts.aliases,
        layouts=facts.layouts,
        per_rank=facts.per_rank,
        counted=facts.health_scan.counted([*(result.nonfinite for result in written), deduplicator.nonfinite]),
        replicas=facts.health_scan.replicas,
        world_size=job.comm.world_size,
    )
