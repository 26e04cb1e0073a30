"""Trainer's strategies for sharded models: every rank saves its shards, and a load works on any number of ranks.

Lightning's own never ask a `CheckpointIO`: they hand the shards to DCP. These save the model and the optimizers as they
are, and fill them in place.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from holdfast import Settings
from holdfast.errors import InvalidError, first_three
from holdfast.integrations.lightning.checkpoint_io import require_no_options
from holdfast.integrations.lightning.contents import warn_of_accumulation
from holdfast.integrations.lightning.saves import Path, is_needed_at_once
from holdfast.integrations.lightning.sharded import ShardedCheckpoints, StrategyRanks, require_sharded

_DEFAULT = Settings()


class _SavesShards:
    """What both strategies do in place of Lightning's. Mixed in before the class of Lightning."""

    # Of Lightning's `Strategy`.
    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    lightning_module: Any

    def _save_through(self, background: bool, skip: Iterable[str] | str, settings: Settings) -> None:
        self._checkpoints = ShardedCheckpoints(type(self).__name__, background, skip, settings)
        self._handed_out: dict[str, object] = {}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the entries of the model, not copied: the save takes the model itself."""
        self._handed_out = self._entries()
        return dict(self._handed_out)

    def _entries(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer: the save takes it itself."""
        return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has filled the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has filled the optimizers."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Path, storage_options: Any | None = None) -> None:
        """Save a checkpoint; every rank calls. Arguments and errors as `HoldfastCheckpointIO.save_checkpoint`."""
        require_no_options(storage_options)
        if self.is_global_zero:  # type: ignore[attr-defined]
            warn_of_accumulation(checkpoint, filepath)
        rest = dict(checkpoint)
        removed = self._removed_entries(rest.pop("state_dict", {}))
        optimizers = rest.pop("optimizer_states", [])
        objects = {"state_dict": self.model, **({"optimizer_states": optimizers} if optimizers else {})}
        self._checkpoints.save(_ranks_of(self), filepath, objects, rest, skip=removed, now=is_needed_at_once(filepath))

    def _removed_entries(self, left: Mapping[str, Any]) -> tuple[str, ...]:
        """Return names that a hook has removed from the state dict of the model.

        Raises:
            InvalidError: A hook has put something in their place.
        """
        handed, self._handed_out = self._handed_out, {}
        added = [name for name, value in left.items() if handed.get(name) is not value]
        if added:
            raise InvalidError(
                f"state_dict: a hook (on_save_checkpoint) has put in {first_three(added)}; expected entries of the "
                f"model alone, which {type(self).__name__} saves from the model itself. Put them under another key of "
                "the checkpoint"
            )
        return tuple(f"state_dict.{glob.escape(name)}" for name in handed if name not in left)

    def load_checkpoint(self, checkpoint_path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill model and optimizers, and return the rest of the checkpoint. Every rank calls.

        One that Lightning wrote itself is left to Lightning.

        Args:
            checkpoint_path: A path, or a URL of a store.
            weights_only: Nothing depends on it: no code in a checkpoint of Holdfast is ever run.
        Raises:
            MissingError: There is no checkpoint.
            InvalidError: It does not fit, or another integration wrote it.
            CorruptError: Stored bytes are not what was saved.
        """
        ranks = _ranks_of(self)
        found = self._checkpoints.look_at(ranks, checkpoint_path)
        if not found.is_of_holdfast:
            return super().load_checkpoint(found.path, weights_only=weights_only)  # type: ignore[misc]
        state: dict[str, Any] = {"state_dict": self.model}
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and self.optimizers:
            found.require_optimizers("optimizer_states")
            state["optimizer_states"] = list(self.optimizers)
        self._checkpoints.fill(found, state, strict=self.lightning_module.strict_loading, whole=("optimizer_states",))
        return self._checkpoints.rest(ranks, found, without=("state_dict", "optimizer_states"))

    def remove_checkpoint(self, filepath: Path) -> None:
        """Remove a checkpoint, as `HoldfastCheckpointIO.remove_checkpoint`."""
        if self.is_global_zero:  # type: ignore[attr-defined]
            self._checkpoints.remove(filepath)

    def wait(self) -> None:
        """Wait for saves in the background. Trainer does it at its end.

        Raises:
            CheckpointError: One of them failed, and no call has raised its error yet.
        """
        self._checkpoints.wait()

    def teardown(self) -> None:
        """Wait for saves in the background, and raise what failed, once Lightning has ended its own."""
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self._checkpoints.end()


class HoldfastModelParallelStrategy(_SavesShards, ModelParallelStrategy):
    """Trainer's `ModelParallelStrategy` (FSDP2, tensor parallelism) with checkpoints of Holdfast."""

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        *,
        background: bool = False,
        skip: Iterable[str] | str = (),
        settings: Settings = _DEFAULT,
        **options: Any,
    ) -> None:
        """Prepare as Lightning's.

        Args:
            data_parallel_size, tensor_parallel_size: As for Lightning's.
            background, skip, settings: As for `HoldfastCheckpointIO`.
            options: Further arguments of Lightning's: `process_group_backend`, `timeout`.
        Raises:
            InvalidError: `save_distributed_checkpoint=False`.
        """
        require_sharded(options)
        super().__init__(data_parallel_size, tensor_parallel_size, **options)
        self._save_through(background, skip, settings)


class HoldfastFSDPStrategy(_SavesShards, FSDPStrategy):
    """Trainer's `FSDPStrategy` (FSDP1) with checkpoints of Holdfast. Lightning runs it on GPUs alone."""

    def __init__(
        self,
        *arguments: Any,
        background: bool = False,
        skip: Iterable[str] | str = (),
        settings: Settings = _DEFAULT,
        **options: Any,
    ) -> None:
        """Prepare as Lightning's.

        Args:
            arguments, options: As for Lightning's. `state_dict_type` has no effect on a checkpoint of Holdfast.
            background, skip, settings: As for `HoldfastCheckpointIO`.
        """
        super().__init__(*arguments, **options)
        self._save_through(background, skip, settings)

    def _entries(self) -> dict[str, Any]:
        """Return nothing: FSDP1 would gather every parameter for them."""
        return {}


def _ranks_of(strategy: Any) -> StrategyRanks:
    return StrategyRanks(strategy.global_rank, strategy.world_size, strategy.broadcast, strategy.barrier)
