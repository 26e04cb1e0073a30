"""The memory that a save needs beyond the state and the arena. Each way of saving runs in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import holdfast
from bench import conditions
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from bench.settings import settings
from bench.state import MIB

WAYS = ("blocking", "copy", "lazy")
SAVES = 3
OBJECT_PACK_MIB = 32
LAZY_ARENA_MIB = 64
"""A small part of the state: copies come faster than windows are written, so that every buffer of it is used, and none
that was not used can stand in for what was taken beside the arena."""


def measure(root: Path, params: Params) -> Measured:
    """Save in each way; return the additional MiB of each."""
    rounds = [measured(str(root), params["mib"], lambda: conditions.removed(root)) for _ in range(params["rounds"])]
    return Measured(rounds, [])


def measured(root: str, mib: int, remove: Callable[[], None], module: str = "bench.memory") -> Round:
    """Save in each way below a path or a URL, and remove what was saved; return the additional MiB of each."""
    each = {}
    for way in WAYS:
        command = [sys.executable, "-m", module, way, root, str(mib)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        each[way] = float(json.loads(ended.stdout))
        remove()
    conditions.say(", ".join(f"{name} {extra:.0f} MiB" for name, extra in each.items()))
    return each


def extra_mib(way: str, root: str, mib: int) -> float:
    """Save a state several times in this process; return the growth of its memory in MiB, without the arena."""
    model = torch.nn.ParameterDict({str(n): torch.rand(MIB // 4, 16) for n in range(mib // 16)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return growth_mib(way, root, {"model": model, "optimizer": optimizer}, optimizer, mib * MIB)


def growth_mib(
    way: str, root: str, state: dict[str, object], optimizer: torch.optim.Optimizer, total_bytes: int, **more: object
) -> float:
    """Save a state several times in this process; return the growth of its memory in MiB, without the arena.

    Args:
        way: One of `WAYS`.
        root: Where to save.
        state: What to save.
        optimizer: Its optimizer, whose step is a fence. Nothing has gradients, so it changes nothing.
        total_bytes: Bytes of the state.
        more: Further settings.
    """
    mib = -(-total_bytes // MIB)
    holdfast.save(f"{root}/warm", {"x": torch.zeros(4)}, process_group=False)
    staging, arena_mib_max = ("lazy", LAZY_ARENA_MIB) if way == "lazy" else ("copy", 2 * mib)
    # The state does not change between the saves, and each save shall write all of it.
    chosen = settings(staging=staging, arena_bytes_max=arena_mib_max * MIB, deduplicate=False, **more)
    # A pack of an object store has 32 MiB and a header, and every pack begins with a window of its own.
    packs = mib // OBJECT_PACK_MIB if "://" in root else 0
    arena_mib = {"blocking": 0, "copy": mib + packs, "lazy": LAZY_ARENA_MIB}[way]
    with holdfast.CheckpointManager(f"{root}/run", process_group=False, settings=chosen) as manager:
        forget_peak()
        before = memory_mib("VmRSS")
        for step in range(SAVES):
            if way == "blocking":
                holdfast.save(f"{root}/{step}", state, process_group=False, settings=chosen)
            else:
                handle = manager.save(step, state)
                # Nothing was computed meanwhile: the fence finds almost everything still to be copied.
                optimizer.step()
                report = handle.wait()
                assert report is not None and report.staging == way, report
        return max(memory_mib("VmHWM") - before - arena_mib, 0.0)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory_mib(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the largest value."""
    return {"save_peak_extra_mib": spread_of([max(each.values()) for each in rounds])}


PART = Part(
    name="memory",
    question="How much memory does a save take above the state and the arena?",
    ranks=1,
    full={"mib": 1024, "rounds": 3},
    quick={"mib": 1024, "rounds": 1},
    measure=measure,
    keys=keys,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(extra_mib(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
