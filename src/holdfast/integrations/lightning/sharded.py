"""A checkpoint of a sharded model: every rank saves objects as they are, and rank 0 the values beside them."""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import holdfast
from holdfast import Settings
from holdfast.errors import InvalidError, first_three
from holdfast.integrations.host import from_first
from holdfast.integrations.lightning.contents import (
    lightning_dict,
    require_free_keys,
    require_readable,
    values_state,
)
from holdfast.integrations.lightning.folders import (
    CheckpointPath,
    destination,
    is_of_lightning,
    local_path,
    remove,
    restore,
)
from holdfast.integrations.lightning.saves import Path, SavesOfProcess

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class StrategyRanks:
    """The ranks of a strategy, as it lets them talk."""

    rank: int
    size: int
    broadcast: Callable[[Any], Any]
    barrier: Callable[[], None]

    def from_first(self, call: Callable[[], _Result]) -> _Result:
        """Return on every rank what a call returns on rank 0, or raise its error there. Every rank calls."""
        return from_first(call, is_first=self.rank == 0, broadcast=self.broadcast)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """What rank 0 has found at a path."""

    path: str
    is_of_holdfast: bool
    keys: frozenset[str] = frozenset()
    """Its keys at the top."""

    object_keys: frozenset[str] = frozenset()
    """Those at or below which a model or an optimizer is."""

    def require_optimizers(self, key: str) -> None:
        """Refuse a checkpoint from which optimizers cannot be filled.

        Raises:
            InvalidError: It has none.
        """
        if key not in self.keys:
            raise InvalidError(
                f"{self.path}: has no {key!r}; expected a checkpoint of the whole training. It was saved with "
                "save_weights_only=True, perhaps; to begin a new training from its weights, load the model alone: "
                f'holdfast.load(path, {{"state_dict": model}})'
            )


class ShardedCheckpoints:
    """Saves and loads the checkpoints of one strategy."""

    def __init__(self, who: str, background: bool, skip: Iterable[str] | str, settings: Settings) -> None:
        """Save nothing yet. Arguments as `HoldfastCheckpointIO`, and `who` saves."""
        self._who, self._background, self._settings = who, bool(background), settings
        self._skip = (skip,) if isinstance(skip, str) else tuple(skip)
        self._made: SavesOfProcess | None = None

    def save(
        self,
        ranks: StrategyRanks,
        path: Path,
        objects: Mapping[str, object],
        values: Mapping[str, object],
        *,
        skip: tuple[str, ...] = (),
        now: bool = False,
    ) -> None:
        """Save a checkpoint. Every rank calls.

        Args:
            ranks: The ranks.
            path: Where; that of rank 0 counts.
            objects: What every rank saves its part of.
            values: What rank 0 saves: Lightning keeps those of rank 0, too.
            skip: Patterns of names that are left out of this save.
            now: Whether it is committed when this returns, also in the background.
        Raises:
            CheckpointError: The save failed, or was refused.
        """
        saves = self._saves(ranks)
        saves.await_ends(path)
        state = dict(objects)

        def prepare() -> CheckpointPath:
            # A refusal here is one on every rank: no other has begun to save.
            require_free_keys(objects)
            state.update(values_state(values, self._skip))
            return destination(path, in_background=self._background)

        target = ranks.from_first(prepare)
        if self._background and not target.is_linked and not now:
            saves.begin(target, state, skip, publishes=ranks.rank == 0)
            return
        saves.save(target, state, skip)
        if not target.is_replaced:
            ranks.barrier()  # Every rank has stored its report there.
            ranks.from_first(target.publish)

    def look_at(self, ranks: StrategyRanks, path: Path) -> FoundCheckpoint:
        """Return what is at a path. Every rank calls.

        Raises:
            MissingError: Nothing is there.
            InvalidError: Another integration wrote it.
        """
        self._saves(ranks).await_ends()

        def found() -> FoundCheckpoint:
            text = local_path(path)
            restore(text)
            return self._found(text)

        return ranks.from_first(found)

    def fill(
        self, found: FoundCheckpoint, state: MutableMapping[str, Any], *, strict: bool, whole: Collection[str]
    ) -> None:
        """Fill objects in place, and replace values. Every rank calls.

        Args:
            found: The checkpoint.
            state: What is filled.
            strict: As for `holdfast.load`.
            whole: Keys of optimizers, which are filled as a whole also where `strict` is False.
        Raises:
            InvalidError: The state does not fit.
        """
        report = holdfast.load(found.path, state, strict=strict, settings=self._settings)
        prefixes = tuple(f"{key}." for key in whole)
        left_out = [name for name in (*report.missing, *report.unexpected) if name.startswith(prefixes)]
        if left_out:
            raise InvalidError(
                f"{found.path}: the state of the optimizers differs: {first_three(left_out)}; expected the same "
                "parameters, also without strict loading. The training is partly filled"
            )

    def rest(self, ranks: StrategyRanks, found: FoundCheckpoint, without: Collection[str]) -> dict[str, Any]:
        """Return what else the checkpoint holds, read by rank 0 for all. Every rank calls."""
        wanted = sorted(found.keys - set(without))
        if not wanted:
            return {}
        only = [glob.escape(key) for key in wanted]
        return ranks.from_first(lambda: lightning_dict(holdfast.read(found.path, only=only, settings=self._settings)))

    def remove(self, path: Path) -> None:
        """Remove a checkpoint. On rank 0."""
        if self._made is None:
            remove(path)
        else:
            self._made.remove(path)

    def wait(self) -> None:
        """Wait for saves in the background; raises what failed."""
        if self._made is not None:
            self._made.wait()

    def end(self) -> None:
        """Wait, as `SavesOfProcess.end`."""
        if self._made is not None:
            self._made.end()

    def _saves(self, ranks: StrategyRanks) -> SavesOfProcess:
        if self._made is None:
            settings = self._settings
            if self._background and ranks.size > 1:
                # A rank stores its report after the commit. Rank 0 moves the checkpoint then, and waits for nobody.
                settings = replace(settings, reports=False)
            self._made = SavesOfProcess(self._who, None, settings, self._skip)
        return self._made

    def _found(self, path: str) -> FoundCheckpoint:
        if is_of_lightning(path):
            return FoundCheckpoint(path, is_of_holdfast=False)
        checkpoint = holdfast.open_checkpoint(path, settings=self._settings)
        require_readable(checkpoint)
        items = checkpoint.manifest.tree.items
        return FoundCheckpoint(
            path,
            is_of_holdfast=True,
            keys=frozenset(items),
            object_keys=frozenset(key for key, value in items.items() if _holds_object(value)),
        )


def require_sharded(options: Mapping[str, object]) -> None:
    """Refuse a checkpoint that one rank gathers and writes.

    Raises:
        InvalidError: `save_distributed_checkpoint=False`.
    """
    if not options.get("save_distributed_checkpoint", True):
        raise InvalidError(
            "save_distributed_checkpoint=False; expected True: a checkpoint of Holdfast loads on any number of "
            'ranks. For one file, export it: holdfast.export(path, "model.ckpt", to="torch")'
        )


def _holds_object(value: object) -> bool:
    """Return whether a saved value is, or holds, a model or an optimizer."""
    items = getattr(value, "items", None)
    if not isinstance(items, Mapping):
        return False
    return getattr(value, "kind", None) in ("module", "optimizer") or any(map(_holds_object, items.values()))
