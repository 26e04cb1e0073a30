"""Small models of awkward shapes, trained a little so that optimizers have state, and their digests."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 13)
        self.down = nn.Linear(13, width, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Nested blocks whose dimensions no small number of ranks divides, one of them of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y) * self.scale


class NormNet(nn.Module):
    """A model with BatchNorm, whose buffers differ by rank under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def sharded(seed: int, mesh: DeviceMesh | None = None) -> Net:
    torch.manual_seed(seed)
    net = Net()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def plain(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def adamw(net: nn.Module) -> torch.optim.AdamW:
    """AdamW with two groups of different rates, as decay and no-decay parameters usually have."""
    wide = [each for each in net.parameters() if each.ndim > 1]
    narrow = [each for each in net.parameters() if each.ndim <= 1]
    groups = [{"params": wide, "lr": 0.05, "weight_decay": 0.1}, {"params": narrow, "lr": 0.01, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, *, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        batch = torch.randint(0, 11, (6,), generator=random)
        net(batch).square().sum().backward()
        optimizer.step()


def digest(tensor: Tensor) -> str:
    """Return dtype, shape and a digest of all bytes of a tensor; whole, wherever its parts lie (a collective)."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    whole = whole.resolve_conj().resolve_neg().contiguous()
    content = hashlib.sha256(whole.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return f"{str(whole.dtype).removeprefix('torch.')} {tuple(whole.shape)} {content}"


def digests(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, str]:
    """Return the digest of every tensor of a model and its optimizer, by name; nothing of Holdfast is used."""
    found = {name: digest(tensor) for name, tensor in net.state_dict().items()}
    if optimizer is None:
        return found
    names = {parameter: name for name, parameter in net.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            found[f"{name}/group"] = repr({key: value for key, value in group.items() if key != "params"})
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = digest(value)
    return found
