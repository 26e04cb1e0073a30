"""Copies any checkpoint into a checkpoint of Holdfast with packs of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import Region, flat_run
from holdfast.base.geometry.tensor import Role, Shard, TensorSpec
from holdfast.base.ports.framework import Collected, LocalShard
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import Piece
from holdfast.base.types.reports import SaveReport
from holdfast.base.types.values import per_rank_paths
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.format.names import MANIFEST_FILE
from holdfast.errors import InvalidError, first_three
from holdfast.offline.export.request import ExportReport
from holdfast.offline.imports.checksums import require_checksums
from holdfast.offline.imports.stored_source import PieceReader, StoredSource
from holdfast.offline.imports.viewed_source import ViewedSource
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation, require_no_checkpoint
from holdfast.stored.checkpoint.pack_sizes import require_sizes
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.catalog import read_manifest
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.runs.claim_step import claim_step
from holdfast.training.saving.deduplication import Deduplicator
from holdfast.training.saving.save import save_and_wait
from holdfast.training.saving.target import SaveTarget, claim_path


def saved_again(
    source: Checkpoint,
    location: CheckpointLocation,
    job: Job,
    observer: Observer | None = None,
    writer_lease: WriterLease | None = None,
) -> SaveReport:
    """Save the content of a checkpoint again, by an ordinary save; its bytes are checked.

    They are read once; before that, a range is read once more if the source's own files hold a checksum of it.

    A tensor whose pieces are consecutive runs of its elements becomes one piece. Other tensors keep their pieces.

    Args:
        source: Any checkpoint: of Holdfast, or of another system.
        location: Where the copy goes.
        job: This process alone.
        observer: Receives progress.
        writer_lease: The run's, if the copy becomes a step.
    Raises:
        ConflictError: A checkpoint is there; it was not touched. Or another job writes to the run, or a file of the
            source was rewritten meanwhile; nothing was committed.
        InvalidError: Several ranks saved the source, with per-rank values.
        CorruptError: The source is damaged; nothing was committed.
        UnavailableError: Storage failed, or the outcome is unknown.
    """
    assert job.comm.world_size == 1, "one process copies"
    assert (location.step is None) == (writer_lease is None), "steps are written under an epoch, and nothing else is"
    if location.step is not None:
        require_no_checkpoint(location.store)
    require_checksums(source)
    hooks = CopyHooks(source, location, job, observer, writer_lease)
    writer = PackWriter(location.store, job.settings, job.codecs)
    target = SaveTarget(location, writer, Deduplicator(location, None, writer, job.settings), hooks)
    return save_and_wait(job, target, hooks.collect)


class CopyHooks:
    """The save of the content of a checkpoint."""

    def __init__(
        self,
        source: Checkpoint,
        location: CheckpointLocation,
        job: Job,
        observer: Observer | None,
        writer_lease: WriterLease | None,
    ) -> None:
        """Do nothing yet; arguments as `saved_again`."""
        self._source, self._job, self._observer, self._writer_lease = source, job, observer, writer_lease
        self._location = location

    def collect(self) -> Collected:
        """Return the stored tensors and values as a state."""
        source, manifest = self._source, self._source.manifest
        per_rank = sorted(per_rank_paths(manifest.tree))
        if per_rank and manifest.world_size > 1:
            raise InvalidError(
                f"{source.url}: {manifest.world_size} ranks saved it, with per-rank values under "
                f"{first_three(per_rank)}; expected none, since one process copies it. Copy its folder, or load it on "
                "as many ranks and save it there"
            )
        require_sizes(manifest.packs, source.packs, manifest.step)
        tensors, content = source.viewed.tensors.values(), source.content
        pack_bytes = {pack.name: pack.bytes for pack in manifest.packs}
        total_bytes = sum(spec.global_bytes for spec in tensors)
        reader = PieceReader(source.packs, pack_bytes, total_bytes, source.codecs, self._observer)
        shards = []
        for spec in tensors:
            stored = source.viewed.renamed(spec.fqn)
            if stored is None:
                whole = Shard(spec, None, (0,), Role.PARAMETER, (Box.whole(spec.global_shape),))
                shards.append(LocalShard(whole, ViewedSource(source, spec)))
                continue
            regions = _regions(spec, [piece for piece in source.index.pieces_of(stored) if piece.bytes])
            shard = Shard(spec, None, (0,), Role.PARAMETER, tuple(regions))
            shards.append(LocalShard(shard, StoredSource(reader, regions)))
        return Collected(
            shards=shards,
            tree=content.tree,
            aliases=content.aliases,
            skipped=[],
            per_rank=source.per_rank(0) if per_rank else {},
            optimizers=manifest.optimizers,
            order=content.order,
        )

    def claim(self, is_held: bool) -> SaveContext:
        """Claim the location, and carry over the source's origin, master copies, metrics and health."""
        manifest = self._source.manifest
        if self._writer_lease is None:
            context = claim_path(self._location, self._job)
        else:
            context = claim_step(self._location, self._writer_lease, self._job.clock)
        return replace(
            context,
            origin=self._source.origin,
            masters={} if self._source.layouts else manifest.masters,
            metrics=manifest.metrics,
            # The source's findings: a copy knows neither the roles of tensors nor an earlier checkpoint.
            health=manifest.health,
        )

    def check_again(self, manifest: Manifest) -> None:
        """Check that the source did not change: everything is copied by now.

        Raises:
            ConflictError: A file of the source was rewritten meanwhile.
        """
        self._source.require_unchanged()

    def committed(self, context: SaveContext, manifest_digest: str) -> tuple[str, ...]:
        """Do nothing: a copy gets no tags."""
        return ()


def exported(source: Checkpoint, store: Store, job: Job, observer: Observer | None = None) -> ExportReport:
    """Copy a checkpoint to a store that holds no other.

    Arguments and errors as `saved_again`.
    """
    start = job.clock.monotonic_seconds()
    with source.blaming_overwrite():
        report = saved_again(source, CheckpointLocation(store, "", None), job, observer)
    copy = read_manifest(store, "")
    files = {f"{copy.attempt}/{file.name}": file.bytes for file in copy.files}
    return ExportReport(
        url=report.url,
        format="holdfast",
        files={MANIFEST_FILE: store.size(MANIFEST_FILE), **files},
        resumed_bytes=0,
        read_bytes=report.bytes,
        seconds=job.clock.monotonic_seconds() - start,
        begun_anew=False,
    )


def _regions(spec: TensorSpec, pieces: Sequence[Piece]) -> dict[Region, Sequence[Piece]]:
    """Return the regions in which a tensor is saved: one if its pieces are runs of its elements, else its pieces."""
    runs = [(run.start, run.stop, piece) for piece in pieces if (run := flat_run(piece.region, spec.global_shape))]
    if len(runs) < len(pieces):
        return {piece.region: [piece] for piece in pieces}
    runs.sort(key=lambda run: run[:2])
    assert all(one[1] == next_one[0] for one, next_one in pairwise(runs)), "pieces cover a tensor exactly once"
    return {Box.whole(spec.global_shape): [piece for *_, piece in runs]}
