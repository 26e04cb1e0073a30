"""One model trained in several ways in turn: the peak of each way, and the processor time of each step.

A round trains one step in each way, in an order that changes from round to round. Every way has modules of its own and
the same parameters, so that a way is prepared once.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from bench import conditions
from bench.activations.models import Step, Training
from bench.activations.rivals import changed, has_compiler, rivals
from bench.part import Round, in_turn
from holdfast import activations
from holdfast.activations.plan import ActivationPlan
from holdfast.activations.runtime.peak import peak_bytes

CPU = torch.device("cpu")
KEEP, AGAIN = "keep_all", "keep_all_again"
"""Plain training, twice: the second one shows how far two equal ways are apart."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train the model."""

    step: Step
    """Trains one step."""
    peak_bytes: int
    """The measured peak of a step."""
    gradients_error: float
    """Norm of the difference of all gradients from those of plain training, relative to the norm of these."""
    plan: ActivationPlan | None = None
    """The plan of a way of ours."""


def seconds_of(step: Step) -> float:
    """Return the processor seconds of a step."""
    began = time.process_time()
    step()
    return time.process_time() - began


class Race:
    """The ways of one model."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.ways: dict[str, Way] = {}
        self._plain: list[torch.Tensor] = []
        for name in (KEEP, AGAIN):
            self.add(name, training.step_of(training.copied()))

    @property
    def keep_all_bytes(self) -> int:
        """Return the measured peak of plain training."""
        return self.ways[KEEP].peak_bytes

    def add_rivals(self, *names: str) -> list[str]:
        """Add the rivals of these names, or all; return notes on them."""
        for name, way in rivals().items():
            if not names or name in names:
                self.add(name, self.training.step_of(changed(self.training.copied(), way)))
        if names:
            return []
        notes = ["save_on_cpu saves nothing on a CPU: tensors are in host memory anyway"]
        if not has_compiler():
            notes.append("activation_memory_budget: not shown, since there is no C++ compiler")
        return notes

    def fitted(self, name: str, budget_bytes: int, *, error_bound: float = 0.0) -> int:
        """Add a way of ours from a new fit; return the steps of the fit."""
        model, steps = self.training.copied(), 0
        plain = self.training.step_of(model)

        def step() -> torch.Tensor:
            nonlocal steps
            steps += 1
            return plain()

        self.training.forget_gradients()
        plan = activations.fit(model, step, budget=budget_bytes, error_bound=error_bound)
        self.add_plan(name, plan)
        return steps

    def add_plan(self, name: str, plan: ActivationPlan) -> None:
        """Add a way of ours."""
        model = self.training.copied()
        plan.apply(model)
        self.add(name, self.training.step_of(model), plan)

    def add(self, name: str, step: Step, plan: ActivationPlan | None = None) -> None:
        """Add a way; measure the peak of a step."""
        step()  # Code and memory are warm after this, and every unit is traced.
        _, peak = peak_bytes(step, CPU)
        gradients = self.training.gradients()
        self._plain = self._plain or gradients
        difference = sum(float((one - other).square().sum()) for one, other in zip(gradients, self._plain, strict=True))
        whole = sum(float(one.square().sum()) for one in self._plain)
        way = Way(step, peak, math.sqrt(difference / whole), plan)
        self.ways[name] = way
        share = peak / self.keep_all_bytes
        predicted = f", predicted {plan.solved.predicted_peak_bytes / MIB:.1f}" if plan else ""
        conditions.say(
            f"{name}: peak {peak / MIB:.1f} MiB{predicted}, {share:.3f} of keep-all; gradients off by "
            f"{way.gradients_error:.2g}"
        )

    def rounds(self, count: int) -> list[Round]:
        """Return the processor seconds of each way, round by round, with the peaks."""
        facts: Round = {}
        for name, way in self.ways.items():
            facts[f"peak_{name}"] = way.peak_bytes
            if way.plan is not None:
                facts[f"predicted_peak_{name}"] = way.plan.solved.predicted_peak_bytes
                facts[f"predicted_slowdown_{name}"] = way.plan.solved.predicted_slowdown
        found: list[Round] = []
        for number in range(count):
            each = {name: seconds_of(self.ways[name].step) for name in in_turn(list(self.ways), number)}
            found.append(facts | each)
            conditions.say(
                f"round {number + 1} of {count}: "
                + ", ".join(f"{name} {each[name] / each[KEEP]:.3f}" for name in self.ways)
            )
        return found
