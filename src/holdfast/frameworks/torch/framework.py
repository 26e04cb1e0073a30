"""PyTorch behind the framework port."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.frameworks.torch.fence import wait_for_all_copies
from holdfast.frameworks.torch.held import Ranks
from holdfast.frameworks.torch.state.collect import collect
from holdfast.frameworks.torch.state.restore import TorchRestoration
from holdfast.ports.framework import Catalog, Collected, Restoration, Selection


class TorchFramework:
    """Takes states of torch objects apart and fills them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def collect(self, state: Mapping[str, object], selection: Selection) -> Collected:
        """Take a state apart, touching nothing."""
        return collect(state, selection, self._ranks)

    def restoration(self, state: Mapping[str, object], catalog: Catalog, selection: Selection) -> Restoration:
        """Work out what a state wants of a checkpoint, touching no value of it."""
        # What is about to be filled may still be being saved.
        wait_for_all_copies()
        return TorchRestoration(state, catalog, selection, self._ranks)
