"""The position of the data loader: torchtitan keeps one for each data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from holdfast import PerRank
from holdfast.errors import InvalidError

_WAY_OUT = 'Load with exclude_from_loading=["dataloader"]: the data then begin anew'


def position_of(loader: object) -> PerRank:
    """Return what saves the position of each rank, and loads it on any number of ranks that read the same parts."""
    return PerRank(loader, resize=partial(_together, loader))


def _together(loader: object, saved: Sequence[object], rank: int, world_size: int) -> object:
    """Return the positions of all ranks in one dict; torchtitan's loader looks up its own by data-parallel rank.

    Raises:
        InvalidError: Two ranks saved different values under one key, or the data are split for another number of ranks.
    """
    together: dict[object, object] = {}
    for number, state in enumerate(saved):
        if not isinstance(state, dict):
            raise InvalidError(
                f"dataloader: rank {number} saved {type(state).__name__}; expected the dict of its state_dict(). "
                f"{_WAY_OUT}"
            )
        for key, value in state.items():
            if not _are_equal(together.setdefault(key, value), value):
                raise InvalidError(
                    f"dataloader: the {len(saved)} ranks saved different positions under {key!r}, and the job has "
                    f"{world_size} ranks now; expected {len(saved)} ranks. {_WAY_OUT}"
                )
    now, then = getattr(loader, "dp_world_size", None), together.get("world_size")
    if now is not None and then is not None and now != then:
        raise InvalidError(
            f"dataloader: the data were split for {then} data-parallel ranks, and are for {now} now; torchtitan's data "
            f"loader expects the same number. {_WAY_OUT}"
        )
    return together


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    try:
        return bool(one == other)
    except ValueError:  # Arrays of several elements.
        return False
