"""How long a lazy save blocks training: in the call, and in the fence before the optimizer's step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast
from bench import conditions, device
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from bench.state import MIB, sharded_state

ARENA_MIB = 512
STEP_OVER_WRITE = 4.0
"""How much longer than a save that nothing computes beside a step is made: the loop that the key speaks of has steps
longer than the write, and computing slows the write."""


def lazy_settings(arena_mib: int = ARENA_MIB) -> holdfast.Settings:
    """Return settings with lazy staging and a small arena."""
    return holdfast.Settings(staging="lazy", arena_bytes_max=arena_mib * MIB)


class Sheets(nn.Module):
    """Sharded parameters of a given size; a step uses each of them for a chosen time."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        state = sharded_state(device.mesh(), total_bytes, fill=True)
        self.sheets = nn.ParameterList(nn.Parameter(tensor) for tensor in state.values())

    def backward(self, products: int) -> None:
        """Compute with this rank's part of every parameter, and set a gradient for each."""
        left = torch.rand(64, 2048, device=device.kind())
        each = max(products // len(self.sheets), 1)
        for parameter in self.sheets:
            share = conditions.local(parameter.detach())
            for _ in range(each):
                left[:, : share.shape[0]] @ share
            if parameter.grad is None:
                parameter.grad = DTensor.from_local(
                    torch.full_like(share, 1e-3), parameter.device_mesh, parameter.placements, run_check=False
                )
        device.settle()


class FencedStep:
    """Measures the time before an optimizer's step: global hooks run first, then the hook of this class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._reached = optimizer, 0.0
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "_reached", time.perf_counter()))

    def step(self) -> float:
        """Step; return the seconds until the optimizer's own code began."""
        start = time.perf_counter()
        self._optimizer.step()
        return self._reached - start


def measure(root: Path, params: Params) -> Measured:
    """Run a loop that saves every second step; compare a fenced step with the one after it."""
    total_bytes = params["mib_per_rank"] * dist.get_world_size() * MIB
    model = Sheets(total_bytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    fenced = FencedStep(optimizer)
    state = {"model": model, "optimizer": optimizer}
    rounds: list[Round] = []
    with holdfast.CheckpointManager(root, settings=lazy_settings()) as manager:
        products = _products_of_a_step(model, manager, state, root)
        for number in range(params["rounds"] + 1):
            conditions.quiet_disk()
            model.backward(1)
            plain = fenced.step()
            conditions.barrier()
            start = time.perf_counter()
            handle = manager.save(number + 1, state)
            called = time.perf_counter() - start
            model.backward(products)
            computed = time.perf_counter() - start - called
            fence = fenced.step()
            report = handle.wait()
            assert report is not None and report.staging == "lazy", report
            each = {
                "lazy_call": conditions.slowest(called),
                "lazy_fence": conditions.slowest(fence),
                "lazy_plain_step": conditions.slowest(plain),
                "lazy_blocked": conditions.slowest(called + max(fence - plain, 0.0)),
                "lazy_reported_fence": conditions.slowest(report.fence_seconds),
                "lazy_compute": conditions.slowest(computed),
                "lazy_committed": conditions.slowest(report.committed_seconds),
            }
            conditions.removed(root / f"step-{number + 1:012d}")
            if number:
                rounds.append(each)
                conditions.say(
                    f"round {number} of {params['rounds']}: call {called:.4f} s, fence {fence:.4f} s, "
                    f"step {computed:.2f} s, committed after {report.committed_seconds:.2f} s"
                )
    short = sum(each["lazy_compute"] < each["lazy_committed"] for each in rounds)
    return Measured(rounds, [f"lazy: in {short} rounds the step was no longer than the write"] if short else [])


def _products_of_a_step(
    model: Sheets, manager: holdfast.CheckpointManager, state: dict[str, object], root: Path
) -> int:
    """Return how many matrix products make a step longer than a save, with both ranks computing."""
    start = time.perf_counter()
    manager.save(0, state).wait()
    written = conditions.slowest(time.perf_counter() - start)
    conditions.removed(root / f"step-{0:012d}")
    trial = 2 * len(model.sheets)
    once = conditions.timed(lambda: model.backward(trial))
    return int(trial * STEP_OVER_WRITE * written / once) + 1


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the results per GiB and rank."""
    gib = params["mib_per_rank"] / 1024
    return {"stall_lazy_seconds_per_gib": spread_of([each["lazy_blocked"] / gib for each in rounds])}


PART = Part(
    name="lazy",
    question="How long does a save block training that has its state taken lazily?",
    ranks=2,
    full={"mib_per_rank": 1024, "rounds": 7},
    quick={"mib_per_rank": 256, "rounds": 3},
    measure=measure,
    keys=keys,
    devices=device.KINDS,
)
