"""Holdfast saves the sharded state of a training run and loads it on any parallel layout.

The public names are defined here. Each is imported on first use, so that `import holdfast` loads no framework.
Modules below this package are private, except `holdfast.api`, `pieces`, `policies`, `observers`, `errors`
and `integrations`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast import activations as activations
    from holdfast import data as data
    from holdfast import observers as observers
    from holdfast import pieces as pieces
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
    from holdfast.base.layouts.layout import Layout
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
    from holdfast.policies import Tier
    from holdfast.settings import Differential, ObjectSettings, Preemption, Settings

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
    "Layout",
    "Tier",
    "Sharded",
    "Store",
    "StoreEntry",
    "StoreTraits",
    "Differential",
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

_MODULES = {"activations", "api", "data", "errors", "observers", "pieces", "policies"}
"""Public modules."""

_HOMES = (
    "holdfast.errors",
    "holdfast.settings",
    "holdfast.policies",
    "holdfast.base.types.per_rank",
    "holdfast.base.geometry.sharded",
    "holdfast.base.layouts.layout",
    "holdfast.base.ports.readable",
    "holdfast.base.ports.store",
    "holdfast.api",
)
"""Modules of the public names. A name is searched in this order, so that an error or a setting loads little."""

if not TYPE_CHECKING:  # A type checker that saw this function would accept any name.

    def __getattr__(name: str) -> object:
        """Return a public name or module; the first access imports its module."""
        if name in _MODULES:
            return importlib.import_module(f"holdfast.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        homes = map(importlib.import_module, _HOMES)
        value = next(getattr(home, name) for home in homes if hasattr(home, name))
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *__all__})
