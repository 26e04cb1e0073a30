"""The state of an `Accelerator`: everything that its `save_state` keeps, under the names that a checkpoint gives it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import accelerate

from holdfast import PerRank, RngState
from holdfast.api import Checkpoint
from holdfast.errors import InvalidError, first_three
from holdfast.integrations.accelerate.data import position_of
from holdfast.integrations.accelerate.tested import HOST
from holdfast.integrations.host import MARK

logger = logging.getLogger(__name__)

RECORD = "accelerate"
"""Key of what a checkpoint says of itself: the values of an `Accelerator`, and the names of each kind that it holds."""

MODEL, OPTIMIZER, SCHEDULER, SCALER, CUSTOM, LOADER = (
    "model",
    "optimizer",
    "scheduler",
    "scaler",
    "custom",
    "dataloader",
)
RNG = "rng"


def numbered(kind: str, number: int) -> str:
    """Return the name of one of several: `model`, `model_1`, `model_2`, as Accelerate numbers its files."""
    return kind if number == 0 else f"{kind}_{number}"


def kept_by(accelerator: accelerate.Accelerator, per_rank: Mapping[int, PerRank]) -> dict[str, dict[str, object]]:
    """Return everything that an `Accelerator` keeps, by kind and name.

    Args:
        accelerator: The `Accelerator`.
        per_rank: Registered objects that differ by process, by identity.
    """
    loaders = [position_of(numbered(LOADER, n), each) for n, each in enumerate(accelerator._dataloaders)]
    custom = [per_rank.get(id(each), each) for each in accelerator._custom_objects]
    lists: dict[str, Sequence[object]] = {
        MODEL: accelerator._models,
        OPTIMIZER: accelerator._optimizers,
        SCHEDULER: accelerator._schedulers,
        SCALER: [] if accelerator.scaler is None else [accelerator.scaler],
        LOADER: loaders,
        CUSTOM: custom,
    }
    return {kind: {numbered(kind, n): each for n, each in enumerate(objects)} for kind, objects in lists.items()}


def state_to_save(
    accelerator: accelerate.Accelerator, kept: Mapping[str, Mapping[str, object]], by_hooks: Iterable[str]
) -> dict[str, object]:
    """Return the state of a save.

    Args:
        accelerator: The `Accelerator`.
        kept: What it keeps.
        by_hooks: Names of the models that a hook has saved.
    """
    state: dict[str, object] = {name: each for objects in kept.values() for name, each in objects.items()}
    record = {
        "step": accelerator.step,
        "processes": accelerator.num_processes,
        "kept": {kind: list(objects) for kind, objects in kept.items()},
        "by_hooks": sorted(by_hooks),
    }
    return {**state, RECORD: record, MARK: HOST.mark(), RNG: RngState()}


class SavedRecord:
    """What a checkpoint says of itself."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read it.

        Raises:
            InvalidError: It is not what this integration writes.
        """
        self.url = checkpoint.url
        record = checkpoint.objects.get(RECORD)
        try:
            assert isinstance(record, dict)
            self.step, self.processes = int(record["step"]), int(record["processes"])
            self.by_hooks = frozenset(map(str, record["by_hooks"]))
            self._kept = {str(kind): [*map(str, names)] for kind, names in record["kept"].items()}
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidError(
                f"{self.url}: its record {RECORD!r} is not one of holdfast.integrations.accelerate; expected step, "
                "processes, kept and by_hooks. Read the model alone with holdfast.load(path, {'model': model})"
            ) from error

    def names_of(self, kind: str) -> list[str]:
        """Return the names of a kind that it holds."""
        return self._kept.get(kind, [])


def state_to_load(
    saved: SavedRecord,
    kept: Mapping[str, Mapping[str, object]],
    is_skipped: Callable[[str], bool],
    left_to_hooks: Iterable[str],
) -> tuple[dict[str, object], list[str]]:
    """Return the state of a load, and the names in it that stay as they are.

    Args:
        saved: What the checkpoint holds.
        kept: What the `Accelerator` keeps.
        is_skipped: Whether the caller leaves out a name.
        left_to_hooks: Names of the models that a hook has loaded.
    Raises:
        InvalidError: The `Accelerator` keeps what the checkpoint lacks, or other registered objects.
    """
    state: dict[str, object] = {}
    left = set(left_to_hooks)
    for kind, objects in kept.items():
        held = saved.names_of(kind)
        lacking = [name for name in objects if name not in held and not is_skipped(name)]
        unread = [name for name in held if name not in objects and not is_skipped(name)]
        if kind == LOADER:
            # Accelerate loads the data loaders that both have, too.
            _warn(saved, "begins anew, since the checkpoint lacks its position", lacking)
            objects = {name: each for name, each in objects.items() if name in held}
        elif lacking or (kind == CUSTOM and unread):
            raise InvalidError(
                f"{saved.url}: holds {len(held)} of the kind {kind!r}, and this Accelerator has {len(objects)}; "
                f"expected the same objects, prepared or registered in the same order. {_way_out(lacking or unread)}"
            )
        _warn(saved, "is in the checkpoint and not loaded, since this Accelerator has none", unread)
        state |= objects
    for name in kept[MODEL]:
        if name in saved.by_hooks and name not in left and not is_skipped(name):
            raise InvalidError(
                f"{saved.url}: a hook of register_save_state_pre_hook saved {name}, so the checkpoint lacks it; "
                "expected a hook of register_load_state_pre_hook that loads it and takes it out of models. "
                f"Register one, or pass load_state(…, skip={name!r})"
            )
    return {**state, RNG: RngState()}, sorted(left & state.keys())


def say_other_processes(saved: SavedRecord, processes: int) -> None:
    """Log what becomes of random states if another number of processes saved. On process 0 only."""
    if processes == saved.processes:
        return
    first, last = sorted((processes, saved.processes))
    which = f"process {first}" if last == first + 1 else f"processes {first} to {last - 1}"
    what = (
        f"the random generators of {which} are seeded anew, from the checkpoint and the number of the process"
        if processes > saved.processes
        else f"the random states of {which} are not used"
    )
    logger.warning("%s: %s saved it, and %s load it: %s", saved.url, _count(saved.processes), processes, what)


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def skips(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return whether patterns leave out a name at the top of the state."""
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def _way_out(names: Sequence[str]) -> str:
    return f"Prepare or register as the run did that saved it, or pass load_state(…, skip={list(names)!r})"


def _warn(saved: SavedRecord, what: str, names: Sequence[str]) -> None:
    if names:
        logger.warning("%s: %s %s", saved.url, first_three(names), what)
