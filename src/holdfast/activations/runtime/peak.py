"""The measured peak of device memory in a call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


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
