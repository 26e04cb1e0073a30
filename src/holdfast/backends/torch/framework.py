"""The `Framework` of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from holdfast.backends.torch.fence import wait_for_all_copies
from holdfast.backends.torch.local_shards import Ranks
from holdfast.backends.torch.private_layout import warn_of_untested_version
from holdfast.backends.torch.redo.gradient_capture import TorchGradientCapture
from holdfast.backends.torch.redo.step_redo import TorchStepRedo
from holdfast.backends.torch.state.collect import collect
from holdfast.backends.torch.state.restore import TorchRestoration
from holdfast.backends.torch.state.watched import watched_in
from holdfast.base.ports.framework import Catalog, Collected, Restoration, Selection
from holdfast.base.ports.gradients import GradientCapture, RecordMemory, StepRedo


class TorchFramework:
    """Collects and fills states of torch objects."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        if ranks.rank == 0:
            warn_of_untested_version(torch.__version__)

    def collect(self, state: Mapping[str, object], selection: Selection) -> Collected:
        """Split a state into shards and values; changes nothing in it."""
        return collect(state, selection, self._ranks)

    def restoration(self, state: Mapping[str, object], catalog: Catalog, selection: Selection) -> Restoration:
        """Compare a state with a checkpoint; changes no value of it."""
        # A lazy save may still read the tensors that this load will fill.
        wait_for_all_copies()
        return TorchRestoration(state, catalog, selection, self._ranks)

    def watched(self, state: Mapping[str, object]) -> Mapping[str, tuple[object, object]]:
        """Return the modules, optimizers and tensors of a state, each with the stamps of its tensors."""
        return dict(watched_in(state, ""))

    def capture(
        self, state: Mapping[str, object], selection: Selection, vouched: Sequence[type], memory: RecordMemory
    ) -> GradientCapture:
        """Hook the optimizers of a state, to record their steps."""
        return TorchGradientCapture(state, selection, vouched, memory, self._ranks)

    def redo(self, state: Mapping[str, object], selection: Selection) -> StepRedo:
        """Return how records are applied to a state that holds their base."""
        return TorchStepRedo(state, selection, self._ranks)
