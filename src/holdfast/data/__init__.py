"""The place of training in one global order of samples: a run goes on with the very next sample.

Public names alone are here; `backends/torch/data` has the code. Each name is imported on first use, so that the import
of this module loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.backends.torch.data.batches import Batches
    from holdfast.backends.torch.data.loader import Loader, Step
    from holdfast.backends.torch.data.mixture import Mixture
    from holdfast.backends.torch.data.sample_keys import rng

__all__ = ["Batches", "Loader", "Mixture", "Step", "rng"]

_HOMES = {"Batches": "batches", "Loader": "loader", "Mixture": "mixture", "Step": "loader", "rng": "sample_keys"}

if not TYPE_CHECKING:  # A type checker that saw this function would accept any name.

    def __getattr__(name: str) -> object:
        """Return a public name; the first access imports the module of the name."""
        if name not in __all__:
            raise AttributeError(f"module 'holdfast.data' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"holdfast.backends.torch.data.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
