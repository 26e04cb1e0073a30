"""torchtitan as it is: the recorded shapes agree with it, and real trainings go on from every place."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

import holdfast
from holdfast.errors import InvalidError
from tests.integrations.torchtitan.cases import trained
from tests.unit.integrations import torchtitan_shapes as recorded


def fields_of(config: Any) -> dict[str, tuple[object, object]]:
    return {
        each.name: (
            str(each.type),
            each.default if each.default_factory is dataclasses.MISSING else each.default_factory,
        )
        for each in dataclasses.fields(config)
    }


def test_the_base_class_is_as_recorded() -> None:
    from torchtitan.components.checkpointer import BaseCheckpointManager

    assert fields_of(BaseCheckpointManager.Config) == fields_of(recorded.BaseCheckpointManager.Config)
    assert BaseCheckpointManager.__abstractmethods__ == recorded.BaseCheckpointManager.__abstractmethods__
    for name in ("load", "save", "maybe_wait_for_staging", "maybe_wait_for_saving", "close", "_load", "_save"):
        real, shape = getattr(BaseCheckpointManager, name), getattr(recorded.BaseCheckpointManager, name)
        assert str(inspect.signature(real)) == str(inspect.signature(shape)), name


def test_a_manager_is_made_as_recorded() -> None:
    from torchtitan.components.checkpointer import CheckpointManager

    from holdfast.integrations.torchtitan import HoldfastManager

    real, ours = (inspect.signature(each.__init__).parameters for each in (CheckpointManager, HoldfastManager))
    assert [(name, each.kind) for name, each in real.items()] == [(name, each.kind) for name, each in ours.items()]
    # A line of a config that chose between torchtitan's modes chooses between ours.
    modes = [fields_of(each.Config)["async_mode"][0] for each in (CheckpointManager, HoldfastManager)]
    assert modes[0] == modes[1]


def test_what_else_is_used_is_as_recorded() -> None:
    import importlib

    for name, content in recorded.MODULES.items():
        module = importlib.import_module(name)
        for own, shape in content.items():
            real = getattr(module, own)
            if isinstance(shape, str):
                assert real == shape
            elif not isinstance(shape, type):
                assert len(inspect.signature(real).parameters) >= len(inspect.signature(shape).parameters), own


def test_torch_checkpointing_does_not_save_yet() -> None:
    """Of 0.1.1 it lacks a module, and torchtitan's methods are empty. Once it does, the bench compares with it, too."""
    with pytest.raises((ModuleNotFoundError, NotImplementedError)):
        from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager

        object.__new__(TorchCheckpointingManager)._save(1)


def test_the_command_line_changes_fields() -> None:
    import tyro
    from torchtitan.trainer import Trainer

    from holdfast.integrations.torchtitan import HoldfastManager

    config = Trainer.Config(checkpoint=HoldfastManager.Config(interval=5))
    arguments = ["--checkpoint.interval", "7", "--checkpoint.async_mode", "disabled"]
    arguments += ["--checkpoint.settings.failed-saves-max", "3"]
    parsed = tyro.cli(Trainer.Config, args=arguments, default=config)
    assert type(parsed.checkpoint) is HoldfastManager.Config
    assert (parsed.checkpoint.interval, parsed.checkpoint.async_mode) == (7, "disabled")
    assert parsed.checkpoint.settings == holdfast.Settings(failed_saves_max=3)
    assert parsed.checkpoint.to_dict()["settings"]["failed_saves_max"] == 3


def test_the_data_loader_finds_its_position_among_those_of_all_ranks() -> None:
    import torch
    from torchtitan.components.dataloader import ParallelAwareDataloader

    from holdfast.integrations.torchtitan.positions import position_of

    class Numbers(torch.utils.data.IterableDataset[int]):
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            while True:
                self.at += 1
                yield self.at

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def loader(rank: int, ranks: int = 2) -> Any:
        return ParallelAwareDataloader(Numbers(), dp_rank=rank, dp_world_size=ranks, batch_size=2)

    loaders = [loader(0), loader(1)]
    for count, each in enumerate(loaders, 1):
        batches = iter(each)
        for _ in range(count):
            next(batches)
    saved = [each.state_dict() for each in loaders]
    # Four ranks now, of which two read the same part.
    again = loader(1)
    resize: Any = position_of(again).resize
    again.load_state_dict(resize(saved, 3, 4))
    assert next(iter(again)).tolist() == [5, 6]
    with pytest.raises(InvalidError, match="split for 2 data-parallel ranks, and are for 3 now"):
        position_of(loader(0, 3)).resize(saved, 0, 3)


def test_a_training_goes_on_from_torchtitans_own_folder(tmp_path: Path) -> None:
    """Step 4 is equal: of torchtitan's manager, and of ours that began with step 3 of torchtitan's."""
    own = trained(tmp_path / "own", 4, "CheckpointManager", interval=3)
    path = str(tmp_path / "own" / "checkpoint" / "step-3")
    ours = trained(
        tmp_path / "ours",
        4,
        "HoldfastManager",
        interval=100,
        initial_load_path=path,
        initial_load_model_only=False,
    )
    assert ours.resumed_from == 3
    assert ours.digests == own.digests
    assert ours.losses == own.losses[3:]


def test_lazy_saves_hold_the_same(tmp_path: Path) -> None:
    """A save that copies while forward and backward run holds what the state was at its call."""
    lazy = {"interval": 2, "async_mode": "async_with_pinned_mem"}
    whole = trained(tmp_path / "run", 6, "HoldfastManager", is_gathered=True, **lazy)
    assert whole.staging == "lazy"
    again = trained(tmp_path / "run", 6, "HoldfastManager", load_step=2, **lazy)
    assert again.resumed_from == 2
    assert again.digests == whole.digests
    assert again.losses == whole.losses[2:]


def test_the_last_step_as_a_hugging_face_folder_gives_the_same_weights(tmp_path: Path) -> None:
    last = {"last_save_model_only": True, "last_save_in_hf": True}
    first = trained(tmp_path / "run", 2, "HoldfastManager", interval=100, **last)
    exported = tmp_path / "run" / "checkpoint" / "step-2"
    assert "model.model.layers.0.self_attn.q_proj.weight" in holdfast.open_checkpoint(exported).tensors
    begun = trained(
        tmp_path / "begun", 0, "HoldfastManager", ranks=1, initial_load_path=str(exported), initial_load_in_hf=True
    )
    weights = {name: digest for name, digest in first.digests.items() if name.startswith("model.")}
    assert begun.digests == weights
