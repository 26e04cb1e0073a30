"""Differences between two checkpoints: from their indexes, and from bytes only if digests do not decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.tensor_reader import BATCH_BYTES, BATCHES_AT_ONCE
from holdfast.engine.casting import common_type
from holdfast.engine.compare import Measure
from holdfast.engine.parallel_map import ordered_parallel_map
from holdfast.geometry.tensor import TensorSpec
from holdfast.offline.diff.values import value_diffs
from holdfast.plan.compare import CompareWindow, batches, unsettled
from holdfast.ports.observer import Observer
from holdfast.types.diff import Diff, NameOnly, TensorDiff, TieDiff, ValueDiff, Verdict
from holdfast.types.events import Progress
from holdfast.types.values import per_rank_paths


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
    names = _TensorNames(a, b, chosen)
    pairs = [_pair(a, b, _PairNames(number, *fqns), cast=cast, full=full) for number, fqns in enumerate(names.pairs())]
    read_bytes = _measure(pairs, a, b, observer)
    return Diff(
        a=a.url,
        b=b.url,
        tensors=tuple(pair.outcome() for pair in pairs),
        only_a=names.only(a, names.of_a, names.of_b),
        only_b=names.only(b, names.of_b, names.of_a),
        ties=tuple(names.ties()),
        values=() if chosen is not None else (*value_diffs(a.objects, b.objects), *_per_rank_diffs(a, b)),
        read_bytes=read_bytes,
        settled_bytes=sum(pair.settled_bytes for pair in pairs),
    )


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


class _TensorNames:
    """Every name of two checkpoints, and the stored tensor that it names in each."""

    def __init__(self, a: Checkpoint, b: Checkpoint, chosen: Callable[[str], bool] | None) -> None:
        self.of_a, self.of_b = _stored_fqns(a, chosen), _stored_fqns(b, chosen)
        self._both = sorted(self.of_a.keys() & self.of_b.keys())

    def pairs(self) -> Iterator[tuple[str, str, str]]:
        """Yield a name and its stored tensor in each, each pair of tensors once."""
        yielded = set()
        for name in self._both:
            pair = self.of_a[name], self.of_b[name]
            if pair not in yielded:
                yielded.add(pair)
                yield name, *pair

    def only(self, checkpoint: Checkpoint, own: Mapping[str, str], other: Mapping[str, str]) -> tuple[NameOnly, ...]:
        """Return the names that the other checkpoint lacks."""
        lacking = []
        for name in sorted(own.keys() - other.keys()):
            spec = checkpoint.index.tensors[own[name]]
            lacking.append(NameOnly(name, spec.dtype, spec.global_shape, own[name] if own[name] != name else None))
        return tuple(lacking)

    def ties(self) -> Iterator[TieDiff]:
        """Yield the common names that are tied to other names in one checkpoint than in the other."""
        of_a, of_b = self._tied(self.of_a), self._tied(self.of_b)
        for name in self._both:
            a, b = self.of_a[name], self.of_b[name]
            if (a != name or b != name) and of_a[a] != of_b[b]:
                yield TieDiff(name, a, b)

    def _tied(self, own: Mapping[str, str]) -> dict[str, set[str]]:
        """Return the common names of each stored tensor."""
        names: dict[str, set[str]] = {}
        for name in self._both:
            names.setdefault(own[name], set()).add(name)
        return names


@dataclass(frozen=True, slots=True)
class _PairNames:
    number: int
    """Which pair it is; its windows carry this number."""
    name: str
    fqn_a: str
    fqn_b: str


@dataclass(slots=True)
class _Pair:
    """A tensor of both checkpoints, to be compared."""

    name: str
    a: TensorSpec
    b: TensorSpec
    verdict: Verdict | None
    """The verdict, if it needs no reading."""
    common: str
    """The dtype to which both are widened; empty if they have one dtype."""
    windows: list[CompareWindow]
    settled_bytes: int
    measure: Measure | None = field(default=None)

    def take(self, measured: Measure) -> None:
        """Add the measure of a part."""
        if self.measure is None:
            self.measure = measured
        else:
            self.measure.merge(measured)

    def outcome(self) -> TensorDiff:
        """Return the verdict and what was measured."""
        change = None if self.measure is None else self.measure.change()
        verdict = self.verdict
        if verdict is None:
            verdict = Verdict.CHANGED if change is not None and change.changed else Verdict.EQUAL
        return TensorDiff(
            fqn=self.name,
            verdict=verdict,
            dtype=(self.a.dtype, self.b.dtype),
            shape=(self.a.global_shape, self.b.global_shape),
            numel=self.a.global_bytes // self.a.itemsize,
            settled_bytes=self.settled_bytes,
            change=change,
        )


def _stored_fqns(checkpoint: Checkpoint, chosen: Callable[[str], bool] | None) -> dict[str, str]:
    names = {**{fqn: fqn for fqn in checkpoint.index.tensors}, **checkpoint.aliases}
    return {name: fqn for name, fqn in names.items() if chosen is None or chosen(name)}


def _pair(a: Checkpoint, b: Checkpoint, names: _PairNames, *, cast: bool, full: bool) -> _Pair:
    spec_a, spec_b = a.index.tensors[names.fqn_a], b.index.tensors[names.fqn_b]
    if spec_a.global_shape != spec_b.global_shape:
        return _Pair(names.name, spec_a, spec_b, Verdict.SHAPE, "", [], 0)
    alike = spec_a.dtype == spec_b.dtype
    common = None if alike or not cast else common_type(spec_a.dtype, spec_b.dtype)
    if not alike and common is None:
        return _Pair(names.name, spec_a, spec_b, Verdict.DTYPE, "", [], 0)
    others = b.index.pieces_of(names.fqn_b) if alike and not full else ()
    windows, settled_bytes = unsettled(names.number, a.index.pieces_of(names.fqn_a), others)
    return _Pair(names.name, spec_a, spec_b, None, common or "", windows, settled_bytes)


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

    total = sum(window.bytes for pair in pairs for window in pair.windows)
    done = read_bytes = 0
    if observer is not None:
        observer.on_event(Progress(0, total))
    work = batches((pair.windows for pair in pairs), BATCH_BYTES, bytes_of)
    for measures, read, compared in ordered_parallel_map(compare, work, BATCHES_AT_ONCE):
        for number, measured in measures.items():
            pairs[number].take(measured)
        done, read_bytes = done + compared, read_bytes + read
        if observer is not None:
            observer.on_event(Progress(done, total))
    return read_bytes
