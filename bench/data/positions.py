"""What a position costs: time to the first batch of a resume, memory of the order, bytes in a checkpoint."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import torch

import holdfast
import holdfast.data
from bench import conditions
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spreads_of
from bench.state import MIB
from holdfast.base.sampling.order import Shuffle

SMALL, LARGE = 10**3, 10**9
SHUFFLES: dict[str, Shuffle] = {"full": "full", "blocks": "blocks", "in order": False}
SOURCE_BYTES = 64
"""Bytes that each source of a mixture may add to a state."""


class Numbers:
    """A data set of any length, in no memory."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index


def resumed(dataset: object, samples: int) -> holdfast.data.Loader:
    """Return a loader that goes on after some samples of the first epoch."""
    options = {"global_batch": 96, "micro_batch": 8, "seed": 7}
    before = holdfast.data.Loader(dataset, **options)  # type: ignore[arg-type]
    before.seek(samples=samples)
    after = holdfast.data.Loader(dataset, **options)  # type: ignore[arg-type]
    after.load_state_dict(before.state_dict())
    return after


# ------------------------------------------------------------------------------- the first batch


def measure_first(root: Path, params: Params) -> Measured:
    """Measure resumes of data sets of both lengths in turn."""
    datasets = [(str(samples), Numbers(samples)) for samples in (SMALL, LARGE)]
    for _, dataset in datasets:
        _first_seconds(dataset)
    rounds: list[Round] = []
    for number in range(params["rounds"]):
        found: dict[str, list[float]] = {name: [] for name, _ in datasets}
        for repeat in range(params["resumes"]):
            for name, dataset in in_turn(datasets, number + repeat):
                found[name].append(_first_seconds(dataset))
        rounds.append({name: 1e3 * statistics.median(each) for name, each in found.items()})
    middle = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    said = ", ".join(f"{milliseconds:.2f} ms of {int(name):,} samples" for name, milliseconds in middle.items())
    conditions.say(f"first batch: {said}")
    return Measured(rounds, [f"first batch of a resume without workers: {said}"])


def _first_seconds(dataset: Numbers) -> float:
    """Return the seconds of a resume in the middle of an epoch, up to its first batch. Workers are equal in both."""
    start = time.perf_counter()
    next(iter(next(resumed(dataset, len(dataset) // 2).steps())))
    return time.perf_counter() - start


def values_first(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the ratio of each round."""
    return {"first_batch_large_vs_small": [each[str(LARGE)] / each[str(SMALL)] for each in rounds]}


FIRST = Part(
    name="first_batch",
    question="How much longer does the first batch of a resume take with a million times as many samples?",
    ranks=1,
    full={"rounds": 21, "resumes": 40},
    quick={"rounds": 7, "resumes": 10},
    measure=measure_first,
    keys=lambda rounds, params: spreads_of(values_first(rounds, params)),
    values=values_first,
)

# ------------------------------------------------------------------------------- memory


def measure_order(root: Path, params: Params) -> Measured:
    """Measure the memory of a resume in the middle of an epoch and of steps after it, for each order."""
    _order_peak_mib("full", 1)  # The first iteration imports modules.
    rounds = [{name: _order_peak_mib(shuffle, params["steps"]) for name, shuffle in SHUFFLES.items()}]
    conditions.say(", ".join(f"{name}: {mib:.2f} MiB" for name, mib in rounds[0].items()))
    return Measured(rounds, [])


def _order_peak_mib(shuffle: Shuffle, steps: int) -> float:
    tracemalloc.start()
    try:
        batches = holdfast.data.Batches(LARGE, global_batch=96, micro_batch=8, seed=7, shuffle=shuffle)
        batches.seek(samples=LARGE // 2)
        drawn = iter(batches)
        for _ in range(steps):
            next(drawn)
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


def keys_order(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the largest of all orders."""
    return spreads_of({"order_peak_mib": [max(each.values()) for each in rounds]})


ORDER = Part(
    name="order",
    question="How much memory does the order of a billion samples take?",
    ranks=1,
    full={"steps": 12_000},
    quick={"steps": 1_200},
    measure=measure_order,
    keys=keys_order,
)

# ------------------------------------------------------------------------------- bytes of a checkpoint


def measure_state(root: Path, params: Params) -> Measured:
    """Save a state with and without a position, and count the bytes of both manifests."""
    model = torch.nn.Linear(64, 64)
    names = [f"source-{number}" for number in range(params["sources"])]
    mixture = holdfast.data.Mixture({name: (Numbers(LARGE // len(names)), 1.0) for name in names})
    states = {"plain": resumed(Numbers(LARGE), LARGE // 2), "mixture": resumed(mixture, LARGE // 2)}
    manifest, every = _saved_bytes(root, {"model": model})
    each: Round = {"sources": float(len(names))}
    for name, position in states.items():
        with_manifest, with_every = _saved_bytes(root, {"model": model, "data": position})
        each |= {name: with_manifest - manifest, f"{name}_all_files": with_every - every}
    said = (
        f"{each['plain']:.0f} bytes of the manifest, {each['plain_all_files']:.0f} of all files; a mixture of "
        f"{len(names)} sources {each['mixture']:.0f} and {each['mixture_all_files']:.0f}"
    )
    conditions.say(said)
    return Measured([each], [f"position: {said}"])


def _saved_bytes(root: Path, state: dict[str, object]) -> tuple[int, int]:
    """Return the bytes of the manifest, and of all files of the checkpoint."""
    folder = conditions.emptied(root) / "saved"
    holdfast.save(folder, state, process_group=False)
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sizes["manifest.json"], sum(sizes.values())


def keys_state(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the larger of both, less what each source may add."""
    sizes = [max(each["plain"], each["mixture"] - SOURCE_BYTES * each["sources"]) for each in rounds]
    return spreads_of({"state_bytes": sizes})


STATE = Part(
    name="state",
    question="How many bytes does the position in a billion samples add to a checkpoint?",
    ranks=1,
    full={"sources": 12},
    quick={"sources": 12},
    measure=measure_state,
    keys=keys_state,
)
