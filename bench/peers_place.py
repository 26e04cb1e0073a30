"""Jobs whose ranks are the nodes of a near tier of peers, all on this machine, with a folder in memory each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from bench import conditions, job
from bench.part import Measured, Params, Part
from bench.settings import settings
from bench.shelf_memory import memory_folder
from bench.state import MIB
from holdfast.training.runs.tiers.agent_files import is_agent_running, read_serving

NODES = 4
MEMORY = "HOLDFAST_BENCH_MEMORY"
"""Variable that names the folder in memory."""

FOREVER_SECONDS = 1e6

State = dict[str, torch.Tensor]


def near() -> Path:
    """Return the folder of the folders of all nodes."""
    return Path(os.environ[MEMORY]) / "near"


def folder_of(rank: int) -> Path:
    """Return the folder of the node of a rank."""
    return near() / f"n{rank}"


def share(mib: int) -> State:
    """Return tensors of 16 MiB, so many MiB in all."""
    return {str(number): torch.rand(4 * MIB) for number in range(mib // 16)}


def manager(
    root: Path, *, every: int = 1 << 30, cap: float | None = None, **values: object
) -> holdfast.CheckpointManager:
    """Open the run on this rank, which is a node.

    Args:
        root: The root.
        every: Steps between near saves.
        cap: Most bytes that a node pulls a second.
        values: Settings.
    """
    os.environ["HOLDFAST_NODE"] = folder_of(conditions.rank()).name
    tier = holdfast.Tier(
        f"peers://{near()}",
        every=every,
        keep_last=1,
        bytes_max=1 << 40,
        group=dist.get_world_size(),
        orphan_seconds=FOREVER_SECONDS,
        max_bytes_per_second=cap,
    )
    return holdfast.CheckpointManager(root, near=tier, preemption=False, settings=settings(**values))


def end_agent(folder: Path) -> None:
    """End the agent of one node, as a lost node does."""
    serving = read_serving(str(folder))
    if serving is not None and is_agent_running(str(folder)):
        with suppress(ProcessLookupError):
            os.kill(serving.pid, signal.SIGKILL)


@contextmanager
def memory_of_nodes() -> Iterator[Path]:
    """Name a folder in memory for the jobs of a block; at the end, end the agents there."""
    with memory_folder() as memory:
        os.environ[MEMORY] = str(memory)
        try:
            yield memory
        finally:
            for folder in near().glob("*"):
                end_agent(folder)


def run(part: Part, params: Params, folder: Path) -> Measured:
    """Measure a part in a job of its own, with nodes of its own."""
    with memory_of_nodes():
        return job.run(part, params, folder / "job")
