"""Differences between two checkpoints: from their indexes, and from bytes only if digests do not decide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.types.diff import Diff, NameOnly, TensorDiff, TieDiff, ValueDiff, Verdict
from holdfast.base.types.values import per_rank_paths
from holdfast.core.engine.casting import common_type
from holdfast.core.engine.compare import Measure
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.plan.compare import CompareWindow, batches, unsettled
from holdfast.offline.diff.values import value_diffs
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.tensor_reader import BATCH_BYTES, BATCHES_AT_ONCE


def differences(
    a: Checkpoint,
    b: Checkpoint,
    *,
    chosen: Callable[[str], bool] | None = None,
    cast: bool = False,
    full: bool = False,
    observer: Observer | None = None,
) -> Diff:
    """Return everything that differs between two checkpoints.

    Args:
        a, b: The two.
        chosen: Returns whether a name is compared. None: compare all, and the values that are not tensors.
        cast: Compare tensors of different dtypes by value, where numpy has a dtype that holds both exactly.
        full: Read chunks with equal digests too, so that norms cover whole tensors.
        observer: Receives progress, in bytes of A.
    Raises:
        CorruptError: Stored bytes differ from what was saved.
    """
    names_a, names_b = _stored_fqns(a, chosen), _stored_fqns(b, chosen)
    common = sorted(names_a.keys() & names_b.keys())
    # A pair of tensors with several common names is compared once, under the first of them.
    pair_names: dict[tuple[str, str], str] = {}
    for name in common:
        pair_names.setdefault((names_a[name], names_b[name]), name)
    pairs = [
        _pair(number, name, (a, fqn_a), (b, fqn_b), cast=cast, full=full)
        for number, ((fqn_a, fqn_b), name) in enumerate(pair_names.items())
    ]
    read_bytes = _measure(pairs, a, b, observer)
    return Diff(
        a=a.url,
        b=b.url,
        tensors=tuple(pair.outcome() for pair in pairs),
        only_a=tuple(_names_only_in(a, names_a, names_b)),
        only_b=tuple(_names_only_in(b, names_b, names_a)),
        ties=tuple(_tie_diffs(common, names_a, names_b)),
        values=() if chosen is not None else (*value_diffs(a.objects, b.objects), *_per_rank_diffs(a, b)),
        read_bytes=read_bytes,
        settled_bytes=sum(pair.settled_bytes for pair in pairs),
    )


def _stored_fqns(checkpoint: Checkpoint, chosen: Callable[[str], bool] | None) -> dict[str, str]:
    """Return the stored tensor of every name, tied names included."""
    names = {**{fqn: fqn for fqn in checkpoint.viewed.tensors}, **checkpoint.aliases}
    return {name: fqn for name, fqn in names.items() if chosen is None or chosen(name)}


def _names_only_in(checkpoint: Checkpoint, names: Mapping[str, str], others: Mapping[str, str]) -> Iterator[NameOnly]:
    """Yield the names of a checkpoint that the other lacks."""
    for name in sorted(names.keys() - others.keys()):
        spec = checkpoint.viewed.tensors[names[name]]
        yield NameOnly(name, spec.dtype, spec.global_shape, names[name] if names[name] != name else None)


def _tie_diffs(common: Sequence[str], names_a: Mapping[str, str], names_b: Mapping[str, str]) -> Iterator[TieDiff]:
    """Yield the common names that are tied to other names in one checkpoint than in the other."""
    tied_a, tied_b = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for name in common:
        tied_a[names_a[name]].add(name)
        tied_b[names_b[name]].add(name)
    for name in common:
        fqn_a, fqn_b = names_a[name], names_b[name]
        if (fqn_a != name or fqn_b != name) and tied_a[fqn_a] != tied_b[fqn_b]:
            yield TieDiff(name, fqn_a, fqn_b)


def _per_rank_diffs(a: Checkpoint, b: Checkpoint) -> Iterator[ValueDiff]:
    """Yield the differences in per-rank values, rank by rank."""
    for rank in range(max(a.manifest.world_size, b.manifest.world_size)):
        yield from value_diffs(_per_rank_values(a, rank), _per_rank_values(b, rank))


def _per_rank_values(checkpoint: Checkpoint, rank: int) -> dict[str, object]:
    """Return the values of one rank by path; empty if fewer ranks saved the checkpoint."""
    manifest = checkpoint.manifest
    if rank >= manifest.world_size or next(per_rank_paths(manifest.tree), None) is None:
        return {}
    return {f"{path}[rank {rank}]": value for path, value in checkpoint.per_rank(rank).items()}


@dataclass(slots=True)
class _Pair:
    """A tensor of both checkpoints, to be compared."""

    name: str
    a: TensorSpec
    b: TensorSpec
    verdict: Verdict | None
    """The verdict, if it needs no reading."""
    common: str = ""
    """The dtype to which both are widened; empty if they have one dtype."""
    windows: list[CompareWindow] = field(default_factory=list)
    settled_bytes: int = 0
    measure: Measure | None = None

    def outcome(self) -> TensorDiff:
        """Return the verdict and what was measured."""
        change = None if self.measure is None else self.measure.change()
        measured = Verdict.CHANGED if change is not None and change.changed else Verdict.EQUAL
        return TensorDiff(
            fqn=self.name,
            verdict=self.verdict or measured,
            dtype=(self.a.dtype, self.b.dtype),
            shape=(self.a.global_shape, self.b.global_shape),
            numel=self.a.global_bytes // self.a.itemsize,
            settled_bytes=self.settled_bytes,
            change=change,
        )


def _pair(
    number: int,
    name: str,
    stored_a: tuple[Checkpoint, str],
    stored_b: tuple[Checkpoint, str],
    *,
    cast: bool,
    full: bool,
) -> _Pair:
    """Return a pair with the windows that must be read; its windows carry its number."""
    (a, fqn_a), (b, fqn_b) = stored_a, stored_b
    spec_a, spec_b = a.viewed.tensors[fqn_a], b.viewed.tensors[fqn_b]
    if spec_a.global_shape != spec_b.global_shape:
        return _Pair(name, spec_a, spec_b, Verdict.SHAPE)
    alike = spec_a.dtype == spec_b.dtype
    common = None if alike or not cast else common_type(spec_a.dtype, spec_b.dtype)
    if not alike and common is None:
        return _Pair(name, spec_a, spec_b, Verdict.DTYPE)
    others = b.whole_pieces(fqn_b) if alike and not full else ()
    windows, settled_bytes = unsettled(number, a.whole_pieces(fqn_a), others)
    return _Pair(name, spec_a, spec_b, None, common or "", windows, settled_bytes)


def _measure(pairs: list[_Pair], a: Checkpoint, b: Checkpoint, observer: Observer | None) -> int:
    """Read and compare every window; return the bytes read of both."""
    from_a, from_b = a.source, b.source

    def compare(batch: tuple[CompareWindow, ...]) -> tuple[dict[int, Measure], int, int]:
        numbered = [(pairs[window.number], window) for window in batch]
        parts_a, read_a = from_a.read([(p.a.fqn, w) for p, w in numbered], [p.a.dtype for p, _ in numbered])
        parts_b, read_b = from_b.read([(p.b.fqn, w) for p, w in numbered], [p.b.dtype for p, _ in numbered])
        measures: dict[int, Measure] = {}
        for (pair, window), of_a, of_b in zip(numbered, parts_a, parts_b, strict=True):
            measures.setdefault(window.number, Measure()).add(of_a, of_b, pair.common)
        return measures, read_a + read_b, sum(window.bytes for window in batch)

    def bytes_of(window: CompareWindow) -> int:
        pair = pairs[window.number]
        return (window.stop - window.start) * max(pair.a.itemsize, pair.b.itemsize)

    progress = ByteProgress(sum(window.bytes for pair in pairs for window in pair.windows), observer)
    progress.add(0)
    read_bytes = 0
    work = batches((pair.windows for pair in pairs), BATCH_BYTES, bytes_of)
    for measures, read, compared in ordered_parallel_map(compare, work, BATCHES_AT_ONCE):
        for number, measured in measures.items():
            pair = pairs[number]
            if pair.measure is None:
                pair.measure = measured
            else:
                pair.measure.merge(measured)
        read_bytes += read
        progress.add(compared)
    return read_bytes
