"""Write golden checkpoints anew: `python -m tests.format.make_golden`. Once released they never change.

With the argument `coded` it writes those of format 1.4 alone, with `types` that of format 1.5.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from tests.format import coded_state, state
from tests.format.description import (
    CHECKPOINTS,
    CODED_CHECKPOINTS,
    CODED_FOLDER,
    EXPECTED,
    FOLDER,
    TYPES_CHECKPOINTS,
    TYPES_FOLDER,
    description,
)
from tests.support.tuning import tuned

WORLD_SIZE = 2
CODED = tuned(
    holdfast.Settings(compression="on", chunk_bytes=4096),
    coded_bytes_min=4096,
    unchanged_bytes_min=1,
)
TUNING = CODED._tuning


def make() -> None:
    make_coded()
    make_types()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    with holdfast.CheckpointManager(FOLDER / "run") as manager:
        for step in (5, 7):
            manager.save(step, state.training(step)).wait()
    holdfast.save(FOLDER / "single", state.single(3))
    run_ranks()
    make_unhealthy()
    make_reusing()
    make_rewound()
    finish(FOLDER, CHECKPOINTS)


def finish(folder: Path, names: Sequence[str]) -> None:
    for reports in list(folder.rglob("reports")):
        shutil.rmtree(reports)  # What they say is of the machine that made them.
    for link in folder.rglob("*.link"):
        link.unlink()  # In a checkout it would be a copy.
    expected = {name: description(folder / name) for name in names}
    (folder / EXPECTED.name).write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {total} bytes")


def make_coded() -> None:
    """Save with compression: format 1.4."""
    shutil.rmtree(CODED_FOLDER, ignore_errors=True)
    CODED_FOLDER.mkdir()
    holdfast.save(CODED_FOLDER / "every-codec", coded_state.training(3), settings=CODED)
    with holdfast.CheckpointManager(CODED_FOLDER / "reusing", settings=CODED) as manager:
        for step in (2, 4):
            manager.save(step, coded_state.going_on(step)).wait()
    run_ranks("coded")
    finish(CODED_FOLDER, CODED_CHECKPOINTS)


def make_types() -> None:
    """Save the element types that format 1.5 added."""
    shutil.rmtree(TYPES_FOLDER, ignore_errors=True)
    TYPES_FOLDER.mkdir()
    holdfast.save(TYPES_FOLDER / TYPES_CHECKPOINTS[0], state.newer_types(3))
    finish(TYPES_FOLDER, TYPES_CHECKPOINTS)


def save_coded_share() -> None:
    """Save as one rank of two: masters and weights that are cut along rows, and others that every rank holds."""
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("dp",))
    whole = coded_state.training(9)
    for group in (whole["model"], whole["master"]):
        assert isinstance(group, dict)
        group["layer"] = distribute_tensor(group["layer"], mesh, [Shard(0)])
    holdfast.save(CODED_FOLDER / "sharded", whole, settings=CODED)
    holdfast.save(CODED_FOLDER / "split", whole, settings=replace(CODED, _tuning=replace(TUNING, index_chunks_max=8)))
    dist.destroy_process_group()


def make_unhealthy() -> None:
    """Save what has non-finite values, where they are counted: format 1.2."""
    settings = holdfast.Settings(count_nonfinite=True, compare_replicas=True)
    holdfast.save(FOLDER / "unhealthy", state.unhealthy(4), settings=settings)


def make_reusing() -> None:
    """Save steps of which each but the first refers to packs of others; the format has that since 1.2."""
    settings = tuned(holdfast.Settings(chunk_bytes=4096), unchanged_bytes_min=1)
    with holdfast.CheckpointManager(FOLDER / "reusing", settings=settings) as manager:
        for step in (2, 4):
            manager.save(step, state.partly_frozen(step)).wait()
    with holdfast.CheckpointManager(FOLDER / "reusing", settings=settings) as manager:
        manager.load(state.partly_frozen(3))
        manager.save(6, state.resumed(6)).wait()


def make_rewound() -> None:
    """Go back to a step, and save a number again that a superseded step has; the format has that since 1.3."""
    for loaded, step, seed in ((None, 2, 20), (None, 4, 40), (None, 6, 60), (2, 4, 41)):
        with holdfast.CheckpointManager(FOLDER / "rewound") as manager:
            manager.load(state.single(0), loaded)
            manager.save(step, state.single(seed)).wait()


def run_ranks(*arguments: str) -> None:
    """Run this program as the ranks of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD_SIZE)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *arguments], env={**os.environ, **world, "RANK": str(rank)}
        )
        for rank in range(WORLD_SIZE)
    ]
    assert [rank.wait(120) for rank in ranks] == [0] * WORLD_SIZE


def save_share() -> None:
    """Save as one rank of two, under FSDP2."""
    dist.init_process_group("gloo")
    whole = state.plain_sharded_state(9)
    model = state.Uneven()
    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("dp",))
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    plain_model, plain_optimizer = whole["model"], whole["optimizer"]
    assert isinstance(plain_model, torch.nn.Module)
    assert isinstance(plain_optimizer, torch.optim.Optimizer)
    with torch.no_grad():
        for (name, parameter), plain in zip(model.named_parameters(), plain_model.parameters(), strict=True):
            copy_share(parameter, plain, name)
            for key, value in plain_optimizer.state[plain].items():
                found = optimizer.state[parameter][key]
                copy_share(found, value, f"{name} {key}")
    shares = {"model": model, "optimizer": optimizer, "seen": whole["seen"]}
    holdfast.save(FOLDER / "sharded", shares)
    holdfast.save(FOLDER / "split", shares, settings=tuned(holdfast.Settings(), index_chunks_max=8))
    dist.destroy_process_group()


def copy_share(share: torch.Tensor, plain: torch.Tensor, name: str) -> None:
    if not isinstance(share, dist.tensor.DTensor):
        share.copy_(plain)
        return
    assert share.shape == plain.shape, name
    chunks = list(torch.chunk(plain.detach(), WORLD_SIZE, dim=0))
    share.to_local().copy_(chunks[dist.get_rank()])


if __name__ == "__main__":
    is_rank, is_coded = "RANK" in os.environ, "coded" in sys.argv[1:]
    if is_coded:
        save_coded_share() if is_rank else make_coded()
    elif "types" in sys.argv[1:]:
        make_types()
    else:
        save_share() if is_rank else make()
