"""The training under DDP."""

from __future__ import annotations

from tests.integrations.accelerate.training import train_replicas as train

__all__ = ["train"]
