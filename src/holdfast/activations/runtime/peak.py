"""The measured peak of device memory in a call, and in a unit that runs by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import ProfilerActivity, profile

from holdfast.activations.runtime.arguments import put_together, tensors_of
from holdfast.backends.torch.private_layout import registered


def peak_bytes(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """Return the result of a call, and the most bytes that the call held above the bytes of before.

    On a CPU the events of the allocator count. The allocator does not report the release of memory that stood before
    the call, so that a call which releases gradients measures more than its peak.

    Args:
        call: A call without arguments, for example one training step.
        device: A CPU or a CUDA device.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        result = call()
    results = profiled.profiler.kineto_results if profiled.profiler else None
    assert results is not None, "a profiler that has run has results"
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    return result, max(accumulate((size for _, size in sorted(events, key=lambda event: event[0])), initial=0))


def unit_peak(unit: nn.Module, forward: Callable[..., Any], form: Any, tensors: Sequence[torch.Tensor]) -> int:
    """Return the most bytes of forward and backward above the unit's input, without gradients of parameters.

    Gradients, buffers, generators and casts that autocast keeps stay as they are.

    Args:
        unit: A unit without state outside parameters and buffers.
        forward: The unit's own forward.
        form, tensors: Arguments of the call.
    """
    device = tensors[0].device
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    keeps_casts = torch.is_autocast_cache_enabled()

    def run() -> None:
        args, kwargs = put_together(form, inputs)
        returned = [each for each in tensors_of(forward(*args, **kwargs)) if each.requires_grad]
        edges, ones = [get_gradient_edge(each) for each in returned], [torch.ones_like(each) for each in returned]
        # In a step the next unit holds the output, or no one does.
        del returned
        torch.autograd.backward(edges, ones)
        for each in inputs:
            each.grad = None

    torch.set_autocast_cache_enabled(False)
    try:
        with copied(unit), torch.random.fork_rng([device] if device.type == "cuda" else []):
            run()
            return peak_bytes(run, device)[1]
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)


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
