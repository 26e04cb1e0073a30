"""Values that each rank saved for itself: what a rank gets of them if it loads on as many ranks, or on others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.containers import put_together
from holdfast.frameworks.torch.held import Ranks
from holdfast.frameworks.torch.state import rng
from holdfast.ports.framework import Catalog
from holdfast.types.per_rank import PerRank, RngState
from holdfast.types.values import PerRankRef, Value


def value_of_rank(
    path: str, value: PerRank | RngState, saved: Value, catalog: Catalog, ranks: Ranks
) -> tuple[Callable[[], None], object]:
    """Return a function that sets the value that this rank gets, and the value.

    Args:
        path: Name of the value.
        value: Its place in the state.
        saved: What the tree of the checkpoint has there.
        catalog: The checkpoint.
        ranks: The ranks that load.
    Raises:
        InvalidError: The ranks saved no value of their own, or their number changed and nothing says what to do.
    """
    if not isinstance(saved, PerRankRef):
        raise InvalidError(
            f"{path}: was saved once for all ranks, not by rank; expected a plain value in the state. Pass one"
        )

    def saved_by(rank: int) -> object:
        values = catalog.per_rank(rank)
        if saved.path not in values:
            raise InvalidError(f"{path}: rank {rank} saved no value under this name at step {catalog.step}; skip= it")
        return put_together(values[saved.path], lambda leaf: leaf)

    if isinstance(value, RngState):
        if ranks.rank < catalog.world_size:
            random_state = saved_by(ranks.rank)
            return partial(rng.restore, random_state, path), random_state
        return partial(rng.seed, catalog.run_id, catalog.step, ranks.rank), None
    if ranks.world_size == catalog.world_size:
        loaded = saved_by(ranks.rank)
    elif value.resize == "error":
        raise InvalidError(
            f"{path}: each of {catalog.world_size} ranks saved a value, and the job has {ranks.world_size} "
            "ranks now; expected the same number. Pass PerRank(…, resize='first') or a function that makes one "
            "rank's value from all of them, or skip= it"
        )
    elif value.resize == "first":
        loaded = saved_by(0)
    else:
        values = [saved_by(rank) for rank in range(catalog.world_size)]
        loaded = value.resize(values, ranks.rank, ranks.world_size)
    return partial(setattr, value, "value", loaded), loaded
