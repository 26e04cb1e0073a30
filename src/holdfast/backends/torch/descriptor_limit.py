"""Whether the process that hosts the key-value store may open a connection for every rank."""

from __future__ import annotations

import logging
import resource

from holdfast.backends.torch.connection_pool import CONNECTIONS

logger = logging.getLogger(__name__)

CONNECTIONS_PER_RANK = 1 + CONNECTIONS
"""Connections of a rank to the host: torch's own, and those that this package keeps."""

_OTHER_DESCRIPTORS = 256
"""Descriptors that the process needs for all else: files of a save, libraries, devices, connections to other ranks."""

_warned: set[tuple[int, int]] = set()


def warn_of_descriptor_limit(world_size: int) -> None:
    """Log once if the limit of open files cannot carry a world: the key-value store then refuses connections.

    Call it on rank 0, which hosts the store. Where an agent of torchrun hosts it, rank 0 has inherited its limit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shortage = descriptor_shortage(world_size, limit)
    if shortage is not None and (world_size, limit) not in _warned:
        _warned.add((world_size, limit))
        logger.warning("%s", shortage)


def descriptor_shortage(world_size: int, limit: int) -> str | None:
    """Return what a limit of open files lacks for a world, as a text; None if it suffices."""
    needed = world_size * CONNECTIONS_PER_RANK + _OTHER_DESCRIPTORS
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return None
    return (
        f"rank 0: RLIMIT_NOFILE is {limit:,}; expected at least {needed:,} for {world_size:,} ranks, of which each "
        f"has up to {CONNECTIONS_PER_RANK} connections to the key-value store of this job. Above the limit saves fail. "
        f"Raise it where the job starts: `ulimit -n {needed}`, `LimitNOFILE=`, or `--ulimit nofile=` of a container"
    )
