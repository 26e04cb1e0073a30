"""Holdfast saves the sharded state of a training run and loads it on any parallel layout.

The public names are defined here. Each is imported on first use, so that `import holdfast` loads no framework.
Modules below this package are private, except `holdfast.api`, `policies`, `observers` and `errors`.
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
        save,
    )
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

_HOMES = (
    "holdfast.errors",
    "holdfast.settings",
    "holdfast.types.per_rank",
    "holdfast.geometry.sharded",
    "holdfast.api",
)
"""Modules with the public names. The light ones come first: an error or a setting must not load the others."""


def __getattr__(name: str) -> object:
    """Return a public name; the first access imports its module."""
    for module in map(importlib.import_module, _HOMES if name in __all__ else ()):
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *__all__})
