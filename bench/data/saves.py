"""The call of a save with a position of data whose loader has workers, beside one without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

import holdfast
import holdfast.data
from bench import conditions
from bench.data.loaders import Rows
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spreads_of
from bench.settings import settings
from bench.state import MIB

ROWS, SAMPLE_BYTES, WORKERS = 16, 4096, 3
NEVER = 10**9


class Training:
    """A model of large layers, one of which is trained, and the loader of its samples."""

    def __init__(self, mib: int, samples: int) -> None:
        wide = SAMPLE_BYTES // 4
        self.model = torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.Linear(wide, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        frozen = {str(number): torch.rand(1024, 1024) for number in range(mib // 4)}
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer, "frozen": frozen}
        self.loader = holdfast.data.Loader(
            Rows(samples, SAMPLE_BYTES), global_batch=ROWS, micro_batch=ROWS, seed=7, num_workers=WORKERS
        )
        self._steps = self.loader.steps()
        self._batch = torch.rand(ROWS, SAMPLE_BYTES // 4)

    def step_with(self) -> None:
        """Take a step with the next samples of the loader."""
        for batch, weight in next(self._steps):
            self._train(batch, weight)

    def step_without(self) -> None:
        """Take a step with samples in memory. The loader, whose queue is full, does nothing."""
        self._train(self._batch, 1.0)

    def _train(self, batch: torch.Tensor, weight: float) -> None:
        for _ in range(4):  # Some milliseconds: the time in which workers read.
            (self.model(batch).square().mean() * weight).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(root: Path, params: Params) -> Measured:
    """Measure the seconds of calls, with and without a position in turn."""
    chosen = settings(staging="copy", arena_bytes_max=2 * (params["mib"] + 64) * MIB)
    training = Training(params["mib"], ROWS * (params["rounds"] + 2) * (params["saves"] + 1) * 2)
    states = {"with": {**training.state, "data": training.loader}, "without": training.state}
    steps: dict[str, Callable[[], None]] = {"with": training.step_with, "without": training.step_without}
    rounds: list[Round] = []
    training.step_with()
    with ExitStack() as stack:
        saves = {}
        for name, state in states.items():
            manager = holdfast.CheckpointManager(
                root / name, every=NEVER, keep_last=2, process_group=False, settings=chosen
            )
            saves[name] = partial(_seconds, stack.enter_context(manager), state, steps[name])
        at = 0
        for number in range(-1, params["rounds"]):
            found: dict[str, list[float]] = {name: [] for name in saves}
            for repeat in range(params["saves"]):
                for name, save in in_turn(list(saves.items()), number + repeat + 1):
                    found[name].append(save(at := at + 1))
            if number >= 0:
                rounds.append({name: statistics.median(each) for name, each in found.items()})
    middle = {name: 1e3 * statistics.median(each[name] for each in rounds) for name in ("with", "without")}
    said = f"{middle['with']:.2f} ms with a position and {WORKERS} workers, {middle['without']:.2f} ms without"
    conditions.say(said)
    return Measured(rounds, [f"call of a save: {said}"])


def _seconds(
    manager: holdfast.CheckpointManager, state: dict[str, object], train: Callable[[], None], at: int
) -> float:
    """Return the seconds for which a save blocks training: the call after a step."""
    train()
    start = time.perf_counter()
    handle = manager.save(at, state)
    seconds = time.perf_counter() - start
    report = handle.wait()
    assert report is not None and report.staging == "copy", report
    return seconds


def values(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the ratio of each round."""
    return {"save_with_data_vs_without": [each["with"] / each["without"] for each in rounds]}


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the same over all rounds."""
    return spreads_of(values(rounds, params))


PART = Part(
    name="saves",
    question="How much longer is the call of a save that stores a position, with three workers at work?",
    ranks=1,
    full={"mib": 256, "rounds": 15, "saves": 8},
    quick={"mib": 128, "rounds": 7, "saves": 3},
    measure=measure,
    keys=keys,
    values=values,
)
