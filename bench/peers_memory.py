"""The memory of one node of peers with lazy saves: its folder and its rank above the state; the agent apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import conditions
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from bench.peers_place import NODES, folder_of, manager
from bench.shelf_memory import SAVES, STEP_SECONDS, Peak
from bench.state import MIB

FREE_SHARE = 4.5
"""Memory that the whole takes, by the bytes of the states: the states, the peaks and the agents."""


def measure(root: Path, params: Params) -> Measured:
    """Save near several times and wait for the protection; return the peak of the largest node over its share."""
    mib, notes = params["mib"], list[str]()
    free_mib = next(
        int(line.split()[1]) / 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line
    )
    while conditions.slowest(-free_mib) > -FREE_SHARE * NODES * mib:
        mib //= 2
        notes = [f"memory is short: {mib} MiB a node"]
    model = torch.nn.ParameterDict({str(number): torch.rand(MIB // 4, 16) for number in range(mib // 16)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = conditions.rank()
    state = {"model": {f"stage{rank}": model}, "optimizer": {f"stage{rank}": optimizer}}
    with manager(root, staging="lazy", collect_grace_seconds=0.0, deduplicate=False) as run:
        run.load(state)
        peak = Peak(folder_of(rank))
        for step in range(1, SAVES + 1):
            handle = run.save(step, state, near_only=True)
            optimizer.step()
            report = handle.wait("near")
            assert report is not None and report.staging == "lazy", report
            handle.wait("replicated")
            time.sleep(STEP_SECONDS)
        found = conditions.slowest(peak.end()) / mib
        run.close(wait=False)
    return Measured([{"peak": found}], notes)


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the peak over the share."""
    return {"peers_memory_vs_state": spread_of([each["peak"] for each in rounds])}


PART = Part(
    name="peers_memory",
    question="How much memory does a node take, by the bytes of its share?",
    ranks=NODES,
    full={"mib": 1024},
    quick={"mib": 128},
    measure=measure,
    keys=keys,
)
