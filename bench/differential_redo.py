"""Time and memory of a redo: `python -m bench.differential_redo WAY ROOT …` is one rank."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from bench import conditions, memory
from bench.differential_training import LAYERS, NEVER, WIDTH, Loop, Training
from bench.differential_world import World
from bench.part import Measured, Params, Part, Round, Spread, spreads_of

BASE = 1
_ROWS, _BARE_STEPS = 8, 5


_EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
"""Memory of freed tensors goes back to the kernel at once: glibc would keep some, more or less by chance."""


def measure(root: Path, params: Params) -> Measured:
    """Log a run once, then load it in new processes, round by round: for the time, and for the memory."""

    def found(way: str, variables: Mapping[str, str]) -> Round:
        arguments = [way, str(root / "run"), *(str(params[name]) for name in ("width", "layers", "records"))]
        result = root / "result.json"
        with World("bench.differential_redo", [*arguments, str(result)], root, variables) as world:
            world.join()
        each: Round = json.loads(result.read_text())
        return each

    found("log", {})
    rounds: list[Round] = []
    for number in range(params["rounds"]):
        each = found("time", {}) | found("memory", _EXACT_MEMORY)
        rounds.append(each)
        conditions.say(
            f"round {number + 1} of {params['rounds']}: a record {each['redo']:.3f} s, a bare step {each['bare']:.3f} "
            f"s, a base {each['base']:.3f} s; above the state {each['redo_mib']:.0f} MiB, for a bare step with its "
            f"gradients {each['step_mib']:.0f} MiB"
        )
    return Measured(rounds, [])


def log(root: Path, training: Training, records: int) -> Round:
    """Leave a run with a base and records after it."""
    loop = Loop(root, training, is_logged=True)
    with loop.manager:
        loop.base()
        for _ in range(records):
            loop.step()
        loop.await_seals()
    return {}


def seconds_of_redo(root: Path, training: Training, records: int) -> Round:
    """Return the seconds of a record, of the base and of a bare step."""
    conditions.on_first_rank(partial(conditions.touch_pages, root))
    with holdfast.CheckpointManager(root, every=NEVER) as manager:
        _load(manager, training, records)  # Memory and code are warm after this.
        base_seconds = conditions.timed(lambda: manager.load(training.state, step=BASE))
        seconds = conditions.timed(lambda: _load(manager, training, records))
    _set_gradients(training)
    bare = [conditions.timed(training.optimizer.step) for _ in range(_BARE_STEPS)]
    return {"redo": (seconds - base_seconds) / records, "base": base_seconds, "bare": statistics.median(bare)}


def memory_of_redo(root: Path, training: Training, records: int) -> Round:
    """Return the peaks of a bare step with its gradients and of a load with redo, both above the state."""
    # A training that goes on has optimizer state, and the memory of DDP.
    training.step()
    before = memory.memory_mib("VmRSS")
    memory.forget_peak()
    _set_gradients(training)
    training.optimizer.step()
    step_mib = memory.memory_mib("VmHWM") - before
    training.optimizer.zero_grad()
    with holdfast.CheckpointManager(root, every=NEVER) as manager:
        memory.forget_peak()
        _load(manager, training, records)
        redo_mib = memory.memory_mib("VmHWM") - before
    return {"redo_mib": conditions.slowest(redo_mib), "step_mib": conditions.slowest(step_mib)}


def _load(manager: holdfast.CheckpointManager, training: Training, records: int) -> None:
    manager.load(training.state)
    report = manager.load_report
    assert report is not None and report.redone_steps == records, report


def _set_gradients(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.grad = torch.rand_like(parameter)


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the time of a record in bare steps, and the memory above that of a bare step with its gradients."""
    return spreads_of(
        {
            "redo_vs_step": [each["redo"] / each["bare"] for each in rounds],
            "redo_peak_extra_mib": [max(each["redo_mib"] - each["step_mib"], 0.0) for each in rounds],
        }
    )


PART = Part(
    name="redo",
    question="How long does the redo of a record take, beside a bare step, and how much memory does it need?",
    ranks=1,
    full={"rounds": 7, "records": 20, "width": WIDTH, "layers": LAYERS},
    quick={"rounds": 2, "records": 8, "width": WIDTH, "layers": LAYERS},
    measure=measure,
    keys=keys,
)


def main() -> None:
    """Run one rank."""
    way, root, width, layers, records, result = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(int(width), int(layers), _ROWS)
    do = {"log": log, "time": seconds_of_redo, "memory": memory_of_redo}[way]
    found = do(Path(root), training, int(records))
    conditions.on_first_rank(lambda: Path(result).write_text(json.dumps(found)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
