"""Holdfast saves the sharded state of a training run and loads it on any parallel layout.

The public names are defined here. Each is imported on first use, so that `import holdfast` loads no framework.
Modules below this package are private, except `holdfast.api`, `policies`, `observers` and `errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.api import CheckpointManager, SaveHandle, async_save, diff, export, load, open_checkpoint, save
    from holdfast.errors import (
        CheckpointError,
        ConflictError,
        CorruptError,
        InvalidError,
        MissingError,
        Preempted,
        UnavailableError,
    )
    from holdfast.geometry.sharded import Sharded
    from holdfast.settings import Preemption, Settings
    from holdfast.types.per_rank import PerRank, RngState

__version__ = "0.1.0"

__all__ = [
    "save",
    "async_save",
    "load",
    "open_checkpoint",
    "import_checkpoint",
    "diff",
    "export",
    "CheckpointManager",
    "SaveHandle",
    "PerRank",
    "RngState",
    "Sharded",
    "Preemption",
    "Preempted",
    "Settings",
    "CheckpointError",
    "InvalidError",
    "UnavailableError",
    "CorruptError",
    "ConflictError",
    "MissingError",
    "__version__",
]

_HOME = {
    "save": "holdfast.api",
    "async_save": "holdfast.api",
    "load": "holdfast.api",
    "open_checkpoint": "holdfast.api",
    "import_checkpoint": "holdfast.api",
    "diff": "holdfast.api",
    "export": "holdfast.api",
    "CheckpointManager": "holdfast.checkpoint_manager",
    "SaveHandle": "holdfast.api",
    "PerRank": "holdfast.types.per_rank",
    "Preemption": "holdfast.settings",
    "Preempted": "holdfast.errors",
    "RngState": "holdfast.types.per_rank",
    "Sharded": "holdfast.geometry.sharded",
    "Settings": "holdfast.settings",
    "CheckpointError": "holdfast.errors",
    "InvalidError": "holdfast.errors",
    "UnavailableError": "holdfast.errors",
    "CorruptError": "holdfast.errors",
    "ConflictError": "holdfast.errors",
    "MissingError": "holdfast.errors",
}
"""Module of each public name."""


def __getattr__(name: str) -> object:
    """Return a public name; the first access imports its module."""
    if name not in _HOME:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *__all__})
