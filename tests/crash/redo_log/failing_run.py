"""The recorded training, of which one rank fails while the others go on: in a redo, or in its first base."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.backends.torch.redo.step_redo import TorchStepRedo
from holdfast.base.types.redo import Record
from holdfast.errors import UnavailableError
from holdfast.training.saving import save
from tests.crash.redo_log.recorded_run import train
from tests.support.gloo_worlds import World


def train_after_failed_redo(
    world: World, root: str, rank: int, at: int, failures: int, steps: int, every: int
) -> dict[str, object]:
    """Load and train on; on one rank, the redo of a step fails some times."""
    apply, left = TorchStepRedo.apply, [failures]

    def failing(redo: TorchStepRedo, record: Record) -> Sequence[str]:
        if record.step == at and left[0]:
            left[0] -= 1
            raise MemoryError("no room for a step")
        return apply(redo, record)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == rank:
            patch.setattr(TorchStepRedo, "apply", failing)
        return train(world, root, steps=steps, every=every)


def train_after_failed_base(
    world: World, root: str, rank: int, kill_at: int, steps: int, every: int, pause: float
) -> dict[str, object]:
    """Train from the start and die; on one rank, the write of the first base fails."""
    write, left = save.write, [1]

    def failing(share: save.Share) -> object:
        if left[0]:
            left[0] -= 1
            raise UnavailableError("the disk of this rank is full")
        return write(share)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == rank:
            patch.setattr(save, "write", failing)
        return train(world, root, steps=steps, every=every, kill_at=kill_at, pause=pause)
