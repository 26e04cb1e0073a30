"""Ranks load one run again and again, each time with another damage to the log of one rank: a case of a world."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.backends.stores.local import LocalStore
from holdfast.errors import CheckpointError
from tests.crash.redo_log.recorded_run import digest_of, network, wait_for_seal
from tests.crash.redo_log.test_store_faults import Fault
from tests.support.gloo_worlds import World

STEPS = 7


def load_damaged(world: World, root: str, layout: str, cuts: int) -> list[dict[str, object]]:
    """Train a few steps, then load once for each damage; return the damage, and what the load found.

    Args:
        world: The ranks.
        root: The root of the run.
        layout: `ddp` or `fsdp`.
        cuts: How many segments are cut, and how many have a flipped byte, each at a drawn place.
    """
    digests = _trained(root, layout, world)
    model, _ = network(layout, world.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.RngState()}
    found: list[dict[str, object]] = []
    with holdfast.CheckpointManager(root, every=1000) as manager:
        for path, whole, damaged in _damages(Path(root), cuts):
            dist.barrier()
            if world.rank == 0:
                path.unlink()
                if damaged is not None:
                    path.write_bytes(damaged)
            dist.barrier()
            step = manager.load(state)
            assert step is not None and manager.load_report is not None
            dist.barrier()
            if world.rank == 0:
                path.write_bytes(whole)
            found.append(
                {
                    "damage": f"{path.parent.name}/{path.name}, {'none' if damaged is None else len(damaged)} bytes",
                    "before": int(path.stem) - 1,
                    "step": step,
                    "is_right": _digest(model, optimizer) == digests[step],
                    "why": manager.load_report.why_not_further,
                }
            )
        dist.barrier()
        assert manager.load(state) == STEPS
    return found


def load_with_faults(world: World, root: str, layout: str, stride: int) -> list[dict[str, object]]:
    """Train a few steps, then load with a fault at calls of rank 1 so far from each other; return what the loads found.

    Args:
        world: The ranks.
        root: The root of the run.
        layout: `ddp` or `fsdp`.
        stride: Calls from one fault to the next.
    """
    digests = _trained(root, layout, world)
    model, _ = network(layout, world.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.RngState()}
    found: list[dict[str, object]] = []
    at, is_met = 1, True
    while is_met:
        fault = Fault("once", at)
        store = fault.store(LocalStore(root, settings=holdfast.Settings()))
        store.url = f"faulty://{root}"
        step, error = None, ""
        with holdfast.CheckpointManager(store, every=1000) as manager:
            fault.is_armed = world.rank == 1
            try:
                step = manager.load(state)
            except CheckpointError as failure:
                error = type(failure).__name__
            fault.is_armed = False
        met = [bool(fault.met)]
        dist.broadcast_object_list(met, src=1)
        is_met = met[0]
        is_right = step is None or _digest(model, optimizer) == digests[step]
        found.append({"at": at, "step": step, "error": error, "is_right": is_right})
        at += stride
    return found


def _trained(root: str, layout: str, world: World) -> list[str]:
    """Train, with a segment for each step; return the digest after each step."""
    model, replica = network(layout, world.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.RngState()}
    torch.manual_seed(100 + world.rank)
    digests = [""]
    with holdfast.CheckpointManager(root, every=1000, differential=True) as manager:
        for step in range(1, STEPS + 1):
            replica(torch.randn(6, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = manager.maybe_save(step, state)
            if handle is not None:
                handle.wait()
            wait_for_seal(manager, step)
            digests.append(_digest(model, optimizer))
    return digests


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    # Without the buffers: under DDP every rank has those of rank 0 after a load.
    parameters = nn.ParameterList(model.parameters())
    return digest_of(parameters, optimizer, nn.Identity())


def _damages(root: Path, cuts: int) -> Iterator[tuple[Path, bytes, bytes | None]]:
    """Yield segments, their bytes, and what is in their place, alike on every rank; None removes the segment."""
    chance, segments = random.Random(4), sorted(root.glob("log/*/r*/*.safetensors"))
    # Read at once: a rank that is ahead must not see the damage before.
    whole = {path: path.read_bytes() for path in segments}
    for path in segments:
        yield path, whole[path], None
    for path in chance.choices(segments, k=cuts):
        yield path, whole[path], whole[path][: chance.randrange(len(whole[path]))]
    for path in chance.choices(segments, k=cuts):
        data = bytearray(whole[path])
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        yield path, whole[path], bytes(data)
