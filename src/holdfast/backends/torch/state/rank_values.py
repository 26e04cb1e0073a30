"""Loads values that differ by rank, and states of objects, once every tensor is filled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from holdfast.backends.torch.containers import plain_leaf, put_together
from holdfast.backends.torch.local_shards import Ranks
from holdfast.backends.torch.state import rng
from holdfast.backends.torch.state.walk import Stateful
from holdfast.base.ports.framework import Catalog
from holdfast.base.types.per_rank import PerRank, RngState
from holdfast.base.types.values import PerRankRef, Value
from holdfast.errors import InvalidError

logger = logging.getLogger(__name__)


def loader_of_rank_value(
    path: str, value: PerRank | RngState, saved: Value, catalog: Catalog, ranks: Ranks
) -> Callable[[], None]:
    """Return what loads the value that this rank saved for itself, or its substitute if the number of ranks changed.

    Raises:
        InvalidError: The checkpoint has no value for this rank, and no substitute was asked for.
    """
    if not isinstance(saved, PerRankRef):
        raise InvalidError(
            f"{path}: was saved once for all ranks, not by rank; expected a plain value in the state. Pass one"
        )

    def saved_by(rank: int) -> object:
        values = catalog.per_rank(rank)
        if saved.path not in values:
            raise InvalidError(f"{path}: rank {rank} saved no value under this name at step {catalog.step}; skip= it")
        return put_together(values[saved.path], plain_leaf)

    if isinstance(value, RngState):
        if ranks.rank >= catalog.world_size:
            return partial(rng.seed, catalog.run_id, catalog.step, ranks.rank)
        state = saved_by(ranks.rank)

        def restore() -> None:
            rng.restore(state, path)
            if ranks.rank == 0 and ranks.world_size != catalog.world_size:
                logger.info("%s: %s", path, _of_other_ranks(catalog.world_size, ranks.world_size))

        return restore
    if ranks.world_size == catalog.world_size:
        return _setter(path, value, saved_by(ranks.rank))
    if value.resize == "error":
        raise InvalidError(
            f"{path}: each of {catalog.world_size} ranks saved a value, and the job has {ranks.world_size} ranks now; "
            "expected the same number. Pass PerRank(…, resize='first') or a function that makes one rank's value from "
            "all of them, or skip= it"
        )
    if value.resize == "first":
        return _setter(path, value, saved_by(0))
    values = [saved_by(rank) for rank in range(catalog.world_size)]
    return _setter(path, value, value.resize(values, ranks.rank, ranks.world_size))


def _of_other_ranks(saved: int, loading: int) -> str:
    """Return what becomes of the random states of ranks that did not save, or do not load."""
    first, last = sorted((saved, loading))
    which = f"rank {first}" if last == first + 1 else f"ranks {first} to {last - 1}"
    if loading > saved:
        what = f"the random generators of {which} are seeded anew, from run, step and rank"
    else:
        what = f"the saved random states of {which} are not used"
    return f"number of ranks: {saved} at the save, {loading} now: {what}"


def _setter(path: str, value: PerRank, loaded: object) -> Callable[[], None]:
    inner = value.value
    if isinstance(inner, Stateful) and not isinstance(inner, type):
        require_dict(loaded, path)
        return partial(load_into, inner, loaded, path)
    return partial(setattr, value, "value", loaded)


def require_dict(loaded: object, path: str) -> None:
    """Refuse the saved state of an object if it is no dict.

    Raises:
        InvalidError: Names the path.
    """
    if not isinstance(loaded, dict):
        raise InvalidError(f"{path}: its saved state is {type(loaded).__name__}; expected a dict, skip= it")


def load_into(stateful: Stateful, loaded: object, path: str) -> None:
    """Have an object load a state.

    Raises:
        InvalidError: It raises.
    """
    assert isinstance(loaded, dict), "require_dict comes first"
    try:
        stateful.load_state_dict(loaded)
    except Exception as error:
        raise InvalidError(
            f"{path}: {type(stateful).__name__}.load_state_dict refused it: {type(error).__name__}: {error}"
        ) from error
