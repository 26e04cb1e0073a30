"""Read amplification: bytes that a whole job reads over the bytes of the state, when ranks exchange what they read.

`amplifications` runs real gloo processes: states are saved by rows on two ranks and on four, and loaded by rows on
three and on two (FSDP to FSDP), and by columns on two (FSDP to tensor parallel). Every load is compared bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import conditions
from bench.part import Measured, Params, Part, Round, Spread

HERE = Path(__file__).parent
CASES = {
    "2_to_3": (2, 3, "rows"),
    "4_to_2": (4, 2, "rows"),
    "fsdp_to_tp": (2, 2, "columns"),
}
"""Ranks that save by rows, ranks that load, and how."""

ROWS, COLUMNS = 1361, 1024
"""Shape of every fp32 tensor: neither ranks nor chunks divide its rows."""


def amplifications(folder: Path, total_mib: int) -> dict[str, float]:
    """Return for each case the bytes read by the whole job over the bytes of the state.

    Args:
        folder: Where to save; removed afterwards.
        total_mib: Bytes of the state, about.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for ranks in sorted({saving for saving, _, _ in CASES.values()}):
            _run_ranks(ranks, "save", str(folder / f"from-{ranks}"), str(total_mib))
        return {
            name: _run_ranks(loading, "load", str(folder / f"from-{saving}"), str(total_mib), layout)
            for name, (saving, loading, layout) in CASES.items()
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_ranks(count: int, *arguments: str) -> float:
    """Run one job; return what its rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.amplification", *arguments],
            cwd=HERE.parent,
            text=True,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            env={**os.environ, **job, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    try:
        output, _ = ranks[0].communicate()
        if any(rank.wait() for rank in ranks):
            raise SystemExit("bench: a rank failed; its error is above")
        return float(json.loads(output.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()


def _rank_main(verb: str, path: str, total_mib: str, layout: str = "rows") -> None:
    """Save or load on this rank; rank 0 prints the bytes read by all ranks over those of the state."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import holdfast
    from bench.settings import settings

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    count = max((int(total_mib) << 20) // (ROWS * COLUMNS * 4), 1)

    def state(placement: Shard, *, fill: bool) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        wholes = (
            torch.rand(ROWS, COLUMNS, generator=generator) if fill else torch.zeros(ROWS, COLUMNS) for _ in range(count)
        )
        return {f"layers.{n}.weight": distribute_tensor(whole, mesh, [placement]) for n, whole in enumerate(wholes)}

    amplification = 1.0
    if verb == "save":
        holdfast.save(path, state(Shard(0), fill=True))
    else:
        placement = Shard(0) if layout == "rows" else Shard(1)
        target = state(placement, fill=False)
        report = holdfast.load(path, target, settings=settings(share_reads="always"))
        for name, expected in state(placement, fill=True).items():
            assert torch.equal(target[name].to_local(), expected.to_local()), name
        read = torch.tensor([report.bytes])
        dist.all_reduce(read)
        amplification = int(read) / (count * ROWS * COLUMNS * 4)
    if dist.get_rank() == 0:
        print(json.dumps(amplification))
    dist.barrier()
    dist.destroy_process_group()


def measure(root: Path, params: Params) -> Measured:
    """Count the bytes read in each case."""
    found = amplifications(root, params["mib"])
    conditions.say(", ".join(f"{name} {ratio:.3f}" for name, ratio in found.items()))
    return Measured([found], [])


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the worst of the cases."""
    found = [each[name] for each in rounds for name in CASES]
    return {"reshard_read_amplification": Spread(max(found), min(found), max(found))}


PART = Part(
    name="amplification",
    question="How many bytes does a job read that loads onto another layout, over those of the state?",
    ranks=1,
    full={"mib": 192},
    quick={"mib": 48},
    measure=measure,
    keys=keys,
)


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
