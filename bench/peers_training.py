"""Training beside saves into the memory of peers: steps that compute, and all-reduces beside protection under a cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from bench import conditions
from bench.lazy import ARENA_MIB
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spread_of
from bench.peers_place import NODES, manager, share
from bench.state import MIB
from bench.training import STEP_SECONDS, STEP_SECONDS_OFF, Training

BLOCK_STEPS, NEAR_STEPS = 20, 2
LAYERS, INNER = 1, 683
"""16 MiB a node, with both moments."""

CAP = 32 * MIB
"""Bytes a second that a node pulls beside the all-reduces."""

REDUCED_MIB = 64


def steps(root: Path, params: Params) -> Measured:
    """Alternate blocks of steps with near saves and blocks without; each pair of blocks is a round."""
    training = Training(LAYERS, INNER)
    conditions.say(f"{training.settle():.2f} s a step of {len(training.batch)} rows")
    rounds = list[Round]()
    with manager(root, every=NEAR_STEPS, staging="lazy", arena_bytes_max=ARENA_MIB * MIB) as run:
        run.load(training.state)

        def block(own: holdfast.CheckpointManager | None, first: int) -> None:
            handle = None
            for step in range(first, first + BLOCK_STEPS):
                training.step()
                if own is not None:
                    handle = own.maybe_save(step, training.state) or handle
            if handle is not None:
                handle.wait("replicated")

        block(run, 0)
        for number in range(1, params["rounds"] + 1):
            training.step_seconds.clear()
            this: Round = {}
            for name in in_turn(["with", "without"], number):
                own = run if name == "with" else None
                this[name] = conditions.timed(lambda own=own, first=number * BLOCK_STEPS: block(own, first))
            this["step"] = conditions.slowest(sorted(training.step_seconds)[BLOCK_STEPS])
            rounds.append(this)
            conditions.say(", ".join(f"{name} {value:.2f} s" for name, value in this.items()))
        run.close(wait=False)
    off = [each["step"] for each in rounds if abs(each["step"] - STEP_SECONDS) > STEP_SECONDS_OFF]
    return Measured(rounds, [f"steps took {min(off):.2f} to {max(off):.2f} s"] if off else [])


def all_reduces(root: Path, params: Params) -> Measured:
    """Alternate all-reduces beside protection under a cap and all-reduces alone."""
    saved, reduced, rounds = share(params["mib"]), torch.ones(REDUCED_MIB * MIB // 4), list[Round]()

    def reduce() -> None:
        for _ in range(params["times"]):
            dist.all_reduce(reduced, dist.ReduceOp.MAX)

    with manager(root, cap=CAP, collect_grace_seconds=0.0) as run:
        run.load({f"stage{conditions.rank()}": saved})

        def beside(step: int) -> Round:
            for tensor in saved.values():
                tensor += 1.0
            handle = run.save(step, {f"stage{conditions.rank()}": saved}, near_only=True)
            handle.wait("near")
            found = conditions.measured("beside", reduce)
            assert not handle.replicated.done(), "protected before the last all-reduce"
            handle.wait("replicated")
            return found

        for number in range(-1, params["rounds"]):
            contenders: list[Callable[[], Round]] = [
                lambda step=number + 2: beside(step),  # type: ignore[misc]
                lambda: conditions.measured("alone", reduce),
            ]
            this: Round = {}
            for act in in_turn(contenders, number):
                this |= act()
            if number >= 0:
                rounds.append(this)
                conditions.say(", ".join(f"{name} {value:.3f}" for name, value in this.items()))
        run.close(wait=False)
    return Measured(rounds, [])


def step_keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the total time with saves over the time without; lowest and highest are ratios of one round."""
    each = [one["with"] / one["without"] for one in rounds]
    whole = sum(one["with"] for one in rounds) / sum(one["without"] for one in rounds)
    return {"peers_train_slowdown": Spread(whole, min(each), max(each))}


def reduce_keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the time beside protection over the time alone."""
    return {"all_reduce_slowdown": spread_of([each["beside"] / each["alone"] for each in rounds])}


STEPS = Part(
    name="peers_steps",
    question="How much longer does training take that saves into the memory of peers every two steps?",
    ranks=NODES,
    full={"rounds": 10},
    quick={"rounds": 2},
    measure=steps,
    keys=step_keys,
)
ALL_REDUCE = Part(
    name="peers_all_reduce",
    question="How much longer do all-reduces of 64 MiB take beside protection of at most 32 MiB a second and node?",
    ranks=NODES,
    full={"mib": 128, "times": 8, "rounds": 9},
    quick={"mib": 128, "times": 8, "rounds": 3},
    measure=all_reduces,
    keys=reduce_keys,
)
