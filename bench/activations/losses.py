"""How far errors within a bound change the loss of a training, beside the change by another seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import conditions
from bench.activations.models import Gpt
from bench.compression_state import Batches
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from holdfast import activations

SEEDS = (1, 2, 3)
RUNS = {"e02": (0.02, "42%"), "e25": (0.25, "40%")}
"""Error bound and budget."""

LAST_STEPS = 50
"""The mean loss of these steps counts."""


def measure(root: Path, params: Params) -> Measured:
    """Train plainly with three seeds, and within each bound with the first one."""
    found = {f"plain_{seed}": _loss_of(params, seed) for seed in SEEDS}
    found |= {name: _loss_of(params, SEEDS[0], bound, budget) for name, (bound, budget) in RUNS.items()}
    return Measured([found], [])


def _loss_of(params: Params, seed: int, error_bound: float = 0.0, budget: str = "") -> float:
    """Return the mean loss of the last steps."""
    model = Gpt("gpt", width=params["width"], blocks=params["blocks"], tokens=params["tokens"], seed=seed)
    batches = Batches(seed)
    batch = batches.next(rows=params["rows"], length=params["tokens"])

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        loss.backward()
        return loss

    if error_bound:
        activations.fit(model, step, budget=budget, error_bound=error_bound).apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(seed)
    losses = []
    for _ in range(params["steps"]):
        batch = batches.next(rows=params["rows"], length=params["tokens"])
        losses.append(float(step().detach()))
        optimizer.step()
        optimizer.zero_grad()
    loss = statistics.mean(losses[-LAST_STEPS:])
    conditions.say(f"seed {seed}, error bound {error_bound:g}: loss {loss:.4f}")
    return loss


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the change of the loss by the range of plain training over seeds."""
    (found,) = rounds
    plain = [found[f"plain_{seed}"] for seed in SEEDS]
    return {
        f"loss_change_{name}": spread_of([abs(found[name] - plain[0]) / (max(plain) - min(plain))]) for name in RUNS
    }


PART = Part(
    name="loss",
    question="How far do errors within a bound change the loss?",
    ranks=1,
    full={"width": 128, "blocks": 4, "tokens": 128, "rows": 8, "steps": 600},
    quick={"width": 128, "blocks": 4, "tokens": 128, "rows": 8, "steps": 60},
    measure=measure,
    keys=keys,
)
