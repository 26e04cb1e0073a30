"""What ranks do in the tests of what differs by rank."""

from __future__ import annotations

import logging
import os
import platform
import shutil

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import CheckpointError
from tests.support.gloo_worlds import World


def _outcome(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def patterns_by_stage(world: World, path: str) -> dict[str, str]:
    """Save and load stages of a pipeline with patterns that one stage, or none, has names for."""
    mine = f"layer{world.rank}"
    state = {"model": {mine: torch.full((4,), float(world.rank))}}

    def load(**patterns: str) -> str:
        state["model"][mine].zero_()
        said = _outcome(lambda: holdfast.load(f"{path}-all", state, **patterns))
        return f"{said} {int(state['model'][mine].sum())}"

    return {
        "one stage": _outcome(lambda: holdfast.save(f"{path}-one", state, only="model.layer1")),
        "no stage": _outcome(lambda: holdfast.save(f"{path}-none", state, only=["model.layer1", "model.layer7"])),
        "skip": _outcome(lambda: holdfast.save(f"{path}-skip", state, skip="model.layer7")),
        "other by rank": _outcome(lambda: holdfast.save(f"{path}-mine", state, only=f"model.{mine}")),
        "all": _outcome(lambda: holdfast.save(f"{path}-all", state)),
        "load of one": load(only="model.layer1"),
        "load of none": load(only="modle.layer1"),
    }


def root_unseen_by_one(world: World, path: str, blind: int) -> dict[str, object]:
    """Load where one rank finds an empty mount point instead of the run."""
    with holdfast.CheckpointManager(f"{path}-{blind}") as manager:
        manager.save(1000, {"w": torch.ones(4)}).wait()
    dist.barrier()
    root = f"{path}-{blind}" + ("-unmounted" if world.rank == blind else "")
    state = {"w": torch.zeros(4)}
    with holdfast.CheckpointManager(root) as manager:
        said = _outcome(lambda: manager.load(state))
    return {"said": said, "host": platform.node(), "sum": float(state["w"].sum()), "left": os.path.exists(root)}


def root_of_a_new_run(world: World, path: str) -> object:
    with holdfast.CheckpointManager(path) as manager:
        return manager.load({"w": torch.zeros(4)})


class Warnings:
    """Collects the warnings of Holdfast's log in a block."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.texts.append(record.getMessage())  # type: ignore[method-assign]

    def __enter__(self) -> list[str]:
        logging.getLogger("holdfast").addHandler(self._handler)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("holdfast").removeHandler(self._handler)


def glob_that_matches_nothing(world: World, path: str) -> list[str]:
    """Save twice with a glob in `skip` that matches nothing; return what was logged."""
    state = {"model": torch.ones(4)}
    with Warnings() as texts, holdfast.CheckpointManager(path) as manager:
        for step in (1, 2):
            manager.save(step, state, skip="modle.*").wait()
    return texts


class QuantLinear(nn.Module):
    """Keeps its weight as GPTQ and AWQ do: a buffer of integers, each rank's own half."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.register_buffer("qweight", torch.randint(0, 1 << 30, (8, 4), dtype=torch.int32, generator=generator))
        self.scale = nn.Parameter(torch.ones(1))


class Loader:
    """A data loader with a position of its own on every rank."""

    def __init__(self, rank: int) -> None:
        self.position = 1000 + rank

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.position = int(str(state["position"]))


class Metric:
    """Accumulates by rank, as the metrics of torcheval do."""

    def __init__(self, rank: int) -> None:
        self.total, self.counts = torch.tensor(float(rank)), torch.tensor([rank, 1])

    def state_dict(self) -> dict[str, object]:
        return {"total": self.total, "counts": self.counts}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.total, self.counts = state["total"], state["counts"]  # type: ignore[assignment]


class ModuleMetric(nn.Module):
    """Keeps its states as torchmetrics does: attributes that only its state dict lists."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.total, self.counts = torch.tensor(float(rank)), torch.tensor([rank, 1])

    def state_dict(self, *_: object, prefix: str = "", **passed: object) -> dict[str, object]:  # type: ignore[override]
        state: dict[str, object] = passed.get("destination", {})  # type: ignore[assignment]
        state |= {f"{prefix}total": self.total.detach(), f"{prefix}counts": self.counts.detach()}
        return state

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *_: object) -> None:
        self.total, self.counts = state_dict.pop(f"{prefix}total"), state_dict.pop(f"{prefix}counts")  # type: ignore[assignment]


ModuleMetric.__name__ = "Metric"


def what_differs(world: World, path: str) -> dict[str, object]:
    """Save what differs by rank, each by itself; return what was said and logged."""
    rank = world.rank
    norm = nn.BatchNorm1d(4)
    norm((rank + 1.0) * torch.arange(1, 3)[:, None].expand(2, 4))
    states: dict[str, object] = {
        "buffer": QuantLinear(rank),
        "loader": Loader(rank),
        "rng": torch.Generator().manual_seed(rank).get_state(),
        "metric": Metric(rank),
        "module metric": nn.ModuleDict({"accuracy": ModuleMetric(rank), "head": nn.Linear(1, 1)}),
        "norm": norm,
        "value": {"seed": rank, "name": "run"},
    }
    torch.manual_seed(0)
    said: dict[str, object] = {}
    for name, value in states.items():
        if name == "module metric":
            dist.broadcast(value["head"].weight.data, 0)  # type: ignore[index]
            dist.broadcast(value["head"].bias.data, 0)  # type: ignore[index]
        with Warnings() as texts:
            said[name] = _outcome(lambda value=value, name=name: holdfast.save(f"{path}-{name}", {"x": value}))
        said[f"{name} logged"] = texts
    return said


def drifted(world: World, path: str) -> dict[str, object]:
    """Train replicas that drift apart, save with either answer, and load what was saved."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.full((1, 4), 1.0 + world.rank / 1000)).square().sum().backward()
    optimizer.step()
    state = {"model": net, "optimizer": optimizer}
    said: dict[str, object] = {"refuse": _outcome(lambda: holdfast.save(path, state))}
    with Warnings() as texts:
        report = holdfast.save(path, state, settings=holdfast.Settings(replicas="lowest"))
    said["logged"], said["divergent"] = texts, report.divergent
    holdfast.load(path, state)
    moments = [optimizer.state[each]["exp_avg_sq"] for each in net.parameters()]
    said["loaded"] = [float(each.detach().double().sum()) for each in (*net.parameters(), *moments)]
    health = holdfast.open_checkpoint(path).manifest.health
    said["marked"] = None if health is None else sorted(health.divergent or ())
    return said


def each_ranks_own(world: World, path: str) -> list[object]:
    """Save and load what is declared to differ; return what each rank got back, and what was logged."""
    rank = world.rank
    loader, weight = Loader(rank), torch.arange(4, dtype=torch.int32) + 4 * rank

    def state() -> dict[str, object]:
        return {
            "loader": holdfast.PerRank(loader),
            "seed": holdfast.PerRank(rank),
            "rng": holdfast.RngState(),
            "qweight": holdfast.Sharded(weight, (8,), (4 * rank,)),
        }

    torch.manual_seed(rank)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(rank))
    with Warnings() as texts:
        holdfast.save(path, state())
    loader.position, before = -1, weight.clone()
    weight.zero_()
    torch.manual_seed(99)
    loaded = state()
    holdfast.load(path, loaded)
    same = torch.equal(weight, before) and torch.equal(torch.rand(1), expected)
    return [loader.position, loaded["seed"].value, same, texts]  # type: ignore[attr-defined]


def run_without_steps(world: World, path: str) -> list[object]:
    """Load from a run whose first save was never committed; one rank does not see the run."""
    if world.rank == 0:
        with holdfast.CheckpointManager(path, process_group=False) as manager:
            manager.save(1, {"w": torch.ones(4)}).wait()
        shutil.rmtree(f"{path}/step-000000000001")
    dist.barrier()
    with holdfast.CheckpointManager(path if world.rank == 0 else f"{path}-unmounted") as manager:
        return [manager.load({"w": torch.zeros(4)}), os.path.exists(f"{path}/holdfast.json")]
