"""What ranks do in the tests of other systems' files: build a sharded model anew, load, state every digest."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from holdfast._face import foreign_paths
from holdfast.errors import CheckpointError
from tests.support.gloo_worlds import World
from tests.support.small_networks import adamw, digests, sharded, train


def load_weights(world: World, path: str, mesh: list[int] | None = None) -> dict[str, object]:
    grid = None if mesh is None else init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("replicate", "shard"))
    net = sharded(2 + world.rank, grid)
    formats = foreign_paths.formats
    if world.rank:
        foreign_paths.formats = lambda: ()  # Rank 0 lists; the others are given what it found and know no format.
    try:
        report = holdfast.load(path, {"model": net})
    finally:
        foreign_paths.formats = formats
    assert report.missing == report.unexpected == ()
    found = digests(net)
    # What was loaded trains on: the reshard left no tensor that only looks right.
    train(net, adamw(net), 1, seed=5)
    return {"digests": found, "trained": digests(net)}


def load_and_say(world: World, path: str) -> list[str]:
    """Return how a load ended on this rank, and whether the model is as it was."""
    torch.manual_seed(0)
    net = sharded(2)
    before = digests(net)
    try:
        holdfast.load(path, {"model": net})
    except CheckpointError as error:
        return [type(error).__name__, str(error), str(digests(net) == before)]
    return ["loaded", "", ""]
