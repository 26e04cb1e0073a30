"""The part of one rank: the index of the pieces, and the other facts that the committing rank needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.base.ports.framework import Collected
from holdfast.base.types.plan import PlannedPack
from holdfast.core.engine.gc_pause import GcPause
from holdfast.core.engine.writing.write import WrittenPack
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.part import RankPart
from holdfast.core.format.state_order import numbers_of, paths_of
from holdfast.training.coordination.agreement.records import Agreement
from holdfast.training.coordination.job import Job
from holdfast.training.saving.deduplication import Deduplicator
from holdfast.training.saving.fingerprint import StateFingerprint
from holdfast.training.saving.health.health_record import counted_in, replicas_of


class PartBuilder:
    """Builds the part of one rank. Holds no tensor memory, so that the state can be freed."""

    def __init__(self, job: Job, collected: Collected, fingerprint: StateFingerprint, agreement: Agreement) -> None:
        """Take the facts of the part from the state. Hash the replicas, if `compare_replicas` is on."""
        settings, is_leader = job.settings, agreement.is_leader
        self._job, self._attempt_id, self._per_rank = job, agreement.attempt, fingerprint.per_rank_bytes
        # The leader records the facts of a class of ranks. The leader lists every tensor, so that the merge notices a
        # tensor that no rank wrote.
        self._tensors = [local.shard.tensor for local in collected.shards] if is_leader else []
        self._aliases = dict(collected.aliases) if is_leader else {}
        self._layouts = layouts_of(collected) if is_leader else ()
        self._tree = fingerprint.tree_bytes if is_leader else None
        self._optimizers = dict(collected.optimizers) if is_leader else {}
        self._order = collected.order if is_leader else ()
        self._others = [*collected.aliases, *paths_of(collected.tree)] if self._order else []
        self._replicas = replicas_of(collected, agreement) if settings.compare_replicas else None
        shards = collected.shards if settings.count_nonfinite else ()
        self._roles = {local.shard.tensor.fqn: local.shard.role for local in shards}

    def part(
        self, deduplicator: Deduplicator, packs: Sequence[PlannedPack], written: Sequence[WrittenPack]
    ) -> RankPart:
        """Return the part of this rank. Call it once: the builder drops the tensors.

        Args:
            deduplicator: Knows the pieces in earlier steps; records the pieces written now.
            packs, written: Planned packs and the result of each.
        """
        settings = self._job.settings
        with GcPause():
            builder = IndexBuilder(settings.chunk_bytes, self._tensors)
            for pack, result in zip(packs, written, strict=True):
                builder.add_pack(pack.plan, pack.header_bytes, result.digests, result.codings)
                deduplicator.record_written(pack, result, self._attempt_id)
            for piece in deduplicator.unchanged_pieces:
                builder.add(piece.tensor, piece.region, piece.pack, piece.offset, piece.digests, piece.coding)
            index = builder.index()
        counts = (*(result.nonfinite for result in written), deduplicator.nonfinite)
        order, self._tensors, self._order = numbers_of(self._order, index.table.fqns, self._others), [], ()
        return RankPart(
            rank=self._job.comm.rank,
            attempt=self._attempt_id,
            index=index,
            packs=(*(result.record for result in written), *deduplicator.packs),
            tree=self._tree,
            aliases=self._aliases,
            layouts=self._layouts,
            per_rank=self._per_rank,
            counted=counted_in(counts, self._roles, settings) if settings.count_nonfinite else None,
            replicas=self._replicas,
            world_size=self._job.comm.world_size,
            optimizers=self._optimizers,
            order=order,
        )


def layouts_of(collected: Collected) -> tuple[tuple[tuple[int, ...], tuple[str, ...], int], ...]:
    """Return mesh shapes and placements, each with the number of tensors on this rank that have them."""
    counts = Counter(
        (shard.layout.mesh_shape, tuple(map(str, shard.layout.placements)))
        for shard in (local.shard for local in collected.shards)
        if shard.layout is not None
    )
    return tuple((mesh, placements, count) for (mesh, placements), count in sorted(counts.items()))
