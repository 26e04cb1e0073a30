"""Random modules, random columns for their traces, and packs that come back exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from holdfast.activations.profile.unit_profile import UnitColumn
from holdfast.activations.runtime.traced import UnitTrace

WIDTH, LENGTH, ROWS = 8, 4, 4


class SavesOutput(torch.autograd.Function):
    """exp, with its output saved; and a number that is no tensor."""

    @staticmethod
    def forward(ctx, x, scale):
        y = (x * scale).tanh()
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y) * ctx.scale, None


class SavesBoth(torch.autograd.Function):
    """A product and a sum: two inputs saved, two outputs."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        return first * y + second, first * x + second


class RandomUnit(nn.Module):
    """A straight line of random ops on tensors of one shape."""

    def __init__(self, seed: int, steps: int = 9) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(LENGTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("constant", torch.rand(WIDTH) + 0.5)
        self.program = [(rng.choice(KINDS), rng.random(), rng.randrange(3), rng.random()) for _ in range(steps)]
        self.returns_two = rng.random() < 0.2

    def forward(self, x, y=None):
        made = [x] if y is None else [x, y]
        for kind, chance, number, _ in self.program:
            first = made[-1] if chance < 0.7 else made[int(chance * 1000) % len(made)]
            other = made[int(chance * 977) % len(made)]
            made.append(kind(self, first, other, number, chance).to(x.dtype))
        if self.returns_two:
            return made[-1], made[-2] * 2
        return made[-1]


Kind = Callable[[RandomUnit, torch.Tensor, torch.Tensor, int, float], torch.Tensor]
KINDS: list[Kind] = []


def kind(function: Kind) -> Kind:
    KINDS.append(function)
    return function


@kind
def linear(unit, x, other, number, chance):
    return unit.linears[number](x)


@kind
def linear_again(unit, x, other, number, chance):
    return x + unit.linears[number](functional.gelu(unit.linears[number](x)))


@kind
def product(unit, x, other, number, chance):
    return torch.matmul(x, other.transpose(-1, -2)) @ x


@kind
def normed(unit, x, other, number, chance):
    return unit.norm(x) if number else functional.rms_norm(x, (WIDTH,), unit.scale.to(x.dtype))


@kind
def pointwise(unit, x, other, number, chance):
    return (torch.tanh, functional.gelu, torch.sigmoid)[number](x) + other


@kind
def scaled(unit, x, other, number, chance):
    return x * unit.scale * unit.constant


@kind
def of_weights(unit, x, other, number, chance):
    return x @ (unit.linears[number].weight * unit.scale).softmax(-1)


@kind
def chain_in_place(unit, x, other, number, chance):
    made = x * 1.5
    made.mul_(0.7).add_(other)
    return made.sigmoid_() if number else functional.relu(made, inplace=True)


@kind
def early_read(unit, x, other, number, chance):
    made = unit.linears[number](x)
    read = made.sum(-1, keepdim=True)
    made.add_(read)
    return made.tanh()


@kind
def slices(unit, x, other, number, chance):
    made = torch.zeros_like(x)
    made[..., :3] = x[..., 3:6]
    made[..., 3:] = other[..., 3:].tanh()
    return made * x if number else made.exp_().neg()


@kind
def views(unit, x, other, number, chance):
    turned = x.transpose(0, 1).reshape(LENGTH, ROWS, 2, WIDTH // 2).permute(1, 0, 3, 2)
    return turned.reshape(ROWS, LENGTH, WIDTH) + other.flip(0)


@kind
def parts(unit, x, other, number, chance):
    a, b = x.chunk(2, -1)
    values, places = x.topk(2, -1)
    return torch.cat([a * b.sigmoid(), b.cos()], -1) + values.sum(-1, keepdim=True) * (places.sum() % 3)


@kind
def dropout(unit, x, other, number, chance):
    if number == 0:
        return functional.dropout(x.sin(), 0.4, training=unit.training, inplace=True)
    return functional.dropout(x, 0.3, unit.training) if number == 1 else functional.alpha_dropout(x, 0.2, unit.training)


@kind
def noise(unit, x, other, number, chance):
    if number == 0:
        return x * torch.rand_like(other) + torch.rand_like(x)
    if number == 1:
        return x * torch.bernoulli(torch.full_like(x, 0.6)) + torch.randn(WIDTH)
    return x + torch.empty_like(x).uniform_(-1, 1) * other


@kind
def without_gradients(unit, x, other, number, chance):
    with torch.no_grad():
        size = (other * other).mean(-1, keepdim=True).sqrt() + 1
        drawn = torch.rand_like(size) if number else size
    return x / size * (1 + drawn)


@kind
def function(unit, x, other, number, chance):
    return SavesOutput.apply(x, 0.5 + chance)


@kind
def functions(unit, x, other, number, chance):
    first, second = SavesBoth.apply(x, other)
    return first.sin() if number == 0 else second.sin() if number == 1 else first + second


@kind
def batch_normed(unit, x, other, number, chance):
    made = unit.batch_norm(x)
    return made if number else made.tanh() * other


@kind
def buffered(unit, x, other, number, chance):
    with torch.no_grad():
        before = unit.average * 1.0 if number else 0.5
        unit.average.mul_(0.9).add_(x.mean((0, 1)).to(unit.average.dtype), alpha=0.1)
    return x * (unit.average + 1) + before


@kind
def attention(unit, x, other, number, chance):
    heads = [each.reshape(ROWS, LENGTH, 2, WIDTH // 2).transpose(1, 2) for each in (x, other, x + other)]
    drop = 0.2 if number == 0 and unit.training else 0.0
    made = functional.scaled_dot_product_attention(*heads, is_causal=number == 1, dropout_p=drop)
    return made.transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)


@kind
def branch(unit, x, other, number, chance):
    if x.sum() > 0:
        return x * 1.25 + other.cos()
    return x * 0.75 + other.cos() if number else x.sin() * other


@kind
def value(unit, x, other, number, chance):
    return x * float(other.detach().mean().tanh()) + torch.tensor([0.5] * WIDTH)


@kind
def indexed(unit, x, other, number, chance):
    if number == 0:
        return x[:, torch.arange(LENGTH - 1, -1, -1)] * other
    if number == 1:
        return x.masked_fill(other > 0.5, 0.25) + torch.where(other > 0, x, other)
    return functional.embedding(other.argmax(-1), unit.linears[0].weight) + x.cumsum(-1) / 4


@kind
def detached(unit, x, other, number, chance):
    return x + (x.detach() * 2 - other.detach()).exp().clamp(max=2.0)


@dataclass
class Cloned:
    """An exact pack: a copy."""

    copied: torch.Tensor
    device_bytes: int = 0
    reserved_bytes: int = 0

    def unpack(self) -> torch.Tensor:
        made = torch.empty_strided(self.copied.shape, self.copied.stride(), dtype=self.copied.dtype)
        return made.copy_(self.copied)


def packs(seed: int, overflow: float) -> Callable[[torch.Tensor, int], Cloned | None]:
    """Copies as packs; some of them overflow."""
    rng = random.Random(seed)

    def pack(tensor: torch.Tensor, group: int) -> Cloned | None:
        assert not tensor.requires_grad
        if rng.random() < overflow:
            return None
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return Cloned(copied.copy_(tensor))

    return pack


def column(store: dict[int, str], run: set[int], draw: set[int] = frozenset()) -> UnitColumn:
    return UnitColumn(tuple(sorted(store.items())), tuple(sorted(run)), tuple(sorted(draw)), 0, 0.0, 0, 0, False)


def needed_by(trace: UnitTrace) -> set[int]:
    return {op.group for op in trace.ops[1:] if op.is_needed}


def keep_all(trace: UnitTrace) -> UnitColumn:
    return column(dict.fromkeys(needed_by(trace), "keep"), set())


def run_with(trace: UnitTrace, stored: set[int], *, wanted: set[int] | None = None) -> set[int]:
    """Groups that a replay runs, with all that they read and that is not given."""
    run: set[int] = set()
    ahead = list((needed_by(trace) - stored) | {op.number for op in trace.ops if op.has_value} | (wanted or set()))
    while ahead:
        group = ahead.pop()
        if group and group not in run:
            run.add(group)
            reads = {read for op in trace.ops if op.group == group for read in op.reads}
            ahead += [each for each in reads if not (each in stored and trace.ops[each].is_storable)]
    return run


def random_column(trace: UnitTrace, rng: random.Random) -> UnitColumn:
    """A random valid choice for a trace."""
    barred = {op.group for op in trace.ops if op.has_effect}
    needed = needed_by(trace)
    share = rng.choice([0.0, 0.3, 0.6, 0.9])
    stored = {group for group in needed if rng.random() < share}
    while not trace.why_not:
        run = run_with(trace, stored)
        if not run & barred:
            packed: set[int] = set()
            for group in sorted(stored):
                again = run_with(trace, stored - packed - {group}, wanted=packed | {group})
                if trace.ops[group].is_storable and rng.random() < 0.4 and not again & barred:
                    packed.add(group)
            return column({group: "copy" if group in packed else "keep" for group in stored}, run)
        left = sorted(needed - stored)
        if not left:
            break
        stored.add(rng.choice(left))
    return keep_all(trace)
