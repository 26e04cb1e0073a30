"""How long a redo takes and what memory it needs: `python -m bench.differential_redo WAY ROOT …` is one rank."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
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


def measure(root: Path, params: Params) -> Measured:
    """Log a run once, then load it in new processes, round by round."""
    run, result = root / "run", root / "result.json"
    sizes = [str(params[name]) for name in ("width", "layers", "records")]
    rounds: list[Round] = []
    for number in range(params["rounds"] + 1):
        way = "log" if number == 0 else "redo"
        with World("bench.differential_redo", [way, str(run), *sizes, str(result)], root) as world:
            world.join()
        if number:
            each: Round = json.loads(result.read_text())
            rounds.append(each)
            conditions.say(
                f"round {number} of {params['rounds']}: a record {each['redo']:.3f} s, a bare step {each['bare']:.3f} "
                f"s, a base {each['base']:.3f} s; memory above the state {each['redo_mib']:.0f} MiB, for a bare step "
                f"with its gradients {each['step_mib']:.0f} MiB"
            )
    return Measured(rounds, [])


def log(root: Path, training: Training, records: int) -> None:
    """Leave a run with a base and records after it."""
    loop = Loop(root, training, is_logged=True)
    with loop.manager:
        loop.base()
        for _ in range(records):
            loop.step()
        loop.await_seals()


def redo(root: Path, training: Training, records: int) -> Round:
    """Step, then load the base, and the base with its records."""
    # Tensors of the optimizer, and the memory of DDP: a training that goes on has both.
    training.step()
    training.optimizer.zero_grad()
    conditions.on_first_rank(partial(conditions.touch_pages, root))
    manager = holdfast.CheckpointManager(root, every=NEVER)
    memory.forget_peak()
    before = memory.memory_mib("VmRSS")
    for parameter in training.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    bare = [conditions.timed(training.optimizer.step) for _ in range(_BARE_STEPS)]
    step_mib = memory.memory_mib("VmHWM") - before
    training.optimizer.zero_grad()
    memory.forget_peak()
    base_seconds, seconds = [], []
    for number in range(2):
        base_seconds.append(conditions.timed(lambda: manager.load(training.state, step=BASE)))
        seconds.append(conditions.timed(lambda: manager.load(training.state)))
        report = manager.load_report
        assert report is not None and report.redone_steps == records, report
        if number == 0:
            redo_mib = memory.memory_mib("VmHWM") - before
    manager.close()
    # The second time, as memory and code are warm. The peak is that of the first.
    return {
        "redo": (seconds[1] - base_seconds[1]) / records,
        "base": base_seconds[1],
        "bare": statistics.median(bare),
        "redo_mib": conditions.slowest(redo_mib),
        "step_mib": conditions.slowest(step_mib),
    }


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
    question="How long does the redo of a record take, beside a bare step, and what memory does it need?",
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
    if way == "log":
        log(Path(root), training, int(records))
    else:
        found = redo(Path(root), training, int(records))
        conditions.on_first_rank(lambda: Path(result).write_text(json.dumps(found)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
