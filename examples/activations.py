"""Train the demo's GPT in half the memory that a step takes, with the same losses to the last bit.

    python -m examples.activations

Runs in the folder that has `demo/` and `examples/`. Needs `pip install 'holdfast[activations]'`.
"""

from __future__ import annotations

import argparse

import torch

from demo.gpt import GPT, Shape
from demo.text import batch, corpus
from holdfast import activations

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--samples", type=int, default=16)
parser.add_argument("--plan", help="file for the plan")
arguments = parser.parse_args()

shape, text = Shape(), corpus()


def loss_of(model: GPT, step: int) -> torch.Tensor:
    """Run forward and backward of one step; return the loss."""
    tokens = batch(text, step=step, samples=arguments.samples, context=shape.context)
    loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss


def trained(plan: activations.ActivationPlan | None) -> list[float]:
    """Train a model from the same start; return the loss of each step."""
    torch.manual_seed(0)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    managed = plan.apply(model) if plan else None
    losses = []
    for step in range(arguments.steps):
        losses.append(loss_of(model, step).item())
        optimizer.step()
        optimizer.zero_grad()
    if managed:
        print(managed.report())
    return losses


model = GPT(shape)
plan = activations.fit(model, lambda: loss_of(model, 0), budget="50%")
print(plan.explain())
if arguments.plan:
    plan.save(arguments.plan)
plain, planned = trained(None), trained(plan)
for step, (loss, other) in enumerate(zip(plain, planned, strict=True), start=1):
    print(f"step {step} loss {loss!r} plain, {other!r} planned")
print(
    f"peak {plan.summary().keep_all_peak_bytes / 2**20:.1f} MiB plain, {plan.measured_peak_bytes / 2**20:.1f} planned"
)
print("losses are equal to the last bit" if plain == planned else "losses differ")
