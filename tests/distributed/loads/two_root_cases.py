"""Loads of real ranks from a near root and another: both have damaged chunks, and the near one lacks packs."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast._face import wiring
from holdfast.base.clock import SystemClock
from holdfast.base.ports.framework import Selection
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import Job
from holdfast.training.loading.load import load_checkpoint
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.step_choice import StepChoice
from tests.support.faulty_run import state_of
from tests.support.gloo_worlds import World


def load_from_both(world: World, root: str, share_reads: str, compression: str) -> dict[str, object]:
    """Save on all ranks, damage both roots, and load on all ranks."""
    settings = Settings(chunk_bytes=4096, share_reads=share_reads, compression=compression)  # type: ignore[arg-type]
    far, near = Path(root, "far"), Path(root, "near")
    with holdfast.CheckpointManager(far, settings=settings) as manager:
        manager.save(1, state_of(1)).wait(timeout=60.0)
    dist.barrier()
    if world.rank == 0:
        shutil.copytree(far, near)
        first, *_ = packs = sorted(near.rglob("*.safetensors"))
        for pack in packs[1:]:
            pack.unlink()
        for path, part in ((first, 0.7), (far / first.relative_to(near), 0.4)):
            data = bytearray(path.read_bytes())
            data[int(len(data) * part)] ^= 8
            path.write_bytes(data)
    dist.barrier()
    store, other = (wiring.store_at(str(each), settings) for each in (near, far))
    home = CheckpointLocation(store, "", None, root=store, others=(other,))
    comm = wiring.comm_of(None)
    job = Job(comm, SystemClock(), settings, wiring.framework_of(comm), codecs=wiring.codecs(), saves=False)
    state = {name: torch.zeros(30_000) for name in "abc"} | {"step": 0}
    report = load_checkpoint(job, StepChoice(home), LoadRequest(state, Selection(), strict=True))
    wanted = state_of(1)
    return {
        "same": all(torch.equal(state[name], wanted[name]) for name in "abc"),  # type: ignore[arg-type]
        "sources": {Path(url).name: count for url, count in report.sources.items()},
        "bytes": report.bytes,
        "exchanged": report.exchanged_bytes,
    }
