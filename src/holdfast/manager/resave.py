"""Any checkpoint saved again, as a checkpoint of Holdfast with packs of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from holdfast.engine.copying import PieceReader, StoredSource
from holdfast.engine.write import PackWriter
from holdfast.errors import InvalidError
from holdfast.manager.checkpoint import Checkpoint
from holdfast.manager.handle import SaveReport
from holdfast.manager.job import Job
from holdfast.manager.place import Place, require_no_checkpoint
from holdfast.manager.run import founded
from holdfast.manager.save import Save
from holdfast.ports.framework import Collected, LocalShard
from holdfast.ports.observer import Observer
from holdfast.repository.catalog import check_size
from holdfast.spec.box import Box
from holdfast.spec.plan import Piece
from holdfast.spec.region import Region, flat_run
from holdfast.spec.tensor import Role, Shard, TensorSpec
from holdfast.spec.values import Group, PerRankRef, Value

MODEL = "model"
"""Path of the model in the state of a checkpoint that Holdfast did not write."""


def saved_again(
    source: Checkpoint, place: Place, job: Job, *, model_only: bool = False, observer: Observer | None = None
) -> SaveReport:
    """Save what a checkpoint holds once more, through the way every save goes; its bytes are read once and checked.

    Tensors whose pieces follow one another become one piece; others keep theirs.

    Args:
        source: Any checkpoint: of Holdfast, or of another system.
        place: Where it goes.
        job: This process alone.
        model_only: Leave out what does not lie under `model`.
        observer: Told of progress.
    Raises:
        ConflictError: A checkpoint is there; it was not touched.
        InvalidError: Ranks that saved the source kept values of their own.
        CorruptError: The source is damaged; nothing was committed.
        UnavailableError: Storage failed, or the outcome is unknown.
    """
    assert job.comm.world_size == 1, "one process copies"
    if place.step is not None:
        require_no_checkpoint(place.store)

    def identify() -> str:
        return job.clock.random_bytes(8).hex() if place.step is None else founded(place.store, job.clock)

    def collect() -> Collected:
        return _collected(source, model_only, observer)

    writer = PackWriter(place.store, job.settings)
    inherited = {"origin": source.origin, "masters": _masters(source, model_only)}
    save = Save(job, place, writer, identify, lambda: None, lambda *_: None, awaited=True, inherited=inherited)
    report = save.begin(collect).wait()
    assert report is not None, "committed comes with a report"
    return report


def _collected(source: Checkpoint, model_only: bool, observer: Observer | None) -> Collected:
    def takes_part(name: str) -> bool:
        return _takes_part(name, model_only)

    manifest = source.manifest
    tree = Group("dict", {key: value for key, value in manifest.tree.items.items() if takes_part(key)})
    kept = sorted(_per_rank_paths(tree))
    if kept and manifest.world_size > 1:
        raise InvalidError(
            f"{source.url}: {manifest.world_size} ranks saved it and kept values of their own under {kept[:5]}; "
            "expected none, for one process copies it. Copy its folder, or load it on as many ranks and save it there"
        )
    for pack in manifest.packs:
        stored = source.packs(pack.name)
        check_size(stored.files, stored.key, pack)
    tensors = [spec for fqn, spec in source.index.tensors.items() if takes_part(fqn)]
    reader = PieceReader(source.packs, sum(spec.global_bytes for spec in tensors), observer)
    return Collected(
        shards=[_shard(spec, source.index.pieces_of(spec.fqn), reader) for spec in tensors],
        tree=tree,
        aliases={alias: fqn for alias, fqn in manifest.aliases.items() if takes_part(alias) and takes_part(fqn)},
        skipped=[],
        per_rank={path: value for path, value in source.per_rank(0).items() if path in kept} if kept else {},
    )


def _takes_part(name: str, model_only: bool) -> bool:
    return not model_only or name == MODEL or name.startswith(f"{MODEL}.")


def _masters(source: Checkpoint, model_only: bool) -> dict[str, str]:
    """Return the master copies that are saved again, by what was cast from them."""
    return {
        fqn: master
        for fqn, master in source.manifest.masters.items()
        if all(_takes_part(each, model_only) for each in (fqn, master))
    }


def _per_rank_paths(value: Value) -> Iterator[str]:
    """Yield the paths of values of which every rank keeps its own."""
    if isinstance(value, PerRankRef):
        yield value.path
        return
    items = value.items if isinstance(value, Group) else value
    inner = items.values() if isinstance(items, dict) else items if isinstance(items, list | tuple) else ()
    for each in inner:
        yield from _per_rank_paths(each)


def _shard(spec: TensorSpec, pieces: Sequence[Piece], reader: PieceReader) -> LocalShard:
    regions = _regions(spec, [piece for piece in pieces if piece.bytes])
    shard = Shard(spec, None, (0,), Role.PARAMETER, tuple(regions))
    return LocalShard(shard, StoredSource(reader, regions))


def _regions(spec: TensorSpec, pieces: Sequence[Piece]) -> dict[Region, Sequence[Piece]]:
    """Return what a tensor is saved as: whole where its pieces are runs of its elements, else piece by piece."""
    runs = [(run.start, run.stop, piece) for piece in pieces if (run := flat_run(piece.region, spec.global_shape))]
    if len(runs) < len(pieces):
        return {piece.region: [piece] for piece in pieces}
    runs.sort(key=lambda run: run[:2])
    assert all(one[1] == next_one[0] for one, next_one in pairwise(runs)), "pieces cover a tensor exactly once"
    return {Box.whole(spec.global_shape): [piece for *_, piece in runs]}
