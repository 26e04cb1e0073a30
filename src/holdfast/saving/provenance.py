"""Provenance that a checkpoint records about the job that wrote it: meshes, placements and versions."""

from __future__ import annotations

import platform
from collections import Counter
from importlib import metadata

from holdfast.ports.framework import Collected


def layouts_of(collected: Collected) -> tuple[tuple[tuple[int, ...], tuple[str, ...], int], ...]:
    """Return mesh shapes and placements, each with the number of tensors on this rank that have them."""
    counts = Counter(
        (shard.layout.mesh_shape, tuple(map(str, shard.layout.placements)))
        for shard in (local.shard for local in collected.shards)
        if shard.layout is not None
    )
    return tuple((mesh, placements, count) for (mesh, placements), count in sorted(counts.items()))


def installed_versions() -> dict[str, str]:
    """Return the versions of the software that writes this checkpoint."""
    versions = {"python": platform.python_version()}
    for name in ("holdfast", "torch", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
