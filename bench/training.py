"""The slowdown of training by a lazy save every ten steps, over the total time, in which every save commits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from bench import conditions
from bench.lazy import lazy_settings
from bench.part import Measured, Params, Part, Round, Spread, present

WIDTH, INNER = 2048, 2730
STEP_SECONDS, STEP_SECONDS_OFF = 0.5, 0.1
STEPS_A_SAVE = 10
LAYERS = 4
"""4 × 2048 × 2730 parameters with two moments each: 255.9 MiB in fp32."""


class Training:
    """One pipeline stage per rank with its own parameters, so that both ranks save and compute all the time."""

    def __init__(self, layers: int = LAYERS, inner: int = INNER) -> None:
        torch.manual_seed(dist.get_rank())
        shapes = [(WIDTH, inner) if layer % 2 == 0 else (inner, WIDTH) for layer in range(layers)]
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(*shape, bias=False), nn.Tanh()) for shape in shapes))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batch = torch.rand(64, WIDTH)
        stage = f"stage{dist.get_rank()}"
        self.state = {"model": {stage: self.model}, "optimizer": {stage: self.optimizer}}
        self.step_seconds: list[float] = []

    def step(self) -> None:
        """Train one step. The ranks keep pace, as in training."""
        start = time.perf_counter()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.step_seconds.append(time.perf_counter() - start)

    def settle(self) -> float:
        """Choose the batch size for which a step takes half a second; return its seconds."""
        for _ in range(6):
            self.step_seconds.clear()
            for _ in range(4):
                self.step()
            seconds = conditions.slowest(statistics.median(self.step_seconds))
            if abs(seconds - STEP_SECONDS) < STEP_SECONDS_OFF / 4:
                break
            rows = max(int(len(self.batch) * STEP_SECONDS / seconds), 1)
            self.batch = torch.rand(rows, WIDTH)
        return seconds

    def steps(self, manager: holdfast.CheckpointManager | None, first: int) -> None:
        """Train ten steps. The first one saves, and the save commits before the last one ends."""
        handle = None
        for number in range(STEPS_A_SAVE):
            self.step()
            if number == 0 and manager is not None:
                handle = manager.save(first, self.state)
        if handle is not None:
            report = handle.wait()
            assert report is not None and report.staging == "lazy", report


def measure(root: Path, params: Params) -> Measured:
    """Alternate ten steps with a save and ten steps without one, until each variant has all its steps."""
    training = Training()
    settled = training.settle()
    conditions.say(f"{len(training.batch)} rows a step: {settled:.2f} s")
    rounds: list[Round] = []
    with holdfast.CheckpointManager(root, settings=lazy_settings()) as manager:
        training.steps(manager, 0)
        conditions.removed(root / f"step-{0:012d}")
        for number in range(params["steps"] // STEPS_A_SAVE):
            training.step_seconds.clear()
            first, each = number + 1, Round()
            for name in ("with", "without") if number % 2 == 0 else ("without", "with"):
                own = manager if name == "with" else None
                each[name] = conditions.timed(lambda own=own, first=first: training.steps(own, first))
            each["step"] = conditions.slowest(statistics.median(training.step_seconds))
            rounds.append(each)
            conditions.removed(root / f"step-{first:012d}")
            conditions.say(
                f"steps {number * STEPS_A_SAVE + STEPS_A_SAVE} of {params['steps']}: {each['with']:.2f} s with a save, "
                f"{each['without']:.2f} s without, a step {each['step']:.2f} s"
            )
    notes = []
    typical = statistics.median(each["step"] for each in rounds)
    if abs(typical - STEP_SECONDS) > STEP_SECONDS_OFF:
        notes.append(f"training: a step took {typical:.2f} s, not {STEP_SECONDS} ± {STEP_SECONDS_OFF}")
    return Measured(rounds, notes)


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the total time with saves over the time without; lowest and highest are ratios of ten steps."""
    assert present(rounds, "with", "without")
    each = [one["with"] / one["without"] for one in rounds]
    whole = sum(one["with"] for one in rounds) / sum(one["without"] for one in rounds)
    return {"train_slowdown": Spread(whole, min(each), max(each))}


PART = Part(
    name="training",
    question="How much longer does training take that saves every ten steps?",
    ranks=2,
    full={"steps": 200},
    quick={"steps": 40},
    measure=measure,
    keys=keys,
)
