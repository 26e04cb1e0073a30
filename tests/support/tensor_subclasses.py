"""A tensor that is quantised by blocks, an optimizer that keeps its moments in such tensors, and one nested in another.

Real classes of the kind that torchao has, without its operations: they are read by `dequantized`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

BLOCK = 4


class Rounding(Enum):
    """What a context may hold beside plain values."""

    NEAREST = 1
    DOWN = 2


class Options(NamedTuple):
    """Options of a quantised weight."""

    rounding: Rounding = Rounding.NEAREST
    dtype: torch.dtype = torch.float32


class Blocks(torch.Tensor):
    """8-bit codes of the tensor's shape, a scale for each block of `BLOCK` in row-major order, and a constant."""

    codes: torch.Tensor
    scale: torch.Tensor
    qmap: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, context: dict[str, Any]) -> Blocks:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, context: dict[str, Any]) -> None:
        self.codes, self.scale, self.qmap, self.context = codes, scale, qmap, context

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale", "qmap"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: dict[str, Any], *_: object) -> Blocks:
        return cls(inner["codes"], inner["scale"], inner["qmap"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.view.default, aten._to_copy.default):
            held = args[0]
            return cls(held.codes.detach(), held.scale.detach(), held.qmap.detach(), held.context)
        plain = tree_map(lambda each: each.dequantized() if isinstance(each, cls) else each, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def dequantized(self) -> torch.Tensor:
        by_block = self.codes.float().reshape(-1, BLOCK) * self.scale.reshape(-1, 1)
        return by_block.reshape(self.codes.shape) + self.qmap[0]

    def store(self, value: torch.Tensor) -> None:
        """Quantise a tensor into the inner tensors."""
        by_block = value.reshape(-1, BLOCK)
        self.scale.copy_(by_block.abs().amax(1) / 127 + 1e-12)
        self.codes.copy_((by_block / self.scale.reshape(-1, 1)).round().reshape(value.shape))


class OptimState8bit(Blocks):
    """Stands for the class of torchao, whose inner tensors are known to follow the elements."""


OptimState8bit.__module__ = "torchao.optim"


def blocks_of(value: torch.Tensor, kind: type[Blocks] = Blocks, **context: Any) -> Blocks:
    """Return a tensor in blocks."""
    codes, scale = torch.zeros(value.shape, dtype=torch.int8), torch.zeros(value.numel() // BLOCK)
    made = kind(codes, scale, torch.zeros(2), {"block": BLOCK, **context})
    made.store(value.detach())
    return made


class Pair(torch.Tensor):
    """A tensor in blocks, and what the blocks lose."""

    def __new__(cls, coarse: torch.Tensor, rest: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, rest.shape, dtype=rest.dtype, device=rest.device)

    def __init__(self, coarse: torch.Tensor, rest: torch.Tensor) -> None:
        self.coarse, self.rest = coarse, rest

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["coarse", "rest"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> Pair:
        return cls(inner["coarse"], inner["rest"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.view.default):
            return cls(args[0].coarse, args[0].rest)
        raise NotImplementedError(func)


class Momentum(torch.optim.Optimizer):
    """SGD with a momentum in blocks, which the first step makes."""

    kind = Blocks

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                state = self.state[parameter]
                if not state:
                    made: torch.Tensor = blocks_of(torch.zeros_like(local), self.kind)
                    if isinstance(parameter, DTensor):
                        made = DTensor.from_local(
                            made, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                            stride=parameter.stride(),
                        )  # fmt: skip
                    state["momentum"] = made
                kept = state["momentum"]
                blocks = kept.to_local() if isinstance(kept, DTensor) else kept
                blocks.store(blocks.dequantized() * 0.9 + grad)
                local -= group["lr"] * blocks.dequantized()


class KnownMomentum(Momentum):
    """One of which the moments may be split anew."""

    kind = OptimState8bit
