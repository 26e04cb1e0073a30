"""Fits training into a memory budget: keeps, packs or recomputes each tensor that autograd needs.

`profile/` holds the measured values of a model, `solve/` chooses a treatment for every unit, and `runtime/` runs the
choice. Saves and loads of checkpoints know nothing of this room. Read `fit.py` first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.activations.fit import fit
    from holdfast.activations.plan import ActivationPlan, ManagedActivations, load_plan
    from holdfast.activations.solve.explain import PlanSummary

__all__ = ["ActivationPlan", "ManagedActivations", "PlanSummary", "fit", "load_plan"]

_HOMES = {"PlanSummary": "holdfast.activations.solve.explain", "fit": "holdfast.activations.fit"}

if not TYPE_CHECKING:  # A type checker that saw this function would accept any name.

    def __getattr__(name: str) -> object:
        """Return a public name; the first access imports the module of the name. Plans load without torch."""
        if name not in __all__:
            raise AttributeError(f"module 'holdfast.activations' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES.get(name, "holdfast.activations.plan")), name)
        globals()[name] = value
        return value
