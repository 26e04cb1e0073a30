"""Training that saves into memory every two steps, and drains a step to a folder every twenty, beside plain training.

Blocks of twenty steps with and without saves take turns. A block with saves begins with the step that is due, and ends
after its drain.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import holdfast
from bench import conditions
from bench.lazy import lazy_settings
from bench.part import Measured, Params, Part, Round, Spread, present
from bench.training import STEP_SECONDS, STEP_SECONDS_OFF, Training

BLOCK_STEPS, NEAR_STEPS = 20, 2
LAYERS = 1
"""64 MiB a rank."""


def _steps(training: Training, manager: holdfast.CheckpointManager | None, first: int) -> None:
    due = None
    for step in range(first, first + BLOCK_STEPS):
        training.step()
        if manager is not None:
            handle = manager.maybe_save(step, training.state)
            due = handle if step == first else due
    if manager is not None:
        assert due is not None, "the first step of a block is due"
        report = due.wait("committed")
        assert report is not None and report.staging == "lazy", report
        manager.wait()


def measure(root: Path, params: Params) -> Measured:
    """Alternate blocks with saves and blocks without; each pair of blocks is a round."""
    training = Training(LAYERS)
    settled = training.settle()
    conditions.say(f"{len(training.batch)} rows a step: {settled:.2f} s")
    made = tempfile.mkdtemp(dir="/dev/shm") if conditions.rank() == 0 else ""
    memory, rounds = Path(conditions.of_first_rank(made)), list[Round]()
    near = holdfast.Tier(memory / "near", every=NEAR_STEPS)
    try:
        with holdfast.CheckpointManager(
            root, every=BLOCK_STEPS, keep_last=2, near=near, preemption=False, settings=lazy_settings()
        ) as manager:
            manager.load(training.state)
            _steps(training, manager, BLOCK_STEPS)
            for number in range(params["rounds"]):
                training.step_seconds.clear()
                first, each = (number + 2) * BLOCK_STEPS, Round()
                for name in ("with", "without") if number % 2 == 0 else ("without", "with"):
                    own = manager if name == "with" else None
                    each[name] = conditions.timed(lambda own=own, first=first: _steps(training, own, first))
                each["step"] = conditions.slowest(statistics.median(training.step_seconds))
                rounds.append(each)
                conditions.say(", ".join(f"{name} {value:.2f} s" for name, value in each.items()))
            manager.close(wait=False)
    finally:
        conditions.on_first_rank(lambda: shutil.rmtree(memory))
    typical = statistics.median(each["step"] for each in rounds)
    is_off = abs(typical - STEP_SECONDS) > STEP_SECONDS_OFF
    return Measured(rounds, [f"a step took {typical:.2f} s, not {STEP_SECONDS} ± {STEP_SECONDS_OFF}"] if is_off else [])


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the total time with saves over the time without; lowest and highest are ratios of one round."""
    assert present(rounds, "with", "without")
    each = [one["with"] / one["without"] for one in rounds]
    whole = sum(one["with"] for one in rounds) / sum(one["without"] for one in rounds)
    return {"near_train_slowdown": Spread(whole, min(each), max(each))}


PART = Part(
    name="shelf_training",
    question="How much longer does training take that saves into memory every two steps?",
    ranks=2,
    full={"rounds": 10},
    quick={"rounds": 2},
    measure=measure,
    keys=keys,
)
