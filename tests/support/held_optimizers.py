"""A base for optimizers of tests that hold others, as torchtitan's container does."""

from __future__ import annotations

import torch


class HoldsOptimizers(torch.optim.Optimizer):
    """An optimizer whose `step` and `zero_grad` call those of the optimizers that it holds."""

    held_in = "optimizers"
    """The attribute that holds them."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for each in getattr(self, self.held_in):
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in getattr(self, self.held_in):
            each.zero_grad(set_to_none)
