"""FSDP1 in its corners: ties, extra state, state made at once, what is refused."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import holdfast
from tests.distributed.matrix import layouts, models
from tests.distributed.matrix.holding import clean, digests_of, group_of, over, refusal_of
from tests.support.gloo_worlds import World
from tests.support.small_networks import digest


class Counting(nn.Module):
    """A layer with extra state, beside which a tensor is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(torch.relu(self.first(x)))


def _counting(seed: int, layout: str) -> tuple[nn.Module, Counting, torch.optim.Adagrad]:
    """Adagrad makes its state at once, for parameters too of which FSDP1 left this rank nothing."""
    torch.manual_seed(seed)
    inner = Counting()
    model = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 1))
    wrapped = over(model, layout)
    return wrapped, inner, torch.optim.Adagrad(wrapped.parameters(), lr=0.05)


def _step_counting(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(3, 6, generator=torch.Generator().manual_seed(number))).square().sum().backward()
    optimizer.step()


def save_counting(world: World | None, path: str, layout: str) -> dict[str, object]:
    model, inner, optimizer = _counting(1, layout)
    _step_counting(model, optimizer, 1)
    state = {"model": model, "optimizer": optimizer}
    holdfast.save(path, state, process_group=group_of(world))
    return {"calls": inner.calls, "digests": digests_of(model, optimizer)}


def load_counting(world: World | None, path: str, layout: str) -> dict[str, object]:
    """Load, step on, and save again: ranks that hold nothing of a parameter must not hold a count that stood still."""
    model, inner, optimizer = _counting(2, layout)
    state = {"model": model, "optimizer": optimizer}
    holdfast.load(path, state, process_group=group_of(world))
    found = {"calls": inner.calls, "digests": digests_of(model, optimizer)}
    _step_counting(model, optimizer, 2)
    again = f"{path}-again-{layout}-{world.size if world else 1}"
    holdfast.save(again, state, process_group=group_of(world))
    model, inner, optimizer = _counting(3, layout)
    holdfast.load(again, {"model": model, "optimizer": optimizer}, process_group=group_of(world))
    steps = {float(each["step"]) for each in optimizer.state.values() if each["step"] > 0}
    return found | {"calls again": inner.calls, "steps again": sorted(steps)}


def save_adamw_again(world: World, path: str) -> list[float]:
    """AdamW under FSDP1 has no state where a rank holds nothing; loading must not make any."""
    built = layouts.fsdp1(1)
    built.train([1, 2])
    holdfast.save(path, built.state)
    anew = layouts.fsdp1(2)
    holdfast.load(path, anew.state)
    built.train([3])
    anew.train([3])
    assert anew.digests() == built.digests()
    holdfast.save(f"{path}-again", anew.state)
    optimizer = anew.state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    return sorted({float(each["step"]) for each in optimizer.state.values()})


def fsdp1_refusals(world: World, path: str) -> dict[str, str]:
    options = {"device_id": torch.device("cpu")}
    flat = nn.Sequential(FullyShardedDataParallel(models.net(1), use_orig_params=False, **options))
    said = {"flat": refusal_of(lambda: holdfast.save(f"{path}-flat", {"model": flat}))}
    said["flat parameter"] = refusal_of(lambda: holdfast.save(f"{path}-flat", {"p": next(flat.parameters())}))
    model = FullyShardedDataParallel(models.net(1), use_orig_params=True, **options)
    with FullyShardedDataParallel.summon_full_params(model):
        said["whole"] = refusal_of(lambda: holdfast.save(f"{path}-whole", {"model": model}))
    said["alone"] = refusal_of(lambda: holdfast.save(f"{path}-alone", {"model": model}, process_group=False))
    columns = nn.Linear(6, 6)
    columns.weight = nn.Parameter(columns.weight.detach().t())
    strided = FullyShardedDataParallel(columns, use_orig_params=True, **options)
    said["strided"] = refusal_of(lambda: holdfast.save(f"{path}-strided", {"model": strided}))
    return said


def fsdp1_whole(world: World, path: str) -> dict[str, str]:
    """NO_SHARD leaves parameters whole and in their own shape."""
    model = FullyShardedDataParallel(
        models.net(1),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )
    holdfast.save(path, {"model": model})
    anew = models.net(2)
    holdfast.load(path, {"model": anew})
    saved = {clean(name): digest(each) for name, each in model.named_parameters()}
    loaded = {name: digest(each) for name, each in anew.named_parameters()}
    return {name: f"{saved[name]} {loaded[name]}" for name in saved if saved[name] != loaded[name]}
