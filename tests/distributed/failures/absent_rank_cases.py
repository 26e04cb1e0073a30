"""Calls with collectives beside a rank that does not take part, and then beside one that has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import holdfast
from holdfast.backends.torch.comm import comm_of
from tests.support.gloo_worlds import World


def beside_an_absent_rank(world: World) -> dict[str, str]:
    """Return what each call of rank 0 raises: rank 1 stays away from a group first, and then dies."""
    path, state = world.scratch / "saved", {"w": torch.ones(1000)}
    holdfast.save(path, state)
    hasty = [dist.new_group(timeout=timedelta(seconds=0.5)) for _ in range(2)]
    with holdfast.CheckpointManager(world.scratch / "run") as manager:
        manager.save(1, state).wait()
        dist.barrier()
        if world.rank == 1:
            store = dist.distributed_c10d._get_default_store()
            store.wait(["rank 0 has waited"], timedelta(seconds=60))
            os.kill(os.getpid(), signal.SIGKILL)
        raised = {
            "load, late": _raised(lambda: holdfast.load(path, state, process_group=hasty[0])),
            "manager, late": _raised(lambda: holdfast.CheckpointManager(path, process_group=hasty[1])),
        }
        dist.distributed_c10d._get_default_store().set("rank 0 has waited", "")
        comm, buffer = comm_of(None), memoryview(bytearray(1000))
        calls: dict[str, Callable[[], object]] = {
            "load": lambda: holdfast.load(path, state),
            "manager": lambda: holdfast.CheckpointManager(world.scratch / "other"),
            "load of a manager": lambda: manager.load(state),
            "first save by path": lambda: holdfast.save(path, state, settings=holdfast.Settings(lease_seconds=21.0)),
            "broadcast": lambda: comm.broadcast(b"1" * 1000) + comm.all_gather(b"")[0],
            "all_gather": lambda: comm.all_gather(b"1"),
            "bitwise_or": lambda: comm.bitwise_or(b"1"),
            "exchange": lambda: comm.exchange({}, {1: [buffer]}),
        }
        raised |= {name: _raised(call) for name, call in calls.items()}
        (world.scratch / "raised").write_text("\n".join(f"{name}={text}" for name, text in raised.items()))
        os._exit(0)  # The end of a manager would wait for rank 1.


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except holdfast.CheckpointError as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    except Exception as error:
        return f"foreign: {error!r}"
    return "nothing"
