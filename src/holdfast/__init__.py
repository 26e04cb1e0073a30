"""Holdfast saves the sharded state of a training run and loads it on any parallel layout.

The public names are defined here. Each is imported on first use, so that `import holdfast` loads no framework.
Modules below this package are private, except `holdfast.api`, `pieces`, `policies`, `observers`, `errors`
and `integrations`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.api import (
        CheckpointManager,
        SaveHandle,
        async_save,
        diff,
        export,
        import_checkpoint,
        load,
        open_checkpoint,
        read,
        save,
    )
    from holdfast.base.geometry.sharded import Sharded
    from holdfast.base.ports.readable import StoreEntry, StoreTraits
    from holdfast.base.ports.store import Store
    from holdfast.base.types.per_rank import PerRank, RngState
    from holdfast.errors import (
        CheckpointError,
        ConflictError,
        CorruptError,
        InvalidError,
        MissingError,
        Preempted,
        UnavailableError,
    )
    from holdfast.settings import ObjectSettings, Preemption, Settings

__version__ = "0.1.0"

__all__ = [
    "save",
    "async_save",
    "load",
    "open_checkpoint",
    "read",
    "import_checkpoint",
    "diff",
    "export",
    "CheckpointManager",
    "SaveHandle",
    "PerRank",
    "RngState",
    "Sharded",
    "Store",
    "StoreEntry",
    "StoreTraits",
    "Preemption",
    "Preempted",
    "Settings",
    "ObjectSettings",
    "CheckpointError",
    "InvalidError",
    "UnavailableError",
    "CorruptError",
    "ConflictError",
    "MissingError",
    "__version__",
]

_HOMES = {
    "holdfast.errors": {
        "Preempted",
        "CheckpointError",
        "InvalidError",
        "UnavailableError",
        "CorruptError",
        "ConflictError",
        "MissingError",
    },
    "holdfast.settings": {"ObjectSettings", "Preemption", "Settings"},
    "holdfast.base.types.per_rank": {"PerRank", "RngState"},
    "holdfast.base.geometry.sharded": {"Sharded"},
    "holdfast.base.ports.readable": {"StoreEntry", "StoreTraits"},
    "holdfast.base.ports.store": {"Store"},
    "holdfast._face.checkpoint_manager": {"CheckpointManager"},
}
"""Public names by module. All other public names are in `holdfast.api`."""


_MODULES = {"api", "errors", "observers", "pieces", "policies"}
"""Public modules."""


def __getattr__(name: str) -> object:
    """Return a public name or module; the first access imports its module."""
    if name in _MODULES:
        return importlib.import_module(f"holdfast.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "holdfast.api")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *__all__})
