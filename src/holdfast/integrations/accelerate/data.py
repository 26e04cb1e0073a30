"""The position of a data loader: what Accelerate saves of it, and what the order of its samples depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler

from holdfast import PerRank
from holdfast.data import Batches
from holdfast.errors import InvalidError

EPOCH, SAMPLER, GENERATOR, POSITION = "epoch", "sampler", "generator", "position"


def position_of(name: str, loader: object) -> PerRank | Batches:
    """Return the position of a prepared data loader, as an entry of a state.

    Each process has its own, but for a loader over `holdfast.data.Batches`: one position fits any number of processes.

    Args:
        name: Its name in the state, for messages.
        loader: The data loader.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, Batches):
        return sampler
    return PerRank(LoaderPosition(loader), resize=partial(_on_other_processes, name, loader))


class LoaderPosition:
    """Saves and loads the position of one data loader.

    Accelerate keeps the state of a stateful data loader only. The epoch, the seed of its seedable sampler and the
    generator that its processes share decide the order of the samples too: without them a resumed run has another.
    """

    def __init__(self, loader: object) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, object]:
        """Return the position."""
        loader = self._loader
        state: dict[str, object] = {EPOCH: getattr(loader, "iteration", 0)}
        sampler = _seedable_sampler(loader)
        if sampler is not None:
            state[SAMPLER] = {"epoch": sampler.epoch, "initial_seed": sampler.initial_seed}
        generator = getattr(loader, "synchronized_generator", None)
        if generator is not None and sampler is None:
            state[GENERATOR] = generator.get_state()
        if getattr(loader, "use_stateful_dataloader", False):
            state[POSITION] = loader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a position. What the data loader has no place for is left out: it was built otherwise."""
        loader = self._loader
        if hasattr(loader, "iteration"):
            loader.iteration = state[EPOCH]
        sampler, saved = _seedable_sampler(loader), state.get(SAMPLER)
        if sampler is not None and isinstance(saved, Mapping):
            sampler.epoch, sampler.initial_seed = saved["epoch"], saved["initial_seed"]
        generator = getattr(loader, "synchronized_generator", None)
        if generator is not None and GENERATOR in state:
            generator.set_state(state[GENERATOR])
        if getattr(loader, "use_stateful_dataloader", False) and POSITION in state:
            loader.load_state_dict(state[POSITION])  # type: ignore[attr-defined]
            # What it returns until it is iterated: a save before that must not lose the position.
            loader.dl_state_dict = state[POSITION]  # type: ignore[attr-defined]


def _seedable_sampler(loader: object) -> SeedableRandomSampler | None:
    find = getattr(loader, "get_sampler", None)
    sampler = None if find is None else find()
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def _on_other_processes(name: str, loader: object, saved: Sequence[object], rank: int, world_size: int) -> object:
    """Return the position for a process, if another number of processes saved.

    A stateful data loader counts batches of its own process, so its place within an epoch fits that number only. One
    that process 0 iterates for all counts all batches.

    Raises:
        InvalidError: It is within an epoch.
    """
    positions = [dict(each) for each in saved if isinstance(each, Mapping)]
    if isinstance(loader, DataLoaderDispatcher) and rank < len(positions):
        return positions[rank]
    within = [each for each in positions if POSITION in each and not _is_between_epochs(each[POSITION])]
    if within and not isinstance(loader, DataLoaderDispatcher):
        raise InvalidError(
            f"{name}: a stateful data loader was saved within an epoch by {len(saved)} processes, and {world_size} "
            "load it; expected the same number. Resume with as many, or save at the end of an epoch, or pass "
            f"load_state(…, skip={name!r}) and skip the batches with accelerator.skip_first_batches"
        )
    return positions[0]


def _is_between_epochs(position: object) -> bool:
    if not isinstance(position, Mapping):
        return False
    snapshot = position.get("_snapshot")  # With workers.
    steps = snapshot.get("_snapshot_step") if isinstance(snapshot, Mapping) else position.get("_num_yielded")
    return bool(position.get("_iterator_finished")) or steps == 0
