"""Samples a second of `holdfast.data`, beside a plain `DataLoader` with `DistributedSampler`.

All loaders are open at once and take turns, so that whatever slows the machine slows each of them. One that waits has
filled its queue, and fetches nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast.data
from bench import conditions
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spreads_of

BATCH, WORKERS = 32, 2
OURS = ("loader", "batches")
_ROWS = 256
"""Different samples; the data set repeats them, since reading from a disk is not what is measured."""


class Rows(Dataset[torch.Tensor]):
    """Samples of equal length."""

    def __init__(self, samples: int, sample_bytes: int) -> None:
        self._samples = samples
        self._rows = torch.rand(_ROWS, sample_bytes // 4)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % _ROWS]


def plain(dataset: Rows) -> Iterator[Any]:
    """Yield batches of a plain `DataLoader`."""
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(dataset, num_replicas=1, rank=0, seed=7)
    yield from DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=WORKERS)


def loader(dataset: Rows) -> Iterator[Any]:
    """Yield batches of `Loader`."""
    ours = holdfast.data.Loader(dataset, global_batch=BATCH, micro_batch=BATCH, seed=7, num_workers=WORKERS)
    for step in ours.steps(epochs=1):
        for batch, _ in step:
            yield batch


def batches(dataset: Rows) -> Iterator[Any]:
    """Yield batches of a `DataLoader` over `Batches`."""
    sampler = holdfast.data.Batches(len(dataset), global_batch=BATCH, micro_batch=BATCH, seed=7)
    yield from DataLoader(dataset, batch_sampler=sampler, num_workers=WORKERS)


WAYS = {"plain": plain, "loader": loader, "batches": batches}


def measure(root: Path, params: Params) -> Measured:
    """Measure seconds of as many batches from each loader in turn, round by round."""
    a_round = params["batches"]
    dataset = Rows(BATCH * a_round * (params["rounds"] + 2), params["sample_bytes"])
    opened = {name: way(dataset) for name, way in WAYS.items()}
    for each in opened.values():
        _take(each, a_round)
    rounds: list[Round] = []
    for number in range(params["rounds"]):
        rounds.append({name: _take(each, a_round) for name, each in in_turn(list(opened.items()), number)})
    medians = {name: f"{BATCH * a_round / statistics.median(each[name] for each in rounds):.0f}" for name in rounds[0]}
    said = f"samples of {params['sample_bytes']} bytes a second: " + ", ".join(f"{n} {v}" for n, v in medians.items())
    conditions.say(said)
    return Measured(rounds, [said])


def _take(opened: Iterator[Any], count: int) -> float:
    """Return the seconds for some batches. Each loader begins with a full queue."""
    start = time.perf_counter()
    for _ in range(count):
        batch = next(opened)
        assert len(batch) == BATCH
    return time.perf_counter() - start


def values(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the speeds, as ratios to the plain loader, of each pair of rounds: one in each order."""
    pairs = [rounds[at : at + 2] for at in range(0, len(rounds) - 1, 2)] or [rounds]
    kind = f"{params.get('sample_bytes', 1024) // 1024}k"
    return {
        f"{name}_vs_plain_{kind}": [sum(r["plain"] for r in pair) / sum(r[name] for r in pair) for pair in pairs]
        for name in OURS
    }


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the same over all rounds."""
    return spreads_of(values(rounds, params))


SMALL = Part(
    name="loader_1k",
    question="How many samples of 1 KiB does a loader read in a second?",
    ranks=1,
    full={"sample_bytes": 1024, "batches": 600, "rounds": 42},
    quick={"sample_bytes": 1024, "batches": 200, "rounds": 14},
    measure=measure,
    keys=keys,
    values=values,
)

LARGE = replace(
    SMALL,
    name="loader_100k",
    question="How many samples of 100 KiB does a loader read in a second?",
    full={"sample_bytes": 102400, "batches": 100, "rounds": 42},
    quick={"sample_bytes": 102400, "batches": 40, "rounds": 14},
)
