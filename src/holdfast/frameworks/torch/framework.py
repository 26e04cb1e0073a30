"""PyTorch behind the framework port."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.frameworks.torch.collect import collect
from holdfast.frameworks.torch.held import RankOfGlobal
from holdfast.frameworks.torch.restore import TorchRestoration
from holdfast.ports.framework import Catalog, Collected, Restoration, Selection


class TorchFramework:
    """Takes states of torch objects apart and fills them."""

    def __init__(self, rank: int, rank_of_global: RankOfGlobal) -> None:
        self._rank, self._rank_of_global = rank, rank_of_global

    def collect(self, state: Mapping[str, object], selection: Selection) -> Collected:
        """Take a state apart, touching nothing."""
        return collect(state, selection, self._rank, self._rank_of_global)

    def restoration(self, state: Mapping[str, object], catalog: Catalog, selection: Selection) -> Restoration:
        """Work out what a state wants of a checkpoint, touching no value of it."""
        return TorchRestoration(state, catalog, selection, self._rank, self._rank_of_global)
