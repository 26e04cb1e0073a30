"""What two real processes do under the recorded shape of Trainer, for `test_transformers.py`."""

from __future__ import annotations

import importlib.metadata

import torch

from holdfast.integrations.transformers import HoldfastMixin
from tests.support.gloo_worlds import World
from tests.unit.integrations.recorded_trainer import RecordedArguments, RecordedTrainer


class MyTrainer(HoldfastMixin, RecordedTrainer):
    """The change that a user makes."""


def other_metrics(world: World, folder: str) -> str | None:
    """Train while each rank computes a metric of its own; return the best checkpoint that this rank knows."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda distribution_name: "5.23.0"  # This environment has no Transformers.
    try:
        torch.manual_seed(1)
        losses = {2: 0.5, 4: 0.1} if world.rank == 0 else {2: 0.1, 4: 0.5}
        arguments = RecordedArguments(folder, load_best_model_at_end=True)
        trainer = MyTrainer(torch.nn.Linear(4, 2), arguments, losses=losses)
        trainer.train()
    finally:
        importlib.metadata.version = version
    return trainer.state.best_model_checkpoint
