"""The memory that a compressed save needs beyond the state and the arena, each way of saving in its own process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from bench import conditions, memory
from bench.compression_state import Gpt, bytes_of, snapshots, split
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from bench.state import MIB


def measure(root: Path, params: Params) -> Measured:
    """Save in each way; return the additional MiB of each."""
    rounds = [
        memory.measured(str(root), params["mib"], lambda: conditions.removed(root), module="bench.compression_memory")
        for _ in range(params["rounds"])
    ]
    return Measured(rounds, [])


def training_state(mib: int) -> tuple[dict[str, object], torch.optim.Optimizer, int]:
    """Return a mixed-precision state of about a size, as a training passes it; its optimizer, and its bytes."""
    last = snapshots()[-1]
    count = max(round(mib * MIB / bytes_of(last)), 1)
    weights = nn.ModuleList(Gpt().to(torch.bfloat16) for _ in range(count))
    masters = nn.ModuleList(Gpt() for _ in range(count))
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.0, fused=True)
    for number in range(count):
        for name, tensor in last.items():
            kind, parameter = split(name)
            master = masters.get_parameter(f"{number}.{parameter}")
            with torch.no_grad():
                if kind == "weight":
                    weights.get_parameter(f"{number}.{parameter}").copy_(tensor)
                elif kind == "master":
                    master.copy_(tensor)
                else:
                    moments = optimizer.state[master]
                    moments.setdefault("step", torch.tensor(300.0))
                    moments[kind] = tensor.clone()
    return {"model": weights, "master": masters, "optimizer": optimizer}, optimizer, count * bytes_of(last)


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the largest value."""
    return {"compression_peak_extra_mib": spread_of([max(each.values()) for each in rounds])}


PART = Part(
    name="peak",
    question="How much memory does a compressed save take above the state and the arena?",
    ranks=1,
    # With more the 16-bit weights, which no optimizer steps, were too much for a lazy save to copy at the call.
    full={"mib": 384, "rounds": 3},
    quick={"mib": 192, "rounds": 1},
    measure=measure,
    keys=keys,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    state, optimizer, total_bytes = training_state(int(sys.argv[3]))
    print(json.dumps(memory.growth_mib(sys.argv[1], sys.argv[2], state, optimizer, total_bytes, compression="on")))
