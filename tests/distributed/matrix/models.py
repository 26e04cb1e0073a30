"""One model function for every layout, its optimizer, and digests of whole tensors that use nothing of Holdfast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.support.small_networks import digest

Part = tuple[NDArray[np.generic], int | Sequence[int]]
"""What a rank has of a tensor, and where that is."""

_RANK = 1 << 32
_holders_of: dict[tuple[DeviceMesh, tuple[Placement, ...], torch.Size], Tensor] = {}

VOCABULARY, WIDTH, HIDDEN, EXPERTS, CLASSES = 11, 6, 10, 4, 3


class Block(nn.Module):
    """A feed-forward block; one parameter of a single element, which most ranks hold nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Experts stacked along the first dimension; on a mesh of their own, each rank runs the ones it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) * 0.3)
        self.back = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        split = isinstance(self.weight, DTensor) and self.weight.device_mesh.mesh_dim_names == ("ep",)
        weight, back = (each.to_local() if split else each for each in (self.weight, self.back))
        out = torch.einsum("teh,ehw->tw", torch.relu(torch.einsum("tw,ewh->teh", x, weight)), back)
        return x + (collectives.all_reduce(out) if split else out)


class Net(nn.Module):
    """Blocks, experts and a head, in dimensions that few numbers of ranks divide, with two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.full((), 0.5))
        self.register_buffer("seen", torch.arange(VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks.values():
            y = block(y)
        return self.head(self.experts(y)) * self.scale


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def adamw(parameters: Iterable[tuple[Tensor, int]]) -> torch.optim.AdamW:
    """Return AdamW with two groups of different hyperparameters.

    Args:
        parameters: Each with the number of dimensions of the whole tensor, which decides its group.
    """
    wide: list[Tensor] = []
    narrow: list[Tensor] = []
    for parameter, dimensions in parameters:
        (wide if dimensions > 1 else narrow).append(parameter)
    groups = [
        {"params": wide, "lr": 0.05, "weight_decay": 0.1},
        {"params": narrow, "lr": 0.01, "weight_decay": 0.0, "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def batch(number: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (7,), generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for number in steps:
        optimizer.zero_grad()
        loss = model(batch(number)).square().sum()
        loss.backward()
        optimizer.step()


def step_with_made_up_gradients(
    parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer, steps: Sequence[int]
) -> None:
    """Step with gradients made element by element, for layouts whose forward is their owner's own code.

    Of local parts: a DTensor looks up first how to split each operation.
    """
    for number in steps:
        for each in parameters:
            part = each.detach().to_local() if isinstance(each, DTensor) else each.detach()
            gradient = (part * (number + 0.7) + 0.1 * number).sin()
            if isinstance(each, DTensor):
                gradient = DTensor.from_local(
                    gradient, each.device_mesh, each.placements, run_check=False, shape=each.shape, stride=each.stride()
                )
            each.grad = gradient
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole; a collective for a DTensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def of_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return digests of every tensor and group of a module and its optimizer; a collective where there are DTensors."""
    groups: dict[str, str] = {}
    tensors: dict[str, Tensor] = dict(model.state_dict())
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, group in members(optimizer):
        groups[f"{names[parameter]}/group"] = hyperparameters(group)
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{names[parameter]}/{key}"] = value
    return groups | {name: digest(tensor) for name, tensor in wholes(tensors).items()}


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors whole. One collective for each dimension of a mesh: `full_tensor` takes milliseconds a tensor."""
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    meshes: dict[DeviceMesh, dict[str, DTensor]] = {}
    for name, tensor in found.items():
        if isinstance(tensor, DTensor):
            meshes.setdefault(tensor.device_mesh, {})[name] = tensor
    for mesh, laid in meshes.items():
        parts = [{name: (each.to_local().numpy(), _place(each)) for name, each in laid.items()}]
        for dimension in range(mesh.ndim):
            everybody: list[list[dict[str, Part]]] = [[]] * mesh.size(dimension)
            dist.all_gather_object(everybody, parts, group=mesh.get_group(dimension))
            parts = [part for rank in everybody for part in rank]
        for name, each in laid.items():
            found[name] = torch.zeros(each.shape, dtype=each.dtype)
            held = torch.zeros(each.shape, dtype=torch.bool)
            for local, place in (part[name] for part in parts):
                if isinstance(place, int):
                    holders = _holders(each)
                    region: Tensor | tuple[slice, ...] = holders // _RANK == place
                    found[name][region] = torch.from_numpy(local).flatten()[holders[region] % _RANK]
                else:
                    ends = [first + length for first, length in zip(place, local.shape, strict=True)]
                    region = tuple(slice(*bounds) for bounds in zip(place, ends, strict=True))
                    found[name][region] = torch.from_numpy(local)
                held[region] = True
            assert held.all(), f"{name}: nobody holds {(~held).sum()} elements"
    return found


def _place(tensor: DTensor) -> int | Sequence[int]:
    """Return where the local part of a tensor is: its first element, or the rank if it is not in one piece."""
    if all(type(each) in (Shard, Replicate) for each in tensor.placements):
        return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    return dist.get_rank()


def _holders(tensor: DTensor) -> Tensor:
    """Return for each element the rank that has it, times `_RANK`, plus its number there: as `full_tensor` says.

    A collective, at the first tensor of a layout.
    """
    key = tensor.device_mesh, tensor.placements, tensor.shape
    if key not in _holders_of:
        local = tensor.to_local()
        numbers = torch.arange(local.numel()).view(local.shape) + dist.get_rank() * _RANK
        laid = DTensor.from_local(
            numbers, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        _holders_of[key] = laid.full_tensor()
    return _holders_of[key]


def members(optimizer: torch.optim.Optimizer) -> Iterable[tuple[Tensor, Mapping[str, object]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, group


def hyperparameters(group: Mapping[str, object]) -> str:
    return repr({key: value for key, value in group.items() if key not in ("params", "param_names")})


def gathered(mine: Mapping[str, tuple[Tensor, int]], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Put flat runs of all ranks together, by name; elements that nobody holds stay NaN.

    Args:
        mine: This rank's run of each tensor and the number of its first element.
        shapes: Whole shapes.
    """
    everybody: list[dict[str, tuple[Tensor, int]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dict(mine))
    tensors = {name: torch.full((torch.Size(shape).numel(),), float("nan")) for name, shape in shapes.items()}
    for runs in everybody:
        for name, (run, start) in (runs or {}).items():
            tensors[name][start : start + run.numel()] = run
    return {name: tensor.view(tuple(shapes[name])) for name, tensor in tensors.items()}


def laid_end_to_end(mine: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the runs of every rank of a group joined in the order of ranks, which is how FSDP1 cuts."""
    everybody: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everybody, dict(mine), group=group)
    names = sorted({name for runs in everybody for name in runs})
    return {name: torch.cat([runs[name] for runs in everybody if name in runs]) for name in names}
