"""What ranks do in the tests of `holdfast.data`: they train on real loaders, and say which samples they had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import holdfast
from holdfast.data import Batches, Loader
from tests.support.gloo_worlds import World

# ------------------------------------------------------------------------------------------------- lives

N, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 61, 12, 2, 2
STEPS = 12
"""Steps of both epochs; the last of each has one sample."""


class Numbers:
    """Samples that say which they are."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(float(index))}


def dataset_of(kind: str) -> Any:
    if kind != "datasets":
        return Numbers()
    import datasets

    return datasets.Dataset.from_dict({"x": [float(each) for each in range(N)]}).with_format("torch")


def micro_batches(kind: str, data: Batches, workers: int) -> Iterator[tuple[int, bool, list[int]]]:
    """Yield the step of each micro-batch, whether the step ends with it, and its samples that count."""
    if isinstance(data, Loader):
        for step in data.steps(EPOCHS):
            for number, (batch, weight) in enumerate(step, 1):
                yield step.number, number == len(step), [int(each) for each in batch["x"]] if weight else []
        return
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as Kind
    else:
        Kind = DataLoader
    loader = Kind(Numbers(), batch_sampler=data, num_workers=workers)
    while (position := data._draws.epochs.settled(data._position)).epoch < EPOCHS:
        parts = data._draws.parts(data._draws.epochs.size(position))
        number = 0
        for batch in loader:
            part = parts[number]
            number += 1
            yield position.steps + 1, number == len(parts), [] if part.is_repeat else [int(each) for each in batch["x"]]
            if number == len(parts):
                number, position = 0, data._draws.epochs.after(position)
                if position.samples < N:
                    parts = data._draws.parts(data._draws.epochs.size(position))


def trained(world: World, root: str, kind: str, workers: int, differential: bool, log: str, launch: int) -> int:
    """Train both epochs from the newest step; write a line for each step that the optimizer took.

    Returns:
        The step at which this life began.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
    options: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "seed": 4}
    data = (
        Loader(dataset_of(kind), num_workers=workers, **options)
        if kind in ("loader", "datasets")
        else Batches(N, **options)
    )
    state = {"model": model, "optimizer": optimizer, "data": data}
    with holdfast.CheckpointManager(root, every=2, differential=differential) as manager:
        begun = manager.load(state) or 0
        with Path(f"{log}.{world.rank}").open("a", encoding="utf-8") as lines:
            had: list[int] = []
            for step, ends, samples in micro_batches(kind, data, workers):
                had += samples
                wrapped(torch.ones(1, 1)).sum().backward()
                if not ends:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                lines.write(json.dumps([launch, begun, step, had]) + "\n")
                lines.flush()
                had = []
                manager.maybe_save(step, state)
    return begun


# ------------------------------------------------------------------------------------------------- meshes

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]] = {
    "tp2-dp2": ((2, 2), ("tp", "dp"), ("dp",)),
    "dp4": ((4,), ("dp",), ("dp",)),
    "tp4": ((1, 4), ("dp", "tp"), ("dp",)),
    "hsdp": ((2, 2), ("replicate", "shard"), ("replicate", "shard")),
    "pp2-dp2": ((2, 2), ("pp", "dp"), ("dp",)),
}
"""Shape, names, and the dimensions that hold data."""


def on_mesh(world: World, name: str, root: str, begin: int, end: int) -> dict[str, Any]:
    """Load a step unless it is 0, train some steps on a mesh, and save.

    Returns:
        Coordinate of this rank among the data ranks, and its samples by step.
    """
    shape, names, of_data = MESHES[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data_mesh: DeviceMesh = mesh[of_data]
    weight = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)] * mesh.ndim)
    parameter = torch.nn.Parameter(weight)
    optimizer = torch.optim.SGD([parameter], 0.1)
    options: dict[str, Any] = {"global_batch": 10, "micro_batch": 2, "seed": 9}
    loader = Loader(list(range(37)), mesh=data_mesh, **options)
    state = {"weight": parameter, "data": loader}
    refused = ""
    if mesh.ndim > 1:
        try:
            holdfast.save(f"{root}-refused", {"weight": parameter, "data": Loader(list(range(37)), **options)})
        except holdfast.InvalidError as error:
            refused = str(error)
    if begin:
        holdfast.load(f"{root}/{begin}", state)
    had: dict[int, list[int]] = {}
    for step in loader.steps():
        had[step.number] = [int(each) for batch, counts in step if counts for each in batch]
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        if step.number == end:
            break
    holdfast.save(f"{root}/{end}", state)
    return {"place": [int(each) for each in data_mesh.get_coordinate() or ()], "had": had, "refused": refused}


# ------------------------------------------------------------------------------------------------- loss

LOSS_STEPS = 200
SENTENCES = 83


class Sentences:
    """Rows of 1 to 9 tokens, padded."""

    def __init__(self, dtype: torch.dtype) -> None:
        drawn = torch.Generator().manual_seed(2)
        lengths = torch.randint(1, 10, (SENTENCES,), generator=drawn)
        self.mask = (torch.arange(9) < lengths[:, None]).to(dtype)
        self.tokens = torch.randn(SENTENCES, 9, 4, generator=drawn, dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return SENTENCES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index], self.mask[index]


def losses(
    world: World | None, wrapper: str, dtype_name: str, root: str, begin: int, end: int, way: str = "right"
) -> list[float]:
    """Train some steps from a saved one; return the loss of each step, the mean over its tokens."""
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)
    if world is None:
        trainee = model
    elif wrapper == "ddp":
        trainee = DistributedDataParallel(model)
    else:
        trainee = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    counted = None if way == "samples" else lambda batch: float(batch[1].sum())
    loader = Loader(Sentences(dtype), global_batch=13, micro_batch=3, seed=6, count=counted)
    state = {"model": model, "optimizer": optimizer, "data": loader}
    alone: dict[str, Any] = {"process_group": False} if world is None else {}
    if begin:
        holdfast.load(f"{root}/{begin}", state, **alone)
    found: list[float] = []
    for step in loader.steps():
        total = 0.0
        for (tokens, mask), weight in step:
            if way == "unweighted":
                weight = 1.0 / len(step)
            errors = trainee(tokens).squeeze(-1).square() * mask + 0.1 * trainee(tokens).squeeze(-1) * mask
            loss = errors.sum() / mask.sum() * weight
            loss.backward()
            total += float(loss.detach())
        if world is not None:
            summed = torch.tensor(total, dtype=torch.float64)
            dist.all_reduce(summed)
            total = float(summed) / world.size
        found.append(total)
        optimizer.step()
        optimizer.zero_grad()
        if step.number == end:
            break
    holdfast.save(f"{root}/{end}", state, **alone)
    return found


def weights_of(root: str, dtype_name: str) -> list[Any]:
    """Return the saved weights of a step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.to(getattr(torch, dtype_name))
    holdfast.load(root, {"model": model}, process_group=False)
    return [each.detach().clone() for each in model.parameters()]


def unsplit_by_accelerate(world: World) -> list[int]:
    """Return the samples of this rank's batches after `prepare`."""
    from holdfast.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    batches = Batches(N, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=4, tail="drop")
    loader = accelerator.prepare(DataLoader(list(range(N)), batch_sampler=batches))  # type: ignore[arg-type]
    return [int(each) for batch in loader for each in batch]


def unlike_positions(world: World) -> str:
    """Save positions that differ by rank; return the error."""
    batches = Batches(N, global_batch=GLOBAL_BATCH, seed=4)
    batches.seek(samples=12 * world.rank)
    try:
        holdfast.save(world.scratch / "run", {"data": batches})
    except holdfast.CheckpointError as error:
        return str(error)
    return ""


def outside_of_mesh(world: World) -> str:
    """Name data ranks without this rank, or a mesh and a group; return the error."""
    mesh = DeviceMesh("cpu", [0])
    try:
        Batches(N, global_batch=GLOBAL_BATCH, seed=4, mesh=mesh)
    except holdfast.InvalidError as error:
        return str(error)
    return ""
