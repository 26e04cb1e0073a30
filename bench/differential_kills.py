"""The steps that a killed run with a redo log loses: `python -m bench.differential_kills ROOT NOTES …` is one rank."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from bench import conditions
from bench.differential_training import LAYERS, WIDTH, Training
from bench.differential_world import RANKS, World
from bench.part import Measured, Params, Part, Round, Spread

EVERY = 500


def measure(root: Path, params: Params) -> Measured:
    """Kill the run at random, and start it again each time: its load returns the step that is left."""
    rounds: list[Round] = []
    notes: list[str] = []
    drawn = random.Random(40)
    before: list[Notes] = []
    for number in range(params["kills"] + 1):
        path = root / f"notes-{number}"
        sizes = [str(params[name]) for name in ("width", "layers", "step_ms")]
        with World("bench.differential_kills", [str(root / "run"), str(path), *sizes], root) as world:
            world.await_until(lambda path=path: all(each.is_loaded for each in Notes.of_ranks(path)))
            (loaded,) = {each.loaded for each in Notes.of_ranks(path)}
            if before:
                rounds.append(lost(before, loaded))
                notes += [f"kill {number}: {each.why}" for each in Notes.of_ranks(path) if each.why]
                each = rounds[-1]
                conditions.say(
                    f"kill {number} of {params['kills']}: went on at step {loaded}, lost {each['steps']:.0f} steps, "
                    f"{each['seconds']:.3f} s; a step takes {each['step_seconds']:.3f} s"
                )
            if number == params["kills"]:
                break
            world.await_until(lambda path=path: all(each.has_base for each in Notes.of_ranks(path)))
            time.sleep(drawn.uniform(0, params["kill_ms"] / 1e3))
        before = Notes.of_ranks(path)
    return Measured(rounds, notes)


@dataclass(slots=True)
class Notes:
    """The notes of a rank that was killed."""

    is_loaded: bool = False
    """Whether its load has ended."""

    loaded: int = 0
    """The step that the load returned; 0 for a new run."""

    why: str = ""
    """Why the redo did not go on."""

    has_base: bool = False
    """Whether the first base is committed."""

    ends: dict[int, float] = field(default_factory=dict)
    """When each step ended, by step."""

    @classmethod
    def of_ranks(cls, path: Path) -> list[Notes]:
        """Return the notes of all ranks."""
        return [cls.of(Path(f"{path}.{rank}")) for rank in range(RANKS)]

    @classmethod
    def of(cls, path: Path) -> Notes:
        """Read the notes of one rank: whole lines."""
        found = cls()
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines(keepends=True):
            word, _, rest = line.strip().partition(" ")
            if not line.endswith("\n"):
                break
            if word == "loaded":
                step, _, found.why = rest.partition(" ")
                found.is_loaded, found.loaded = True, int(step)
            elif word == "base":
                found.has_base = True
            else:
                found.ends[int(word)] = float(rest)
        return found


def lost(killed: Sequence[Notes], loaded: int) -> Round:
    """Return the cost of a kill: steps and seconds from the loaded step to the last one that a rank had ended."""
    latest = max(killed, key=lambda each: max(each.ends))
    last, ends = max(latest.ends), latest.ends
    # A run that goes on later than it ended has lost nothing: every rank had sealed a step that no rank had ended.
    steps = max(last - loaded, 0)
    assert loaded >= min(ends), "the first base of the killed run is not lost"
    lengths = [ends[step] - ends[step - 1] for step in ends if step - 1 in ends]
    seconds = ends[last] - ends[loaded] if steps else 0.0
    return {"steps": steps, "seconds": seconds, "step_seconds": statistics.median(lengths) if lengths else 0.0}


def train(root: str, notes: str, width: int, layers: int, step_seconds: float) -> None:
    """Train until this rank is killed."""
    parent = os.getppid()
    file = os.open(f"{notes}.{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(width, layers)
    manager = holdfast.CheckpointManager(root, every=EVERY, keep_last=2, differential=True)
    training.at = manager.load(training.state) or 0
    report = manager.load_report
    os.write(file, f"loaded {training.at} {'' if report is None else report.why_not_further}\n".encode())
    has_base = False
    while os.getppid() == parent:
        training.step_of(step_seconds)
        manager.maybe_save(training.at, training.state)
        os.write(file, f"{training.at} {time.monotonic()}\n".encode())
        if not has_base and manager.recoverable is not None:
            has_base = True
            os.write(file, b"base\n")


def keys_of_long(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the most steps that a kill cost."""
    steps = [each["steps"] for each in rounds]
    return {"rpo_steps_worst": Spread(max(steps), min(steps), max(steps))}


def keys_of_short(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the seconds that one kill of twenty exceeds."""
    seconds = [each["seconds"] for each in rounds]
    p95 = statistics.quantiles(seconds, n=20, method="inclusive")[-1]
    return {"rpo_seconds_p95": Spread(p95, min(seconds), max(seconds))}


LONG = Part(
    name="kills",
    question="How many steps of 1.5 s does a SIGKILL at random cost?",
    ranks=1,
    full={"kills": 10, "width": WIDTH, "layers": LAYERS, "step_ms": 1500, "kill_ms": 6000},
    quick={"kills": 2, "width": WIDTH, "layers": LAYERS, "step_ms": 1500, "kill_ms": 6000},
    measure=measure,
    keys=keys_of_long,
)

SHORT = Part(
    name="kills_short",
    question="How many seconds of training does a SIGKILL at random cost, with steps of 50 ms?",
    ranks=1,
    full={"kills": 60, "width": 512, "layers": 2, "step_ms": 50, "kill_ms": 2000},
    quick={"kills": 5, "width": 512, "layers": 2, "step_ms": 50, "kill_ms": 2000},
    measure=measure,
    keys=keys_of_short,
)

if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]) / 1e3)
