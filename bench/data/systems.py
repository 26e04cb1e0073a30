"""Loaders with a state, each as one rank of a job uses it: ours and its rivals.

Every rank makes its part of a step of `GLOBAL_BATCH` samples. A system yields the samples of each step, and returns the
state after a step. `datasets` has the samples in rows of a table, and litdata in chunks of a folder; the others read a
list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import DataLoader, DistributedSampler

SAMPLES, GLOBAL_BATCH, SEED = 497, 12, 7


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a job."""

    rank: int
    ranks: int
    workers: int
    folder: Path
    """Where a system may keep its form of the data set."""

    @property
    def batch(self) -> int:
        """Return the samples of a step on this rank; every number of ranks that is tried divides a step."""
        return GLOBAL_BATCH // self.ranks


class System(Protocol):
    """The loader of one rank."""

    def __init__(self, place: Place) -> None: ...

    def steps(self) -> Iterator[Any]:
        """Yield the samples of each step of this rank, to the end of the epoch."""

    def state(self) -> Any:
        """Return the state after the last step that was yielded."""

    def resume(self, state: Any) -> None:
        """Go on at a state, before the first step."""


class Loader:
    """Ours: `Loader`."""

    def __init__(self, place: Place) -> None:
        import holdfast.data

        self._loader = holdfast.data.Loader(
            list(range(SAMPLES)),
            global_batch=GLOBAL_BATCH,
            micro_batch=place.batch,
            seed=SEED,
            num_workers=place.workers,
        )

    def steps(self) -> Iterator[Any]:
        for step in self._loader.steps(epochs=1):
            # A repeat that fills up a step has the weight 0.
            taken = [batch for batch, weight in step if weight]
            self._loader.step_done()
            yield [sample for batch in taken for sample in batch.tolist()]

    def state(self) -> Any:
        return self._loader.state_dict()

    def resume(self, state: Any) -> None:
        self._loader.load_state_dict(state)


class Batches:
    """Ours: `Batches` under a plain `DataLoader`."""

    def __init__(self, place: Place) -> None:
        import holdfast.data

        self._batches = holdfast.data.Batches(SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=place.batch, seed=SEED)
        self._loader = DataLoader(list(range(SAMPLES)), batch_sampler=self._batches, num_workers=place.workers)  # type: ignore[arg-type]

    def steps(self) -> Iterator[Any]:
        for batch in self._loader:
            self._batches.step_done()
            yield batch

    def state(self) -> Any:
        return self._batches.state_dict()

    def resume(self, state: Any) -> None:
        self._batches.load_state_dict(state)


class _Stateful:
    """A loader with `state_dict` and `load_state_dict`."""

    loader: Any

    def steps(self) -> Iterator[Any]:
        yield from self.loader

    def state(self) -> Any:
        return self.loader.state_dict()

    def resume(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class Torchdata(_Stateful):
    """`StatefulDataLoader` with torch's `DistributedSampler`."""

    def __init__(self, place: Place) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        numbers = list(range(SAMPLES))
        sampler: DistributedSampler[int] = DistributedSampler(numbers, place.ranks, place.rank, seed=SEED)  # type: ignore[arg-type]
        self.loader = StatefulDataLoader(numbers, place.batch, sampler=sampler, num_workers=place.workers)


class DatasetsByRows(_Stateful):
    """A `Dataset` split by node, under `StatefulDataLoader`: it has no state of its own."""

    def __init__(self, place: Place) -> None:
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        rows = Dataset.from_dict({"sample": list(range(SAMPLES))}).shuffle(seed=SEED)
        own = split_dataset_by_node(rows, place.rank, place.ranks)
        self.loader = StatefulDataLoader(own, place.batch, num_workers=place.workers)

    def steps(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch["sample"]


class DatasetsByShards(DatasetsByRows):
    """An `IterableDataset` of 12 shards split by node, with its own state, under `StatefulDataLoader`."""

    def __init__(self, place: Place) -> None:
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        rows = Dataset.from_dict({"sample": list(range(SAMPLES))}).shuffle(seed=SEED)
        own = split_dataset_by_node(rows.to_iterable_dataset(num_shards=12), place.rank, place.ranks)
        self.loader = StatefulDataLoader(own, place.batch, num_workers=place.workers)


class DatasetsAlone:
    """The same without a loader and without workers."""

    def __init__(self, place: Place) -> None:
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node

        rows = Dataset.from_dict({"sample": list(range(SAMPLES))}).shuffle(seed=SEED)
        self._own = split_dataset_by_node(rows.to_iterable_dataset(num_shards=12), place.rank, place.ranks)
        self._batch = place.batch

    def steps(self) -> Iterator[Any]:
        yield from _grouped(self._own, self._batch)

    def state(self) -> Any:
        return self._own.state_dict()

    def resume(self, state: Any) -> None:
        self._own.load_state_dict(state)


def _grouped(rows: Any, batch: int) -> Iterator[list[int]]:
    group: list[int] = []
    for row in rows:
        group.append(row["sample"])
        if len(group) == batch:
            yield group
            group = []
    if group:
        yield group


class _Grain:
    """An iterator of Grain."""

    iterator: Any

    def steps(self) -> Iterator[Any]:
        yield from self.iterator

    def state(self) -> Any:
        return self.iterator.get_state()

    def resume(self, state: Any) -> None:
        self.iterator.set_state(state)


class GrainLoader(_Grain):
    """Grain's `DataLoader` with an `IndexSampler`."""

    def __init__(self, place: Place) -> None:
        import grain

        _parse_flags()
        shard = grain.sharding.ShardOptions(shard_index=place.rank, shard_count=place.ranks)
        loader = grain.DataLoader(
            data_source=grain.sources.RangeDataSource(0, SAMPLES, 1),
            sampler=grain.samplers.IndexSampler(SAMPLES, shard, shuffle=True, num_epochs=1, seed=SEED),
            operations=[grain.transforms.Batch(place.batch)],
            worker_count=place.workers,
        )
        self.iterator = iter(loader)


class GrainElastic(_Grain):
    """Grain's `ElasticIterator`, of its experimental part."""

    def __init__(self, place: Place) -> None:
        import grain
        from grain.experimental import ElasticIterator

        _parse_flags()
        shard = grain.sharding.ShardOptions(shard_index=place.rank, shard_count=place.ranks)
        workers = grain.multiprocessing.MultiprocessingOptions(place.workers) if place.workers else None
        dataset = grain.MapDataset.range(SAMPLES).shuffle(SEED)
        self.iterator = iter(ElasticIterator(dataset, GLOBAL_BATCH, shard, multiprocessing_options=workers))


def _parse_flags() -> None:
    """Grain's workers read command-line flags, which must have been parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["bench"])


class LitData(_Stateful):
    """litdata's `StreamingDataset` under its `StreamingDataLoader`."""

    def __init__(self, place: Place) -> None:
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(
            str(place.folder / "litdata"), shuffle=True, drop_last=False, seed=SEED, max_cache_size="1GB"
        )
        self.loader = StreamingDataLoader(dataset, batch_size=place.batch, num_workers=place.workers)


def write_litdata(folder: Path) -> None:
    """Write the samples in chunks of 16."""
    from litdata.streaming import Cache

    cache = Cache(str(folder / "litdata"), chunk_size=16)
    for sample in range(SAMPLES):
        cache[sample] = sample
    cache.done()
    cache.merge()


@dataclass(frozen=True, slots=True)
class Contender:
    """A system, and the packages that it needs."""

    system: type[System]
    title: str
    packages: tuple[str, ...] = ()
    """The first is the one whose version is shown."""

    has_workers: bool = True

    write: Callable[[Path], None] | None = None
    """Writes the data set to a folder, in a process without a process group."""


CONTENDERS: Mapping[str, Contender] = {
    "loader": Contender(Loader, "Holdfast `Loader`", ("holdfast",)),
    "batches": Contender(Batches, "Holdfast `Batches` under `DataLoader`", ("holdfast",)),
    "torchdata": Contender(Torchdata, "`StatefulDataLoader`, `DistributedSampler`", ("torchdata",)),
    "datasets_rows": Contender(
        DatasetsByRows, "`split_dataset_by_node`, map-style, `StatefulDataLoader`", ("datasets", "torchdata")
    ),
    "datasets_shards": Contender(
        DatasetsByShards, "`split_dataset_by_node`, 12 shards, `StatefulDataLoader`", ("datasets", "torchdata")
    ),
    "datasets_alone": Contender(
        DatasetsAlone, "`split_dataset_by_node`, 12 shards, its `state_dict`", ("datasets",), has_workers=False
    ),
    "grain": Contender(GrainLoader, "Grain `DataLoader`", ("grain",)),
    "grain_elastic": Contender(GrainElastic, "Grain `ElasticIterator` (experimental)", ("grain",)),
    "litdata": Contender(LitData, "litdata `StreamingDataLoader`", ("litdata",), write=write_litdata),
}
