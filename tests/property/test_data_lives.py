"""Lives of runs that are killed, shrunk and grown: every sample once along the lineage that survives.

Ranks are objects of one process here, each with the place of a data rank; their optimizer is one. A loader that fetches
ahead is a queue. Real processes are in `tests/distributed/jobs/test_data.py`.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from holdfast.backends.torch.data.batches import Batches
from holdfast.backends.torch.data.data_ranks import DataRanks
from holdfast.backends.torch.data.loader import Loader
from holdfast.backends.torch.data.mixture import Mixture

LIVES = int(os.environ.get("DATA_LIVES", "500"))
PHASE = 90
"""Sample from which the sources of a mixture have equal weights."""

BLOCK = 50
"""Lives of one test."""


@dataclass
class Plan:
    """The draws of one life."""

    rng: np.random.Generator
    n: int
    tail: str
    shuffle: object
    mixture: Mixture | None
    uses_loader: bool
    global_batch: int
    micro_batch: int = 1


@dataclass
class Run:
    """The lineage that survives, and its checkpoints."""

    samples: list[int] = field(default_factory=list)
    """Trained samples, in the order of the steps and ranks."""

    epochs: list[int] = field(default_factory=list)
    """The epoch in which the step of each sample began."""

    saved: list[tuple[str, int]] = field(default_factory=list)
    """State, and the trained samples at that time."""


def positions_of(plan: Plan, ranks: int) -> list[Batches]:
    """Return the position of each data rank."""
    options = {
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "seed": 5,
        "shuffle": plan.shuffle,
        "tail": plan.tail,
    }
    made: list[Batches] = []
    for rank in range(ranks):
        if plan.uses_loader:
            each: Batches = Loader(plan.mixture or list(range(plan.n)), **options)  # type: ignore[arg-type]
        else:
            each = Batches(plan.mixture or plan.n, **options)  # type: ignore[arg-type]
        each._draws = replace(each._draws, ranks=DataRanks(rank, ranks))
        made.append(each)
    return made


def steps_of(positions: list[Batches], workers: int) -> Iterator[tuple[int, list[list[list[int]]]]]:
    """Yield each step of an epoch: its epoch, and the micro-batches by rank that count, one iterator in lockstep.

    The micro-batches are handed out one after another: the last yield of a step is complete.
    """
    if isinstance(positions[0], Loader):
        for steps in zip(*(each.steps() for each in positions), strict=True):  # type: ignore[attr-defined]
            assert all(step.samples == steps[0].samples for step in steps)
            taken: list[list[list[int]]] = [[] for _ in positions]
            weights = 0.0
            assert len({len(step) for step in steps}) == 1
            for micro_batches in zip(*steps, strict=True):
                for rank, (batch, weight) in enumerate(micro_batches):
                    assert len(batch)
                    weights += weight
                    taken[rank].append(batch.tolist() if weight else [])
                if len(taken[0]) < len(steps[0]):
                    yield -1, taken
            assert weights == pytest.approx(len(positions))
            assert sum(len(each) for share in taken for each in share) == steps[0].samples
            yield steps[0].epoch, taken
        return
    while True:
        iterators = [iter(each) for each in positions]
        epoch = positions[0]._position.epoch
        queues: list[deque[list[int]]] = [deque() for _ in positions]
        total, handed = len(positions[0]), 0
        assert {len(each) for each in positions} == {total}
        parts: list[list[list[int]]] = []
        position = positions[0]._position
        for _ in range(total):
            for queue, iterator in zip(queues, iterators, strict=True):
                while len(queue) < workers + 1 and (drawn := next(iterator, None)) is not None:
                    queue.append(drawn)
            if handed == 0:
                size = positions[0]._draws.epochs.size(position)
                parts = [list(each._draws.parts(size)) for each in positions]  # type: ignore[arg-type]
                taken = [[] for _ in positions]
            for rank, queue in enumerate(queues):
                batch = queue.popleft()
                assert batch
                taken[rank].append([] if parts[rank][handed].is_repeat else batch)  # type: ignore[attr-defined]
            handed += 1
            if handed == len(parts[0]):
                handed, position = 0, positions[0]._draws.epochs.after(position)
                yield epoch, taken
            else:
                yield -1, taken
        assert all(next(iterator, None) is None for iterator in iterators)


def train(plan: Plan, run: Run, ranks: int, optimizer: torch.optim.Optimizer) -> None:
    """Train from a saved position until the process is killed."""
    drawn = plan.rng
    positions = positions_of(plan, ranks)
    if not run.saved:
        run.samples, run.epochs = [], []
    else:
        number = len(run.saved) - 1 if drawn.random() < 0.6 else int(drawn.integers(len(run.saved)))
        state, trained = run.saved[number]
        del run.saved[number + 1 :], run.samples[trained:], run.epochs[trained:]
        for each in positions:
            each.load_state_dict(json.loads(state))
    moments, leaves = int(drawn.integers(1, 40)), False
    steps = steps_of(positions, int(drawn.integers(8)))
    while True:
        if leaves:  # The loop is left between two steps, the batch may change, and another loop goes on.
            steps.close()
            if drawn.random() < 0.5 and plan.tail != "drop":
                plan.global_batch = int(drawn.integers(max(ranks, plan.micro_batch), 41))
                for each in positions:
                    each.set_global_batch(plan.global_batch)
            steps = steps_of(positions, int(drawn.integers(8)))
        epoch, taken = next(steps)
        leaves = False
        if drawn.random() < 0.2:
            save(run, positions)
        moments -= 1
        if moments <= 0:
            return  # Killed within a step, or before the optimizer's step.
        if epoch < 0:
            continue
        shares = [sum(len(each) for each in share) for share in taken]
        assert max(shares) - min(shares) <= 1
        optimizer.step()
        step = [sample for share in taken for each in share for sample in each]
        run.samples += step
        run.epochs += [epoch] * len(step)
        if drawn.random() < 0.4:
            save(run, positions)
        if drawn.random() < 0.05:
            return
        leaves = bool(drawn.random() < 0.1)


def save(run: Run, positions: list[Batches]) -> None:
    states = {json.dumps(each.state_dict()) for each in positions}
    assert len(states) == 1, "ranks have unlike positions"
    run.saved.append((states.pop(), len(run.samples)))


def require_exact(plan: Plan, run: Run) -> None:
    samples, epochs = np.array(run.samples, int), np.array(run.epochs, int)
    if plan.mixture is not None:
        bounds = np.array(plan.mixture._starts)
        served = np.searchsorted(bounds, samples, side="right") - 1
        for source, length in enumerate(np.diff(bounds)):
            of_source = samples[served == source]
            before, after = min(len(samples), PHASE), max(0, len(samples) - PHASE)
            share = before * (0.75, 0.25)[source] + after * (0.5, 0.5)[source]
            assert abs(len(of_source) - share) < 2.02
            require_permutations(of_source - bounds[source], int(length))
    elif plan.tail == "drop":
        for epoch in np.unique(epochs):
            assert len(np.unique(samples[epochs == epoch])) == (epochs == epoch).sum()
        assert all((epochs == epoch).sum() > plan.n - 40 for epoch in np.unique(epochs)[:-1])
    else:
        require_permutations(samples, plan.n)


def require_permutations(samples: np.ndarray, n: int) -> None:
    for start in range(0, len(samples), n):
        epoch = np.sort(samples[start : start + n])
        assert len(np.unique(epoch)) == len(epoch)
        assert len(epoch) < n or np.array_equal(epoch, np.arange(n))


@pytest.mark.parametrize("block", range(-(-LIVES // BLOCK)))
def test_every_sample_is_trained_once_along_the_lineage(block: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    for seed in range(block * BLOCK, min(LIVES, (block + 1) * BLOCK)):
        drawn = np.random.default_rng(seed)
        n = int(drawn.integers(1, 150))
        tail = ("short", "carry", "drop")[drawn.integers(3)]
        is_mixed = bool(drawn.random() < 0.2) and tail != "drop"
        mixture = None
        if is_mixed:
            sources = {"a": (list(range(n)), 0.75), "b": (list(range(n, n + 11)), 0.25)}
            phases = {PHASE: {"a": 1.0, "b": 1.0}}
            mixture = Mixture(sources, phases=phases, epoch_samples=int(drawn.integers(1, 100)))
        largest = min(40, n) if tail == "drop" else 40
        shuffle = ("full", "blocks", False)[drawn.integers(3)]
        plan = Plan(drawn, n, tail, shuffle, mixture, bool(drawn.random() < 0.5), int(drawn.integers(1, largest + 1)))
        run = Run()
        for _ in range(int(drawn.integers(1, 6))):
            plan.global_batch = int(drawn.integers(1, largest + 1)) if drawn.random() < 0.3 else plan.global_batch
            plan.micro_batch = int(drawn.integers(1, plan.global_batch + 1))
            try:
                train(plan, run, int(drawn.integers(1, min(64, plan.global_batch) + 1)), optimizer)
                require_exact(plan, run)
            except Exception as error:
                error.add_note(f"life {seed}: {plan}")
                raise
