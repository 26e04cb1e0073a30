"""Seconds of calls on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast.base.clock import Clock, SystemClock


def timed(call: Callable[[], Any], device: torch.device | None, clock: Clock | None = None) -> tuple[Any, float]:
    """Return the result of a call, and the seconds until the device has done the work.

    With one thread on a CPU the processor seconds of the thread count: other programs then add almost nothing.

    Args:
        call: A call without arguments.
        device: Device of the work; None for work on the host.
        clock: Measures the seconds.
    """
    started = seconds_of(device, clock)
    result = call()
    return result, seconds_of(device, clock) - started


def seconds_of(device: torch.device | None, clock: Clock | None = None) -> float:
    """Return the seconds on a clock when the device has done all work so far. Arguments as for `timed`."""
    clock = clock or SystemClock()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return clock.thread_seconds()
    return clock.monotonic_seconds()


def least_seconds(
    call: Callable[[], Any], device: torch.device | None, rounds: int, clock: Clock | None = None
) -> float:
    """Return the shortest of several measurements: whatever else runs on the machine only adds time."""
    return min(timed(call, device, clock)[1] for _ in range(rounds))
