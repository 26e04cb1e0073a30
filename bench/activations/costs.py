"""The cost of a solution for 256 units, and of hooks that keep every tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import conditions
from bench.activations.models import Training
from bench.activations.race import AGAIN, KEEP, Race
from bench.activations.slowdowns import GPT, QUICK, overhead
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from holdfast.activations.runtime.attach import trace_units
from holdfast.activations.runtime.column_program import ColumnProgram
from holdfast.activations.runtime.frame import CallFrame, call_storing
from holdfast.activations.solve.columns import keep_all
from holdfast.activations.solve.solve import solve
from tests.unit.activations.solve.traces import large_model


def measure_solver(root: Path, params: Params) -> Measured:
    """Time solutions of one large problem."""
    profile, columns, budget = large_model(params["units"])
    rounds: list[Round] = []
    for _ in range(params["rounds"]):
        began = time.process_time()
        solve(profile, columns, budget)
        rounds.append({"seconds": time.process_time() - began})
        conditions.say(f"solved in {rounds[-1]['seconds']:.2f} s")
    return Measured(rounds, [])


def keys_of_solver(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the processor seconds of a solution."""
    return {"solve_seconds_256": spread_of([each["seconds"] for each in rounds])}


def measure_hooks(root: Path, params: Params) -> Measured:
    """Race units whose hooks keep every tensor against plain training."""
    training = Training("gpt", params)
    race = Race(training)
    model = training.copied()
    names = [name for name, _ in model.named_modules() if name.startswith("blocks.") and name.count(".") == 1]
    traces = trace_units(model, names, training.step_of(model))
    for name, trace in traces.items():
        block, program = model.get_submodule(name), ColumnProgram(trace, keep_all(trace.profile((name,))))
        block.forward = partial(_kept, program, name, block, block.forward)
    race.add("hooks", training.step_of(model))
    return Measured(race.rounds(params["rounds"]), [])


def _kept(program: ColumnProgram, name: str, block: Any, forward: Callable[..., Any], *tensors: Any) -> Any:
    return call_storing(CallFrame(program, name, block), forward, tensors)


def values_of_hooks(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the time of a step with hooks by the time of a plain step."""
    assert {KEEP, AGAIN} <= rounds[0].keys()
    return {"hook_overhead": [1 + overhead(each, "hooks") for each in rounds]}


def keys_of_hooks(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the same over all rounds."""
    return {key: spread_of(each) for key, each in values_of_hooks(rounds, params).items()}


SOLVER = Part(
    name="solver",
    question="How long does the solver take for 256 units?",
    ranks=1,
    full={"units": 256, "rounds": 7},
    quick={"units": 256, "rounds": 2},
    measure=measure_solver,
    keys=keys_of_solver,
)

HOOKS = Part(
    name="hooks",
    question="How much longer does a step take if hooks keep every tensor?",
    ranks=1,
    full={**GPT, "rounds": 15},
    quick={**QUICK, "rounds": 3},
    measure=measure_hooks,
    keys=keys_of_hooks,
    values=values_of_hooks,
)
