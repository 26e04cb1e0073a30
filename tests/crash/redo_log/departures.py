"""Differences between a recorded run and its redo, drawn by seed: some are recorded, some named, some left to the sums.

A departure has a side. On the side of the run the records do not tell of it; on the side of the redo the process that
loads is another one.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import holdfast
from holdfast.backends.torch.redo.stepped import SteppedState
from holdfast.base.ports.framework import Selection
from holdfast.base.ports.store import Store
from holdfast.observers import Event, LogInterrupted
from tests.support.redo_log.recorded_training import RANKS

Bits = Mapping[str, bytes]
Make = Callable[[Any], torch.optim.Optimizer]
Kernel = Callable[..., None]

_ADAM = sys.modules[torch.optim.Adam.__module__]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Run:
    """A training, made again at each start."""

    def __init__(self, store: Store, make: Make) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        self.optimizer = make(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.whys: list[str] = []
        """Why the log was interrupted."""
        options: dict[str, Any] = {"differential": holdfast.Differential(optimizers=(type(self.optimizer),))}
        self.manager = holdfast.CheckpointManager(
            store, every=1000, process_group=False, preemption=False, observers=[self], **options
        )
        torch.manual_seed(7)

    def on_event(self, event: Event) -> None:
        if isinstance(event, LogInterrupted):
            self.whys.append(event.why)

    def bits(self) -> Bits:
        """Return every bit of the state by its name."""
        stepped = SteppedState(self.state, Selection(), RANKS)
        found = bits_of(stepped)
        for name, value in self.model.named_buffers():
            found[name] = value.numpy().tobytes()
        for group in self.optimizer.param_groups:
            found["groups"] = repr({**group, "params": 0}).encode()
        return found

    def train(self, first: int, last: int, after_step: Callable[[int], None], at_end: Callable[[int], None]) -> Any:
        """Train steps; return the bits at each boundary."""
        truth = {}
        for step in range(first, last + 1):
            self.model(torch.randn(5, 9)).square().mean().backward()
            self.optimizer.step()
            after_step(step)
            self.optimizer.zero_grad()
            self.manager.maybe_save(step, self.state)
            truth[step] = self.bits()
            if step == 1:
                self.manager.wait()
            at_end(step)
        self.settle()
        return truth

    def settle(self) -> None:
        self.manager.wait()
        log = self.manager._redo_log
        assert log is not None and log._writer.drain(20)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that a step changes, without the counts of steps."""
        state = self.optimizer.state
        held = [state[parameter][key] for parameter in self.model.parameters() for key in ("exp_avg", "exp_avg_sq")]
        return [*self.model.parameters(), *held]


def bits_of(stepped: SteppedState) -> dict[str, bytes]:
    """Return the bits of the tensors that optimizers step, by their names in a record."""
    named = [each for optimizer in stepped.optimizers for each in optimizer.named()]
    return {fqn: tensor.detach().float().numpy().tobytes() for fqn, tensor, _ in named}


@dataclass
class Departure:
    """One difference."""

    kind: str
    chance: random.Random
    last: int
    """The last step of the run."""
    at: int = 0
    """The step of the departure."""
    make: Make = adamw
    make_again: Make | None = None
    """The optimizer of the process that loads, if it is another one."""
    in_run: Callable[[], Any] | None = None
    in_redo: Callable[[], Any] | None = None
    """Contexts around the run and around the load."""
    change: Callable[[Run], None] = field(default=lambda run: None)
    """Made in the run at the step."""
    is_at_end: bool = False
    """Whether the change comes after the boundary of the step, in place of between the step and its boundary."""
    expected: str = "sums"


@contextmanager
def _patched(module: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, value)
        yield


def _kernel(change: Callable[[int, dict[str, Any]], int]) -> Callable[[], Any]:
    """Return a context in which the kernel of Adam gets other arguments.

    Args:
        change: Changes the arguments of a step, by its number; returns how often the step is made.
    """
    bare: Kernel = _ADAM.adam

    def kernel(*given: Any, **options: Any) -> None:
        bound = inspect.signature(bare).bind(*given, **options).arguments
        counts = bound["state_steps"]
        for _ in range(change(int(counts[0]) + 1 if counts else 0, bound)):
            bare(**bound)

    return lambda: _patched(_ADAM, "adam", kernel)


def _in_step(departure: Departure, change: Callable[[dict[str, Any]], int | None], *, lasting: bool) -> None:
    """Change the arguments of the kernel at the step, in the run or in the redo: drawn."""
    is_done = False

    def at(number: int, bound: dict[str, Any]) -> int:
        nonlocal is_done
        is_done = is_done and number != 2  # The redo begins a second time.
        if (number != departure.at and not (lasting and number > departure.at)) or is_done:
            return 1
        is_done = not lasting
        times = change(bound)
        return 1 if times is None else times

    if departure.chance.random() < 0.5:
        departure.in_run = _kernel(at)
    else:
        departure.in_redo = _kernel(at)


def _given(name: str, factor: float) -> Callable[[Departure], None]:
    def apply(departure: Departure) -> None:
        def change(bound: dict[str, Any]) -> None:
            bound[name] = bound[name] * factor

        _in_step(departure, change, lasting=departure.chance.random() < 0.5)

    return apply


def _gradient(departure: Departure) -> None:
    number, is_whole = departure.chance.randrange(6), departure.chance.random() < 0.5

    def change(bound: dict[str, Any]) -> None:
        gradient = bound["grads"][number]
        flat = gradient.view(-1)
        (flat if is_whole else flat[:1]).mul_(1.5)

    _in_step(departure, change, lasting=False)


def _flag(name: str) -> Callable[[Departure], None]:
    def apply(departure: Departure) -> None:
        def change(bound: dict[str, Any]) -> None:
            bound["foreach"] = bound["fused"] = False
            bound[name] = True

        _in_step(departure, change, lasting=True)

    return apply


def _times(count: int) -> Callable[[Departure], None]:
    return lambda departure: _in_step(departure, lambda _: count, lasting=False)


def _rounded_state(departure: Departure) -> None:
    def change(bound: dict[str, Any]) -> None:
        for each in bound["exp_avgs"]:
            each.copy_(each.to(torch.bfloat16))

    _in_step(departure, change, lasting=True)


def _data(departure: Departure) -> None:
    """Change a weight or a state in place, as no version counter shows."""
    chance, factor = departure.chance, departure.chance.choice([0.0, 1.0001, -1.0])
    number, is_whole = chance.randrange(18), chance.random() < 0.5

    def change(run: Run) -> None:
        flat = run.tensors()[number].data.view(-1)
        (flat if is_whole else flat[-1:]).mul_(factor)

    departure.change = change


def _data_replaced(departure: Departure) -> None:
    number = departure.chance.randrange(18)

    def change(run: Run) -> None:
        tensor = run.tensors()[number]
        tensor.data = tensor.data * 1.5

    departure.change, departure.expected = change, "right"


def _state_dtype(departure: Departure) -> None:
    def change(run: Run) -> None:
        state = run.optimizer.state[run.model[2].weight]
        state["step"] = state["step"].double()

    departure.change, departure.expected = change, "interrupted"


def _group(name: str, value: object) -> Callable[[Departure], None]:
    def apply(departure: Departure) -> None:
        departure.change = lambda run: run.optimizer.param_groups[0].update({name: value})
        departure.expected = "right"

    return apply


def _late_hook(departure: Departure) -> None:
    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    departure.change = lambda run: run.optimizer.register_step_pre_hook(hook)
    departure.expected = "interrupted"


def _buffer(departure: Departure) -> None:
    departure.change = lambda run: run.model[1].running_mean.data.mul_(1.5)
    departure.expected = "right"


def _other_flag(name: str) -> Callable[[Departure], None]:
    def apply(departure: Departure) -> None:
        # A load restores the flags of the base: the process of the redo steps by the kernel of the run.
        departure.make_again = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **{name: True})
        departure.expected = "right"

    return apply


def _flag_in_run(departure: Departure) -> None:
    """Change the kernel in the midst of the run, by its name: no redo of one process steps by both kernels."""
    departure.change = lambda run: run.optimizer.param_groups[0].update({"foreach": True})
    departure.expected = "interrupted"


def _machine(name: str) -> Callable[[Departure], None]:
    def apply(departure: Departure) -> None:
        where = (torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
        if name == "version":
            where = (torch, "__version__", "2.0.0")  # type: ignore[assignment]
        departure.in_redo, departure.expected = lambda: _patched(*where), "named"

    return apply


def _other_class(departure: Departure) -> None:
    departure.make_again = lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)
    departure.expected = "named"


def _same_name(departure: Departure) -> None:
    """Have another step under the same name, as after a change of the user's own code."""
    change = departure.chance.choice(["double", "sign", "norm"])

    def vouched(change: str) -> type[torch.optim.Optimizer]:
        class Own(torch.optim.AdamW):
            def step(self) -> None:  # type: ignore[override]
                for parameter in self.param_groups[0]["params"]:
                    if change == "double":
                        parameter.grad.mul_(2.0)
                    elif change == "sign":
                        parameter.grad.copy_(parameter.grad.sign())
                    elif change == "norm":
                        parameter.grad.div_(parameter.grad.norm())
                torch.optim.AdamW.step.__wrapped__(self)  # type: ignore[attr-defined]

        return Own

    departure.make = lambda parameters: vouched("")(parameters, lr=0.01)  # type: ignore[call-arg]
    departure.make_again = lambda parameters: vouched(change)(parameters, lr=0.01)  # type: ignore[call-arg]


KINDS: Mapping[str, Callable[[Departure], None]] = {
    "lr in the step": _given("lr", 1.5),
    "data": _data,
    "same name": _same_name,
    "foreach flag": _other_flag("foreach"),
    "one gradient": _gradient,
    "capability": _machine("capability"),
    "flag in the run": _flag_in_run,
    "late hook": _late_hook,
    "beta1 in the step": _given("beta1", 0.5),
    "beta2 in the step": _given("beta2", 1.0001),
    "tiny lr in the step": _given("lr", 1.000001),
    "eps in the step": _given("eps", 1000.0),
    "decay in the step": _given("weight_decay", 0.0),
    "other class": _other_class,
    "foreach kernel": _flag("foreach"),
    "fused kernel": _flag("fused"),
    "step left out": _times(0),
    "step twice": _times(2),
    "rounded state": _rounded_state,
    "data replaced": _data_replaced,
    "state dtype": _state_dtype,
    "lr of a group": _group("lr", 0.5),
    "betas of a group": _group("betas", (0.5, 0.5)),
    "buffer": _buffer,
    "fused flag": _other_flag("fused"),
    "version": _machine("version"),
}


def departure_of(seed: int) -> Departure:
    """Return the departure of a seed."""
    chance, kind = random.Random(seed), [*KINDS][seed % len(KINDS)]
    departure = Departure(kind, chance, last=chance.randrange(12, 41))
    departure.at = chance.randrange(3, departure.last - 4)
    departure.is_at_end = chance.random() < 0.5
    KINDS[kind](departure)
    return departure
