"""The measured times and the peak of one unit, run by itself on copies of the unit's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from holdfast.activations.runtime.arguments import Form, put_together, tensors_of
from holdfast.activations.runtime.measure import timed
from holdfast.activations.runtime.peak import peak_bytes
from holdfast.backends.torch.private_layout import registered

_ROUNDS = 3
"""Measurements, of which the shortest counts."""


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Costs of one plain call of a unit."""

    forward_seconds: float
    """Time of the forward."""
    backward_seconds: float
    """Time of the backward."""
    peak_bytes: int
    """Most bytes of forward and backward above the unit's input, without gradients of parameters."""


def costs_of(unit: nn.Module, forward: Callable[..., Any], form: Form, tensors: Sequence[torch.Tensor]) -> UnitCosts:
    """Return the costs of a call. Gradients, buffers, generators and casts that autocast keeps stay as they are.

    Args:
        unit: A unit without state outside parameters and buffers.
        forward: The unit's own forward.
        form, tensors: Arguments of the call.
    """
    device = tensors[0].device
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    keeps_casts = torch.is_autocast_cache_enabled()

    def run() -> tuple[float, float]:
        args, kwargs = put_together(form, inputs)
        output, forward_seconds = timed(lambda: forward(*args, **kwargs), device)
        returned = [each for each in tensors_of(output) if each.requires_grad]
        edges, ones = [get_gradient_edge(each) for each in returned], [torch.ones_like(each) for each in returned]
        # In a step the next unit holds the output, or no one does.
        del output, returned
        _, backward_seconds = timed(lambda: torch.autograd.backward(edges, ones), device)
        for each in inputs:
            each.grad = None
        return forward_seconds, backward_seconds

    torch.set_autocast_cache_enabled(False)
    try:
        with copied(unit), torch.random.fork_rng([device] if device.type == "cuda" else []):
            seconds = [run() for _ in range(_ROUNDS)]
            _, peak = peak_bytes(run, device)
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)
    return UnitCosts(min(each for each, _ in seconds), min(each for _, each in seconds), peak)


@contextmanager
def copied(unit: nn.Module, *, parameters: bool = True) -> Iterator[None]:
    """Put copies in the place of buffers and parameters. A gradient of a parameter is dropped as soon as it is made.

    Args:
        unit: The unit.
        parameters: Whether parameters are copied too: only a backward changes parameters.
    """
    places = [
        (held, name, each) for module in unit.modules() for held in registered(module) for name, each in held.items()
    ]
    copies: dict[int, torch.Tensor] = {}
    try:
        for held, name, each in places:
            if each is not None and (parameters or not isinstance(each, nn.Parameter)):
                held[name] = copies.setdefault(id(each), _copy_of(each))
        yield
    finally:
        for held, name, each in places:
            held[name] = each


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        if tensor.requires_grad:
            copied.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    return copied
