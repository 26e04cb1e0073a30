"""What ranks do with a near tier: train under FSDP2 and die while they drain, drain with more ranks, load as others."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.errors import InvalidError
from holdfast.settings import Settings
from holdfast.stored.copying.copied_files import CopiedFile
from holdfast.stored.copying.step_drain import StepDrain
from tests.support.forked_processes import write_whole
from tests.support.gloo_worlds import World
from tests.support.small_networks import adamw, digest, digests, plain, sharded, train

SETTINGS = Settings(lease_seconds=3.0, compression="on")
FROZEN_COUNT = 600_000


def manager_at(folder: Path, near: str = "near") -> holdfast.CheckpointManager:
    tier = holdfast.Tier(folder / near, every=1, keep_last=20)
    return holdfast.CheckpointManager(folder / "root", every=2, near=tier, preemption=False, settings=SETTINGS)


def frozen() -> torch.Tensor:
    values = torch.randn(FROZEN_COUNT, generator=torch.Generator().manual_seed(3)) * 0.02
    return values.bfloat16().float()  # The lower halves are zeros, so that it is coded.


class Training:
    """A model with a frozen backbone, on all ranks: under FSDP2, or under tensor parallelism."""

    def __init__(self, seed: int, *, is_tensor_parallel: bool = False) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if is_tensor_parallel:
            self.net = plain(seed)
            plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
            parallelize_module(self.net, mesh, plan)
        else:
            self.net = sharded(seed)
        self.optimizer = adamw(self.net)
        self.frozen = distribute_tensor(frozen() if seed == 1 else torch.zeros(FROZEN_COUNT), mesh, [Shard(0)])

    def state(self) -> dict[str, object]:
        return {"model": self.net, "optimizer": self.optimizer, "frozen": self.frozen}

    def digests(self) -> dict[str, str]:
        return {**digests(self.net, self.optimizer), "frozen": digest(self.frozen)}


def pack_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in packs_of(root))


def packs_of(root: Path) -> list[Path]:
    """Return the packs of a run, each once: other names are links to it."""
    packs = [
        *root.glob("step-*/*/*.safetensors"),
        *root.glob("step-*/*/*/*.safetensors"),
        *root.glob("step-*/*/*.link"),
    ]
    return [*{path.stat().st_ino: path for path in packs}.values()]


def killed(world: World, folder: str) -> None:
    """Drain steps 2 and 4; die at the first file that a drain of step 6 copies."""
    place, training, seen = Path(folder), Training(1), {}
    copy = StepDrain.copy

    def copy_or_die(drain: StepDrain, files: Iterator[CopiedFile]) -> object:
        chosen = list(files)
        if any(file.key.startswith("step-000000000006/") for file in drain.files):
            copy(drain, chosen[:1])
            os.kill(os.getpid(), signal.SIGKILL)
        return copy(drain, chosen)

    StepDrain.copy = copy_or_die  # type: ignore[assignment, method-assign]
    manager, root_bytes = manager_at(place), {}
    manager.load(training.state())
    for step in range(1, 7):
        train(training.net, training.optimizer, 1, seed=step)
        seen[step] = training.digests()
        if step == 6 and world.rank == 0:
            write_whole(place / "seen.json", json.dumps({"digests": seen, "root_bytes": root_bytes}))
        handle = manager.maybe_save(step, training.state())
        assert handle is not None
        if step == 6:
            time.sleep(60)
        handle.wait()
        dist.barrier()
        root_bytes[step] = pack_bytes(place / "root")


@contextmanager
def _copied() -> Iterator[list[str]]:
    """Note the files that this rank copies."""
    keys: list[str] = []
    copy = StepDrain.copy

    def note(drain: StepDrain, files: Sequence[CopiedFile]) -> object:
        chosen = list(files)
        keys.extend(file.key for file in chosen)
        return copy(drain, chosen)

    StepDrain.copy = note  # type: ignore[assignment, method-assign]
    try:
        yield keys
    finally:
        StepDrain.copy = copy  # type: ignore[method-assign]


def drained(world: World, folder: str) -> dict[str, object]:
    """Refuse a folder that a rank does not see; resume, and drain what the job before left."""
    place, training = Path(folder), Training(2)
    try:
        manager_at(place, "near" if world.rank != 1 else "elsewhere")
        refused = ""
    except InvalidError as error:
        refused = str(error)
    with _copied() as keys:
        manager = manager_at(place)
        resumed, found = manager.load(training.state()), training.digests()
        handle = manager.maybe_save(7, training.state())
        assert handle is not None
        due = manager.save(8, training.state())
        due.wait("committed", 40)
        manager.close()
    return {"refused": refused, "resumed": resumed, "digests": found, "keys": keys}


def loaded(world: World, folder: str) -> list[object]:
    """Load under tensor parallelism: the newest step, and older ones from the root alone."""
    place, found = Path(folder), []
    for step in (None, 6, 4):
        training = Training(3, is_tensor_parallel=True)
        if step is None:
            with manager_at(place) as manager:
                found.append([manager.load(training.state()), training.digests()])
        else:
            holdfast.load(place / "root", training.state(), step=step)
            found.append([step, training.digests()])
    return found


def loaded_alone(folder: Path, step: int) -> dict[str, str]:
    """Return the digests of a step that one process loads from the root."""
    net = plain(4)
    optimizer, state = adamw(net), {"frozen": torch.zeros(FROZEN_COUNT)}
    holdfast.load(folder / "root", {"model": net, "optimizer": optimizer, **state}, step=step)
    return {**digests(net, optimizer), "frozen": digest(state["frozen"])}
