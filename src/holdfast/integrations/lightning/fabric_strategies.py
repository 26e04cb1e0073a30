"""Fabric's strategy for sharded models: every rank saves its shards, and a load works on any number of ranks."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from holdfast import Settings
from holdfast.errors import InvalidError, MissingError, first_three
from holdfast.integrations.lightning.checkpoint_io import require_no_options
from holdfast.integrations.lightning.saves import Path
from holdfast.integrations.lightning.sharded import ShardedCheckpoints, StrategyRanks, require_sharded

Filter = Callable[[str, Any], bool]

_DEFAULT = Settings()


class HoldfastFabricModelParallelStrategy(ModelParallelStrategy):
    """Fabric's `ModelParallelStrategy` (FSDP2, tensor parallelism) with checkpoints of Holdfast.

    A state may hold several models, and what `holdfast.save` takes besides: `PerRank`, `RngState`, data loaders.
    """

    def __init__(
        self,
        parallelize_fn: Callable[..., Any],
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
            parallelize_fn, data_parallel_size, tensor_parallel_size: As for Lightning's.
            background, skip, settings: As for `HoldfastCheckpointIO`. Fabric tears nothing down: call `wait`.
            options: Further arguments of Lightning's: `process_group_backend`, `timeout`.
        Raises:
            InvalidError: `save_distributed_checkpoint=False`.
        """
        require_sharded(options)
        super().__init__(parallelize_fn, data_parallel_size, tensor_parallel_size, **options)
        self._checkpoints = ShardedCheckpoints(type(self).__name__, background, skip, settings)

    def save_checkpoint(
        self,
        path: Path,
        state: Mapping[str, Any],
        storage_options: Any | None = None,
        filter: Mapping[str, Filter] | None = None,
    ) -> None:
        """Save a checkpoint; every rank calls. `fabric.save` does.

        Args:
            path: A path, or a URL of a store.
            state: What is saved, as for `holdfast.save`.
            storage_options: None.
            filter: By key of the state, what says of each name and value whether it is saved. For models and dicts.
        Raises:
            InvalidError: The state cannot be saved, a filter is not for it, or something else is at the path.
            ConflictError: Another integration saves at the path.
            UnavailableError: Storage or a rank failed.
        """
        require_no_options(storage_options)
        filtered, skip = dict(state), []
        for key, wanted in (filter or {}).items():
            if isinstance(state[key], torch.nn.Module):
                skip += [f"{key}.{glob.escape(name)}" for name in _unwanted(state[key], wanted)]
            elif isinstance(state[key], dict):
                filtered[key] = {name: value for name, value in state[key].items() if wanted(name, value)}
            else:
                raise InvalidError(
                    f"filter[{key!r}]: is for {type(state[key]).__name__}; expected a filter of a model or a dict. To "
                    f"leave all of it out, save a state without {key!r}"
                )
        self._checkpoints.save(self._ranks, path, filtered, {}, skip=tuple(skip))

    def load_checkpoint(
        self,
        path: Path,
        state: Any | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Fill a state; return the values of the checkpoint that are not in it. `fabric.load` calls it on every rank.

        A checkpoint that Lightning wrote itself is left to Lightning.

        Args:
            path: A path, or a URL of a store.
            state: A dict of what is filled. Models and optimizers that it lacks are not read.
            strict: Whether keys of the state, and names in its models, must be those of the checkpoint.
            weights_only: Nothing depends on it: no code in a checkpoint of Holdfast is ever run.
        Raises:
            MissingError: There is no checkpoint, or it lacks a key of the state.
            InvalidError: The state does not fit, or another integration wrote the checkpoint.
            CorruptError: Stored bytes are not what was saved.
        """
        found = self._checkpoints.look_at(self._ranks, path)
        if not found.is_of_holdfast:
            remainder: dict[str, Any] = super().load_checkpoint(found.path, state, strict, weights_only)
            return remainder
        if not isinstance(state, dict) or not state:
            raise InvalidError(
                f"{found.path}: state is {type(state).__name__}; expected a dict with a model: "
                'fabric.load(path, {"model": model}). Without a model to fill: holdfast.read(path)'
            )
        absent = [key for key in state if key not in found.keys]
        if absent and strict:
            raise MissingError(
                f"{found.path}: has no {first_three(map(repr, absent))}; it has {first_three(sorted(found.keys))}. "
                "Leave these keys out of the state, or pass strict=False"
            )
        wanted = {key: value for key, value in state.items() if key in found.keys}
        optimizers = [key for key, value in wanted.items() if isinstance(value, torch.optim.Optimizer)]
        self._checkpoints.fill(found, wanted, strict=strict, whole=optimizers)
        state.update(wanted)
        return self._checkpoints.rest(self._ranks, found, without={*wanted, *found.object_keys})

    def remove_checkpoint(self, filepath: Path) -> None:
        """Remove a checkpoint, as `HoldfastCheckpointIO.remove_checkpoint`. Every rank calls."""
        if self.is_global_zero:
            self._checkpoints.remove(filepath)

    def wait(self) -> None:
        """Wait for saves in the background.

        Raises:
            CheckpointError: One of them failed, and no call has raised its error yet.
        """
        self._checkpoints.wait()

    @property
    def _ranks(self) -> StrategyRanks:
        return StrategyRanks(self.global_rank, self.world_size, self.broadcast, self.barrier)


def _unwanted(model: torch.nn.Module, wanted: Filter) -> Iterator[str]:
    """Yield the names of a model that a filter leaves out."""
    for name, value in get_model_state_dict(model).items():
        if not wanted(name, value):
            yield name
