"""The cost of the redo log in training: processor time, boundaries, stalls of bases, bytes of records.

Two loops of one process group take turns: one with the log, and one without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench import conditions
from bench.compression_state import Batches, Gpt
from bench.differential_training import Loop, Training, total
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spreads_of

STEP_SECONDS, STEP_SECONDS_OFF = 1.5, 0.3

# ------------------------------------------------------------------------------- processor time and stall


def measure(root: Path, params: Params) -> Measured:
    """Measure pairs of blocks, a base of each loop before each pair."""
    trainings = {name: Training() for name in ("with", "without")}
    settled = _settle(list(trainings.values()))
    conditions.say(f"{len(trainings['with'].batch)} rows a step: {settled:.2f} s")
    rounds: list[Round] = []
    with ExitStack() as stack:
        loops = {
            name: Loop(root / name, each, is_logged=name == "with", is_coded=bool(params["coded"]))
            for name, each in trainings.items()
        }
        for loop in loops.values():
            stack.enter_context(loop.manager)
            loop.base()
        for number in range(params["pairs"]):
            each: Round = {}
            for name in in_turn(list(loops), number):
                each[f"stall_{name}"] = _stall(loops[name])
            for name in in_turn(list(loops), number):
                each[f"cpu_{name}"], each[f"step_{name}"] = _block(loops[name], params["steps"])
            rounds.append(each)
            conditions.say(
                f"pair {number + 1} of {params['pairs']}, processor seconds a step: {each['cpu_with']:.3f} with the "
                f"log, {each['cpu_without']:.3f} without; stall of a base {each['stall_with']:.3f}, "
                f"{each['stall_without']:.3f} s; a step takes {each['step_with']:.2f}, {each['step_without']:.2f} s"
            )
    typical = statistics.median(each["step_without"] for each in rounds)
    off = abs(typical - STEP_SECONDS) > STEP_SECONDS_OFF
    return Measured(rounds, [f"overhead: a step took {typical:.2f} s, not {STEP_SECONDS}"] if off else [])


def _settle(trainings: Sequence[Training]) -> float:
    """Choose the rows of a batch for which a step takes a second and a half of a processor; return its seconds.

    On idle cores that is the time of a step. On busy ones the step is longer, and the ratio stays that of this step.
    """
    first = trainings[0]
    first.step()
    for _ in range(5):
        began = time.process_time()
        for _ in range(3):
            first.step()
        seconds = total(time.process_time() - began) / 3 / dist.get_world_size()
        if abs(seconds - STEP_SECONDS) < STEP_SECONDS_OFF / 3:
            break
        rows = max(round(len(first.batch) * STEP_SECONDS / seconds), 1)
        for training in trainings:
            training.batch = torch.rand(rows, training.batch.shape[1])
    return seconds


def _stall(loop: Loop) -> float:
    """Return the seconds for which a base blocks training: the call after a step."""
    loop.training.step()
    conditions.quiet_disk()
    handles = []
    save = partial(loop.manager.save, loop.training.at, loop.training.state)
    seconds = conditions.timed(lambda: handles.append(save()))
    report = handles[0].wait()
    assert report is not None and report.staging == "copy", report
    loop.await_seals()
    return seconds


def _block(loop: Loop, steps: int) -> tuple[float, float]:
    """Return the processor seconds of a step on all threads of all ranks, and its seconds."""
    conditions.quiet_disk()
    conditions.barrier()
    start, began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loop.step()
    seconds = time.perf_counter() - start
    # The last seal is a cost of the block.
    loop.await_seals()
    spent = time.process_time() - began
    return total(spent) / steps, conditions.slowest(seconds) / steps


def values(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the ratios of each pair."""
    return {
        "redo_overhead": [each["cpu_with"] / each["cpu_without"] for each in rounds],
        "base_stall_with_log": [each["stall_with"] / each["stall_without"] for each in rounds],
    }


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the same over all pairs."""
    return spreads_of(values(rounds, params))


OVERHEAD = Part(
    name="overhead",
    question="How much processor time does a training step take with the log, and how long does a base block it?",
    ranks=2,
    full={"pairs": 12, "steps": 10, "coded": 0},
    quick={"pairs": 3, "steps": 4, "coded": 0},
    measure=measure,
    keys=keys,
    values=values,
)


def values_coded(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the ratios of processor time, of a log with compressed gradients."""
    return {"redo_overhead_coded": values(rounds, params)["redo_overhead"]}


OVERHEAD_CODED = replace(
    OVERHEAD,
    name="overhead_coded",
    question="How much processor time does a training step take with a log of compressed gradients?",
    full={**OVERHEAD.full, "coded": 1},
    quick={**OVERHEAD.quick, "coded": 1},
    keys=lambda rounds, params: spreads_of(values_coded(rounds, params)),
    values=values_coded,
)

# ------------------------------------------------------------------------------- a boundary

PARAMETERS = 1000
_STEPS = 20


class Many(Training):
    """A thousand small parameters, so that no copy takes time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ParameterList([torch.rand(16) for _ in range(PARAMETERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.at = 0

    def step(self) -> None:
        """Step with new gradients."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.at += 1


def measure_boundary(root: Path, params: Params) -> Measured:
    """Time the call after each step."""
    rounds: list[Round] = []
    with ExitStack() as stack:
        loops = {name: Loop(root / name, Many(), is_logged=name == "with") for name in ("with", "without")}
        for loop in loops.values():
            stack.enter_context(loop.manager)
            loop.base()
            _boundary_seconds(loop)  # Memory and code are warm after this.
        for number in range(params["rounds"]):
            each = {name: _boundary_seconds(loops[name]) for name in in_turn(list(loops), number)}
            rounds.append(each)
            conditions.say(
                f"round {number + 1} of {params['rounds']}, milliseconds: {1e3 * each['with']:.2f} with the log, "
                f"{1e3 * each['without']:.2f} without"
            )
    return Measured(rounds, [])


def _boundary_seconds(loop: Loop) -> float:
    """Return the median seconds of the call after a step, on the slower rank."""
    seconds = []
    for _ in range(_STEPS):
        loop.training.step()
        conditions.barrier()
        start = time.perf_counter()
        loop.manager.maybe_save(loop.training.at, loop.training.state)
        seconds.append(time.perf_counter() - start)
        # A real step is longer than a seal.
        loop.await_seals()
    return conditions.slowest(statistics.median(seconds))


def values_of_boundary(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the milliseconds that the log adds."""
    return {"boundary_ms_1000_parameters": [1e3 * (each["with"] - each["without"]) for each in rounds]}


BOUNDARY = Part(
    name="boundary",
    question="How much longer does maybe_save take with the log, for a thousand parameters?",
    ranks=2,
    full={"rounds": 9},
    quick={"rounds": 3},
    measure=measure_boundary,
    keys=lambda rounds, params: spreads_of(values_of_boundary(rounds, params)),
    values=values_of_boundary,
)

# ------------------------------------------------------------------------------- bytes of a record

_STATE_BYTES_A_PARAMETER = 12


class GptTraining(Training):
    """The small GPT of the bench of compression: in fp32 under DDP, or reduced in bf16 and clipped under FSDP2."""

    def __init__(self, *, in_bf16: bool = False) -> None:
        torch.manual_seed(0)
        self.model = self.replica = Gpt()
        if in_bf16:
            fully_shard(self.model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
        else:
            self.replica = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if in_bf16:
            clip = partial(nn.utils.clip_grad_norm_, list(self.model.parameters()), 1e-3)
            self.optimizer.register_step_pre_hook(lambda *_: (clip(), None)[1])
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.batch = Batches(seed=dist.get_rank()).next(rows=2)
        self.at = 0


def measure_records(root: Path, params: Params) -> Measured:
    """Count the bytes of whole segments."""
    found: list[Round] = [{} for _ in range(params["steps"])]
    for name, is_coded in (("fp32", False), ("fp32_coded", True), ("bf16_clipped_coded", True)):
        training = GptTraining(in_bf16=name.startswith("bf16"))
        loop = Loop(root / name, training, is_logged=True, is_coded=is_coded)
        with loop.manager:
            loop.base()
            for _ in range(params["steps"]):
                loop.step()
                loop.await_seals()
            conditions.barrier()
            sizes: dict[str, int] = {}
            for path in (root / name / "log").rglob("*.safetensors"):
                sizes[path.name] = sizes.get(path.name, 0) + path.stat().st_size
            conditions.barrier()
        count = sum(parameter.numel() for parameter in training.model.parameters())
        for each, size in zip(found, sizes.values(), strict=True):
            each[f"record_ratio_{name}"] = _STATE_BYTES_A_PARAMETER * count / size
    return Measured(found, [])


def keys_of_records(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the bytes of the state ÷ those of the segments of a step."""
    return spreads_of({key: [each[key] for each in rounds] for key in rounds[0]})


RECORDS = Part(
    name="records",
    question="How much smaller is a record than the state?",
    ranks=2,
    full={"steps": 10},
    quick={"steps": 3},
    measure=measure_records,
    keys=keys_of_records,
)
