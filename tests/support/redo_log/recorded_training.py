"""A small training with all that a record must hold, and records kept in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from holdfast import RngState
from holdfast.backends.torch.framework import TorchFramework
from holdfast.backends.torch.local_shards import Ranks
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import Region
from holdfast.base.ports.framework import Selection
from holdfast.base.ports.gradients import Captured, GradientCapture
from holdfast.base.types.redo import Record
from holdfast.base.types.values import Value
from holdfast.core.format.values.values import decode, encode

RANKS = Ranks(0, 1, lambda rank: rank)
FRAMEWORK = TorchFramework(RANKS)

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class HeapMemory:
    """Lends memory of the process."""

    def __init__(self) -> None:
        self.lent = 0

    def take(self, count: int) -> memoryview:
        self.lent += 1
        return memoryview(bytearray(count))

    def give(self, buffer: memoryview) -> None:
        self.lent -= 1


class Model(nn.Module):
    """A norm, dropout, and a branch that has no gradient at some steps."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.norm = norm(16)
        self.drop = nn.Dropout(0.2)
        self.branch = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, batch: torch.Tensor, branch: bool) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(batch)).relu())
        out: torch.Tensor = self.last(hidden + self.branch(hidden) if branch else hidden)
        return out


class Training:
    """A training with accumulation, clipping, two groups, a schedule, an average and a scaler that skips."""

    norm: Callable[[int], nn.Module] = nn.BatchNorm1d

    def __init__(self, make: Make, *, matrices: bool = False, rank: int = 0, seed: int = 7) -> None:
        torch.manual_seed(seed)
        self.rank = rank
        self.model = Model(self.norm)
        for parameter in self.model.parameters():
            parameter.requires_grad_(not matrices or parameter.dim() == 2)
        self.average = copy.deepcopy(self.model)
        self.trained = self.laid_out()
        decayed = [self.model.first.weight, self.model.branch.weight, self.model.last.weight]
        rest = [] if matrices else [each for each in self.model.parameters() if all(each is not one for one in decayed)]
        groups: list[dict[str, Any]] = [{"params": decayed[:2], "weight_decay": 0.1}, {"params": [*rest, decayed[2]]}]
        self.optimizer = make(groups)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.2 * step))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.seen = torch.zeros((), dtype=torch.int64)
        self.losses = [torch.zeros(2), torch.zeros(())]
        self.step = 0
        self.values: dict[str, Any] = {"step": 0, "order": [3, 1]}

    def laid_out(self) -> nn.Module:
        """Lay model and average out over the ranks; return the module whose forward trains the model."""
        return self.model

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of one batch of a step."""
        return nullcontext()

    def of_all_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of all ranks."""
        return loss

    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "average", "scaler", "seen", "losses", "values")
        return {name: getattr(self, name) for name in names} | {"rng": RngState()}

    def train(self) -> None:
        """Take one step; gradients go before the next step or at once, and are set to None or to zero."""
        self.step += 1
        data = torch.Generator().manual_seed(100 * self.rank + self.step)
        self.optimizer.zero_grad(set_to_none=self.step % 3 != 0)
        for number in range(2):
            with self.accumulating(is_last=number == 1):
                loss = self.trained(torch.randn(8, 12, generator=data), branch=self.step % 4 != 1).square().mean()
                if self.step == 6:
                    loss = loss * float("inf")
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if not any(group.get("fused") for group in self.optimizer.param_groups):
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        if not self.step % 2:
            self.optimizer.zero_grad(set_to_none=self.step % 4 != 0)
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.data.lerp_(weight, 0.1)
            self.seen += 8
            self.losses[0] += self.of_all_ranks(loss.detach().nan_to_num(posinf=1))
        self.values = self.values | {"step": self.step}

    def bits(self) -> Any:
        """Return a copy of all that must be equal."""
        parts = {name: each.state_dict() for name, each in self.state().items() if hasattr(each, "state_dict")}
        held = (parts, self.seen, self.losses, self.values, torch.get_rng_state())
        return copy.deepcopy(held)


@dataclass
class Log:
    """Records of a training, kept in memory."""

    capture: GradientCapture
    memory: HeapMemory
    records: list[Captured] = field(default_factory=list)

    def boundary(self, step: int, state: Mapping[str, object] | None = None) -> Record | None:
        captured = self.capture.boundary(step, state)
        if captured is not None:
            self.records.append(captured)
        return None if captured is None else captured.record


def whole_regions(capture: GradientCapture) -> dict[str, Sequence[Region]]:
    """Return the regions of a rank that records all that it holds."""
    return {local.shard.tensor.fqn: local.shard.pieces for local in capture.parameters}


def log_of(state: Mapping[str, object], step: int = 0, vouched: Sequence[type] = ()) -> Log:
    """Begin to record."""
    memory = HeapMemory()
    capture = FRAMEWORK.capture(state, Selection(), vouched, memory)
    capture.begin(step, whole_regions(capture))
    assert not capture.interrupted
    return Log(capture, memory)


def stored(record: Record) -> Record:
    """Return a record as it comes back from storage: its values encoded and decoded."""

    def again(value: Value) -> Any:
        return decode(encode(value, "record"), "record")

    calls = [
        replace(call, groups=tuple([again(group) for group in call.groups]), scaling=again(call.scaling))
        for call in record.calls
    ]
    return replace(record, calls=tuple(calls), tree=again(record.tree), per_rank=again(record.per_rank))


def redo(state: Mapping[str, object], records: Sequence[Captured]) -> list[str]:
    """Apply records to a state; return the names whose sums differ."""
    steps = FRAMEWORK.redo(state, Selection())
    differing: list[str] = []
    for captured in records:
        record = stored(captured.record)
        assert steps.unlike(record) == ""
        tensors = {(each.tensor.fqn, each.region): each for each in captured.tensors()}
        for wanted in steps.wanted(record):
            for box in wanted.boxes:
                each = tensors[wanted.stored_fqn, box]
                buffer = memoryview(bytearray(box.numel * each.tensor.itemsize))
                each.source.copy_into(box, 0, len(buffer), buffer).wait()
                assert isinstance(box, Box)
                wanted.target.place(box, buffer, box)
        differing += steps.apply(record)
    steps.finish(stored(records[-1].record))
    return differing
