"""What the measurements of all integrations share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes, wall clock."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def sync_tree(folder: Path) -> None:
    """Make all files and folders below a folder durable, as Holdfast's are when a save is committed."""
    for parent, _, names in os.walk(folder):
        for name in (*names, "."):
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def state_bytes() -> int:
    """Bytes of the state of each rank: 256 MiB, or 16 MiB for a trial (`QUICK=1`)."""
    return (16 if os.environ.get("QUICK") else 256) << 20
