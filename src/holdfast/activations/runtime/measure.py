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
    clock = clock or SystemClock()
    has_one_thread = torch.get_num_threads() == 1 and (device is None or device.type == "cpu")
    seconds = clock.thread_seconds if has_one_thread else clock.monotonic_seconds
    _wait_for(device)
    started = seconds()
    result = call()
    _wait_for(device)
    return result, seconds() - started


def least_seconds(
    call: Callable[[], Any], device: torch.device | None, rounds: int, clock: Clock | None = None
) -> float:
    """Return the shortest of several measurements: whatever else runs on the machine only adds time."""
    return min(timed(call, device, clock)[1] for _ in range(rounds))


def _wait_for(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
