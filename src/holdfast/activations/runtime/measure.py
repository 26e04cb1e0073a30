"""Seconds of calls on a device, and of each unit in a real step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from holdfast.activations.runtime.arguments import tensors_of
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


@contextmanager
def timed_units(units: Mapping[str, nn.Module], device: torch.device) -> Iterator[dict[str, float]]:
    """Yield the seconds of each unit so far.

    The backward of a unit lasts from the gradient of the output to the first gradient of an input. Without a gradient
    of an input the backward of the unit is taken to end with the block.

    Args:
        units: The units by FQN.
        device: Device of the units.
    """
    spent, begun = dict.fromkeys(units, 0.0), dict[str, float]()

    def begin(name: str) -> None:
        begun[name] = seconds_of(device)

    def end(name: str) -> None:
        if name in begun:
            spent[name] += seconds_of(device) - begun.pop(name)

    with ExitStack() as stack:

        def hook(value: Any, then: Callable[[str], None], name: str) -> None:
            for each in tensors_of(value):
                if each.requires_grad:
                    stack.callback(each.register_hook(lambda _: then(name)).remove)  # type: ignore[no-untyped-call]

        def before(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            hook((args, kwargs), end, name)
            begin(name)

        def after(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            end(name)
            hook(output, begin, name)

        for name, unit in units.items():
            stack.enter_context(unit.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            stack.enter_context(unit.register_forward_hook(partial(after, name), with_kwargs=True))
        yield spent
    for name in [*begun]:
        end(name)
