"""What a checkpoint tells about the job that wrote it: meshes and placements, and versions."""

from __future__ import annotations

import platform
from collections import Counter
from importlib import metadata

from holdfast.ports.framework import Collected


def layouts_of(collected: Collected) -> tuple[tuple[tuple[int, ...], tuple[str, ...], int], ...]:
    """Return mesh shapes and placements, each with the number of tensors that lie so on this rank."""
    counted = Counter(
        (shard.layout.mesh_shape, tuple(map(str, shard.layout.placements)))
        for shard in (each.shard for each in collected.shards)
        if shard.layout is not None
    )
    return tuple((mesh, placements, count) for (mesh, placements), count in sorted(counted.items()))


def installed_versions() -> dict[str, str]:
    """Return the versions that write this checkpoint."""
    found = {"python": platform.python_version()}
    for name in ("holdfast", "torch", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
