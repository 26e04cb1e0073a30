"""Policies for `CheckpointManager(root, save=…, keep=…)`: when to save a step, and which steps to keep."""

from __future__ import annotations

from holdfast.types.policy import (
    AllOf,
    AnyOf,
    AtSteps,
    BestN,
    EveryNSteps,
    EveryNth,
    EverySeconds,
    KeepPolicy,
    LatestN,
    NewestPer,
    OnRequest,
    SavePolicy,
    Tagged,
)

__all__ = [
    "EveryNSteps",
    "EverySeconds",
    "AtSteps",
    "OnRequest",
    "LatestN",
    "EveryNth",
    "BestN",
    "NewestPer",
    "Tagged",
    "AnyOf",
    "AllOf",
    "SavePolicy",
    "KeepPolicy",
]
