"""What ranks do where trainings are not all alike: ties, frozen parts, other optimizers, several jobs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import CheckpointError, InvalidError
from tests.distributed.launch import World
from tests.distributed.matrix import layouts, models
from tests.distributed.networks import digest


def _group(world: World | None) -> object:
    return None if world else False


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except InvalidError as error:
        return str(error)
    return ""


def _over(model: nn.Module, layout: str) -> nn.Module:
    """Return a model under one of the ways to hold it."""
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if layout == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert layout == "one"
    return model


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


# ------------------------------------------------------------------------------------------------ ties


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x)))


def tied(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def _tied_state(layout: str, seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    model = _over(tied(seed), layout)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _train_tied(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in (1, 2):
        optimizer.zero_grad()
        model(models.batch(number) % 7).square().sum().backward()
        optimizer.step()


def save_tied(world: World | None, path: str, layout: str) -> dict[str, object]:
    model, optimizer = _tied_state(layout, 1)
    _train_tied(model, optimizer)
    holdfast.save(path, {"model": model, "optimizer": optimizer}, process_group=_group(world))
    return {"names": sorted(holdfast.open_checkpoint(path).tensors), "model": _tied_digests(model)}


def load_tied(world: World | None, path: str, layout: str) -> dict[str, object]:
    model, optimizer = _tied_state(layout, 2)
    holdfast.load(path, {"model": model, "optimizer": optimizer}, process_group=_group(world))
    found = _tied_digests(model)
    _train_tied(model, optimizer)
    return {"model": found}


def _tied_digests(model: nn.Module) -> dict[str, str]:
    return {
        _clean(name): digest(models.whole(each))
        for name, each in model.state_dict().items()
        if isinstance(each, Tensor)
    }


def _stage(rank: int, seed: int) -> nn.Module:
    """Return this rank's stage of the tied model: each keeps a copy of the shared weight under its own name."""
    model = tied(seed)
    if rank == 0:
        del model.head
    else:
        weight = nn.Parameter(model.embed.weight.detach().clone())
        model.head.weight = weight
        del model.embed
    return model


def _stage_state(rank: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _stage(rank, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def save_tied_stages(world: World, path: str) -> dict[str, str]:
    """The shared weight gets the sum of both stages' gradients, as pipelines with tied embeddings do."""
    model, optimizer = _stage_state(world.rank, 1)
    if world.rank == 1:
        del model.middle
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    models.step_with_made_up_gradients(list(model.parameters()), optimizer, [1, 2])
    holdfast.save(path, {"model": model, "optimizer": optimizer})
    return models.of_module(model, optimizer)


def load_tied_stages(world: World, path: str) -> dict[str, str]:
    model, _ = _stage_state(world.rank, 2)
    if world.rank == 1:
        del model.middle
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    holdfast.load(path, {"model": model, "optimizer": optimizer})
    return models.of_module(model, optimizer)


def save_untied_stages(world: World, path: str) -> str:
    """The two copies have come apart."""
    model = _stage(world.rank, 1 + world.rank)
    if world.rank == 1:
        del model.middle
    holdfast.save(path, {"model": model})
    return ""


# ------------------------------------------------------------------------------- frozen and not yet stepped


def _partly_frozen(layout: str, seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    model = models.net(seed)
    for name, each in model.named_parameters():
        each.requires_grad_(name.startswith(("head", "experts")))
    wrapped = _over(model, layout)
    return wrapped, torch.optim.AdamW([each for each in wrapped.parameters() if each.requires_grad], lr=0.05)


def save_frozen(world: World | None, path: str, layout: str, steps: Sequence[int]) -> dict[str, str]:
    model, optimizer = _partly_frozen(layout, 1)
    models.train(model, optimizer, steps)
    holdfast.save(path, {"model": model, "optimizer": optimizer}, process_group=_group(world))
    return _digests(model, optimizer)


def load_frozen(world: World | None, path: str, layout: str) -> dict[str, str]:
    model, optimizer = _partly_frozen(layout, 2)
    holdfast.load(path, {"model": model, "optimizer": optimizer}, process_group=_group(world))
    found = _digests(model, optimizer)
    models.train(model, optimizer, [3])
    return found


def _digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return digests of parameters, and of state where it is not one of FSDP1's flat runs."""
    found = {
        _clean(name): digest(models.whole(each))
        for name, each in model.state_dict().items()
        if isinstance(each, Tensor)
    }
    names = {each: _clean(name) for name, each in model.named_parameters()}
    runs: dict[str, Tensor] = {}
    for parameter, _ in models.members(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            name = f"{names[parameter]}/{key}"
            if not parameter.numel():
                # FSDP1 left this rank nothing: a count made beforehand stands still and is nobody's.
                continue
            if isinstance(model, FullyShardedDataParallel) and value.ndim:
                runs[name] = value
            else:
                found[name] = digest(models.whole(value).reshape(-1))
    if isinstance(model, FullyShardedDataParallel):
        laid = models.laid_end_to_end(runs, model.process_group)
        found |= {name: digest(value) for name, value in laid.items()}
    return found


# -------------------------------------------------------------------------------------- other optimizers


class Factored(torch.optim.Optimizer):
    """State shaped unlike the parameter, made from its gradient as `torch.optim.Adafactor` does.

    Adafactor itself cannot step DTensors in torch 2.13: a norm over a sharded dimension fails there.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, _ in models.members(self):
            gradient, state = parameter.grad, self.state[parameter]
            if gradient is None:
                continue
            if gradient.ndim < 2:
                state.setdefault("variance", torch.zeros_like(gradient)).add_(gradient.square())
                continue
            if not state:
                shape = list(gradient.shape)
                state["row"] = gradient.new_zeros([*shape[:-1], 1])
                state["column"] = gradient.new_zeros([*shape[:-2], 1, shape[-1]])
            state["row"] = state["row"] * 0.9 + gradient.square().sum(-1, keepdim=True)
            column = gradient.square().sum(-2, keepdim=True)
            if isinstance(column, DTensor):
                column = column.redistribute(placements=[Replicate()] * column.device_mesh.ndim)
            state["column"] = state["column"] * 0.9 + column
            parameter.add_(gradient * (state["row"] * state["column"] + 1).rsqrt(), alpha=-0.01)


class LocalRows(torch.optim.Optimizer):
    """State made of this rank's rows alone, whose layout nothing tells."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, _ in models.members(self):
            assert isinstance(parameter.grad, DTensor)
            self.state[parameter]["rows"] = parameter.grad.to_local().square().sum(-1, keepdim=True) + dist.get_rank()


def _muon(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    rest = [each for each in model.parameters() if each.ndim != 2]
    return {"muon": torch.optim.Muon(matrices, lr=0.01), "adamw": torch.optim.AdamW(rest, lr=0.05)}


def _optimizers(kind: str, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if kind == "muon":
        return _muon(model)
    if kind == "adafactor":
        return {"adafactor": torch.optim.Adafactor(parameters, lr=0.01)}
    return {"factored": Factored(parameters)}


def _train_all(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], steps: Sequence[int]) -> None:
    for number in steps:
        model.zero_grad()
        model(models.batch(number)).square().sum().backward()
        for each in optimizers.values():
            each.step()


def save_optimizer(world: World | None, path: str, kind: str, layout: str) -> dict[str, object]:
    model = _over(models.net(1), layout)
    optimizers = _optimizers(kind, model)
    _train_all(model, optimizers, [1, 2])
    holdfast.save(path, {"model": model, **optimizers}, process_group=_group(world))
    return {"digests": [_digests(model, each) for each in optimizers.values()]}


def load_optimizer(world: World | None, path: str, kind: str, layout: str, stepped: bool) -> dict[str, object]:
    model = _over(models.net(2), layout)
    optimizers = _optimizers(kind, model)
    if stepped:
        _train_all(model, optimizers, [9])
    holdfast.load(path, {"model": model, **optimizers}, process_group=_group(world))
    found = [_digests(model, each) for each in optimizers.values()]
    _train_all(model, optimizers, [3])
    return {"digests": found}


def refuse_local_rows(world: World, path: str) -> str:
    model = _over(models.net(1), "fsdp2")
    optimizer = LocalRows(list(model.parameters()))
    model(models.batch(1)).square().sum().backward()
    optimizer.step()
    return _refusal(lambda: holdfast.save(path, {"model": model, "optimizer": optimizer}))


def _scheduled(layout: str, seed: int) -> dict[str, object]:
    model = _over(models.net(seed), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def _said(state: Mapping[str, object]) -> dict[str, object]:
    scheduler, scaler, optimizer = state["scheduler"], state["scaler"], state["optimizer"]
    assert isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert isinstance(optimizer, torch.optim.Optimizer)
    values = {key: value for key, value in scheduler.state_dict().items() if isinstance(value, int | float)}
    return {"scheduler": values, "scaler": scaler.state_dict(), "lr": optimizer.param_groups[0]["lr"]}


def save_scheduled(world: World, path: str, layout: str) -> dict[str, object]:
    state = _scheduled(layout, 1)
    model, optimizer, scheduler, scaler = state.values()
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR)
    for number in (1, 2):
        optimizer.zero_grad()
        scaler.scale(model(models.batch(number)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    holdfast.save(path, state)
    return _said(state)


def load_scheduled(world: World, path: str, layout: str) -> dict[str, object]:
    state = _scheduled(layout, 2)
    holdfast.load(path, state)
    return _said(state)


# ------------------------------------------------------------------------------------------------- FSDP1


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
    wrapped = _over(model, layout)
    return wrapped, inner, torch.optim.Adagrad(wrapped.parameters(), lr=0.05)


def _step_counting(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(3, 6, generator=torch.Generator().manual_seed(number))).square().sum().backward()
    optimizer.step()


def save_counting(world: World | None, path: str, layout: str) -> dict[str, object]:
    model, inner, optimizer = _counting(1, layout)
    _step_counting(model, optimizer, 1)
    state = {"model": model, "optimizer": optimizer}
    holdfast.save(path, state, process_group=_group(world))
    return {"calls": inner.calls, "digests": _digests(model, optimizer)}


def load_counting(world: World | None, path: str, layout: str) -> dict[str, object]:
    """Load, step on, and save again: ranks that hold nothing of a parameter must not hold a count that stood still."""
    model, inner, optimizer = _counting(2, layout)
    state = {"model": model, "optimizer": optimizer}
    holdfast.load(path, state, process_group=_group(world))
    found = {"calls": inner.calls, "digests": _digests(model, optimizer)}
    _step_counting(model, optimizer, 2)
    again = f"{path}-again-{layout}-{world.size if world else 1}"
    holdfast.save(again, state, process_group=_group(world))
    model, inner, optimizer = _counting(3, layout)
    holdfast.load(again, {"model": model, "optimizer": optimizer}, process_group=_group(world))
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
    said = {"flat": _refusal(lambda: holdfast.save(f"{path}-flat", {"model": flat}))}
    said["flat parameter"] = _refusal(lambda: holdfast.save(f"{path}-flat", {"p": next(flat.parameters())}))
    model = FullyShardedDataParallel(models.net(1), use_orig_params=True, **options)
    with FullyShardedDataParallel.summon_full_params(model):
        said["whole"] = _refusal(lambda: holdfast.save(f"{path}-whole", {"model": model}))
    said["alone"] = _refusal(lambda: holdfast.save(f"{path}-alone", {"model": model}, process_group=False))
    columns = nn.Linear(6, 6)
    columns.weight = nn.Parameter(columns.weight.detach().t())
    strided = FullyShardedDataParallel(columns, use_orig_params=True, **options)
    said["strided"] = _refusal(lambda: holdfast.save(f"{path}-strided", {"model": strided}))
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
    saved = {_clean(name): digest(each) for name, each in model.named_parameters()}
    loaded = {name: digest(each) for name, each in anew.named_parameters()}
    return {name: f"{saved[name]} {loaded[name]}" for name in saved if saved[name] != loaded[name]}


# ------------------------------------------------------------------------------------- tensors by hand


def sharded_tensors(world: World, path: str) -> dict[str, object]:
    """Two ranks hold a checkerboard of four boxes, as a ShardedTensor, at every place where one may stand."""
    whole = torch.arange(42, dtype=torch.float32).view(7, 6)
    boxes = [[(0, 0, 5, 3), (5, 3, 2, 3)], [(5, 0, 2, 3), (0, 3, 5, 3)]][world.rank]

    def made(source: Tensor) -> object:
        local = [
            LocalShard(
                source[row : row + height, column : column + width].clone(),
                ShardMetadata(
                    shard_offsets=[row, column], shard_sizes=[height, width], placement=f"rank:{world.rank}/cpu"
                ),
            )
            for row, column, height, width in boxes
        ]
        return init_from_local_shards(local, *whole.shape)

    def held(value: object) -> list[str]:
        return [digest(shard.tensor) for shard in value.local_shards()]  # type: ignore[attr-defined]

    saved = {"weight": made(whole), "inside": [made(whole + 1), 1]}
    holdfast.save(path, saved)
    empty = torch.zeros_like(whole)
    inside = made(empty)
    back: dict[str, object] = {"weight": made(empty), "inside": [inside, 0]}
    holdfast.load(path, back)
    plain: dict[str, object] = {"weight": empty.clone(), "inside": [empty.clone(), 0]}
    holdfast.load(path, plain)
    weight = plain["weight"]
    assert isinstance(weight, Tensor)
    kept = back["inside"]
    assert isinstance(kept, list)
    return {
        "same": held(back["weight"]) == held(saved["weight"]),
        "inside": held(kept[0]) == held(saved["inside"][0]) and kept[1] == 1,  # type: ignore[index]
        "in place": kept[0] is inside,
        "whole": bool(torch.equal(weight, whole)),
    }


def refuse_plain_under_two_meshes(world: World, path: str) -> str:
    """Tensor parallel inside FSDP2, where norms are left plain: a shard on each of two meshes that do not meet."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = models.net(1)
    layouts._tensor_parallel(model, mesh["tp"])
    layouts._fsdp2(model, mesh["dp"])
    return _refusal(lambda: holdfast.save(path, {"model": model}))


# -------------------------------------------------------------------------------- several jobs, own values


def actor_and_critic(world: World, path: str) -> dict[str, object]:
    """Two jobs in one world, each with its own ranks, model, manager and steps, saving and loading at once."""
    ranks = [0, 1] if world.rank < 2 else [2, 3]
    groups = {0: dist.new_group([0, 1]), 2: dist.new_group([2, 3])}
    group = groups[ranks[0]]
    role = "actor" if world.rank < 2 else "critic"

    def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1 if role == "critic" else 3))
        fully_shard(model, mesh=init_mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    init_mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    model, optimizer = built(1)
    manager = holdfast.CheckpointManager(f"{path}/{role}", process_group=group)
    for step in range(1, 4 if role == "actor" else 6):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        manager.save(step, {"model": model, "optimizer": optimizer, "role": role}).wait()
    saved = models.of_module(model, optimizer)
    model, optimizer = built(2)
    state: dict[str, object] = {"model": model, "optimizer": optimizer, "role": ""}
    step = manager.load(state)
    manager.close()
    return {
        "role": state["role"],
        "step": step,
        "same": models.of_module(model, optimizer) == saved,
        "steps": manager.steps(),
    }


def _draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Loader:
    """A data loader with a place of its own on every rank."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, object]) -> None:
        position = state["position"]
        assert isinstance(position, int)
        self.position = position


def save_own(world: World, path: str) -> list[float]:
    random.seed(world.rank)
    np.random.seed(world.rank)
    torch.manual_seed(world.rank)
    _draws()
    state = {
        "rng": holdfast.RngState(),
        "loader": holdfast.PerRank(Loader(100 + world.rank), resize="first"),
        "shard": holdfast.PerRank([world.rank, "text"]),
    }
    holdfast.save(path, state)
    return _draws()


def load_own(world: World, path: str) -> dict[str, object]:
    loader, shard = holdfast.PerRank(Loader(0)), holdfast.PerRank(None)
    holdfast.load(path, {"rng": holdfast.RngState(), "loader": loader, "shard": shard})
    assert isinstance(loader.value, Loader)
    return {"draws": _draws(), "position": loader.value.position, "shard": shard.value}


def load_own_resized(world: World, path: str) -> dict[str, object]:
    """Three ranks take what two saved."""
    holdfast.load(path, {"rng": holdfast.RngState()}, only=["rng"])
    draws = _draws()
    first = holdfast.PerRank(Loader(0), resize="first")
    holdfast.load(path, {"loader": first}, only=["loader"])
    assert isinstance(first.value, Loader)

    def summed(values: Sequence[object], rank: int, ranks: int) -> object:
        return [values, rank, ranks]

    made = holdfast.PerRank(None, resize=summed)
    holdfast.load(path, {"shard": made}, only=["shard"])
    try:
        holdfast.load(path, {"shard": holdfast.PerRank(None)}, only=["shard"])
    except CheckpointError as error:
        refused = f"{type(error).__name__}: {error}"
    else:
        refused = ""
    holdfast.load(path, {"rng": holdfast.RngState()}, only=["rng"])
    return {"draws": draws, "again": _draws(), "first": first.value.position, "made": made.value, "refused": refused}
