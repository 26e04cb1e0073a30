"""The lines that ranks of `examples/elastic.py` write of each step, and the steps that count in the end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import holdfast.data

GLOBAL_BATCH, SEED = 24, 7
"""As in the example."""
CONTEXT, STRIDE = 64, 8
"""Tokens of a sample, and bytes from one sample to the next, as in the example."""


def write_text(path: Path, samples: int) -> Path:
    """Write a text of so many samples."""
    path.write_bytes(bytes(byte % 251 for byte in range(STRIDE * samples + CONTEXT + 1)))
    return path


@dataclass(frozen=True, slots=True)
class Line:
    """One step on one rank."""

    rank: int
    step: int
    epoch: int
    samples: list[int]
    ranks: int
    resumed: int
    """Step that this life of the job loaded."""

    time: float
    """Seconds since 1970."""


def lines_of(folder: Path) -> list[Line]:
    """Return all lines so far, in the order of time."""
    found = []
    for path in folder.glob("rank-*.jsonl"):
        rank = int(path.stem.removeprefix("rank-"))
        # A line that is being written has no end yet.
        texts = path.read_text().split("\n")[:-1]
        found += [Line(rank, **json.loads(text)) for text in texts]
    return sorted(found, key=lambda line: line.time)


def lineage(lines: list[Line]) -> dict[int, list[Line]]:
    """Return the lines of each step as it was trained last, by rank; check that one life of the job trained the step.

    Each step after a resume must have been trained after the steps before.
    """
    newest: dict[tuple[int, int], Line] = {(line.step, line.rank): line for line in lines}
    kept: dict[int, list[Line]] = {}
    began = 0.0
    for step in range(1, max(line.step for line in lines) + 1):
        last = max((line for (number, _), line in newest.items() if number == step), key=lambda line: line.time)
        kept[step] = [newest[step, rank] for rank in range(last.ranks)]
        lives = {(line.ranks, line.resumed, line.epoch) for line in kept[step]}
        assert len(lives) == 1, f"step {step} is of several lives: {lives}"
        times = [line.time for line in kept[step]]
        assert min(times) > began, f"step {step} was trained before the step that it follows"
        began = max(times)
    return kept


def require_exact(lines: list[Line], samples: int, epochs: int) -> None:
    """Check that the lineage has the very samples of a run on one rank that never ended, in their order.

    A step that was trained several times had the same samples each time.
    """
    loader = holdfast.data.Loader(range(samples), global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH, seed=SEED)
    expected = {
        step.number: (step.epoch, [number for batch, _ in step for number in batch.tolist()])
        for step in loader.steps(epochs=epochs)
    }
    kept = lineage(lines)
    trained = {
        step: (ranks[0].epoch, [number for line in ranks for number in line.samples]) for step, ranks in kept.items()
    }
    assert trained == expected
    for epoch in range(epochs):
        once = sorted(number for each, numbers in trained.values() if each == epoch for number in numbers)
        assert once == [*range(samples)], f"epoch {epoch} is no permutation"
    for line in lines:
        assert set(line.samples) <= {*expected[line.step][1]}, line


def trained_again(lines: list[Line]) -> int:
    """Return how many steps were trained a second time, since a resume went back behind them."""
    lives = {(line.step, line.ranks, line.resumed) for line in lines if line.rank == 0}
    return len(lives) - len({step for step, *_ in lives})
