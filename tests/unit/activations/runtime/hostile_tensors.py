"""Tensors that are hard to pack: numbers at the edges of their types, odd sizes, odd strides."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (0, 1, 2, 7, 8, 9, 128, 255, 256, 257, 511, 1000, 4096, 5003)
CONTENTS = (
    "normal", "channels", "heavy", "nan", "infinite", "all nan", "all infinite", "zero", "minus zero", "denormal",
    "tiny", "huge", "largest", "mixed scales", "sparse", "two values", "constant", "one spike", "uniform",
)  # fmt: skip
SHAPES = ("flat", "scalar", "matrix", "permuted", "channels last", "length 1")


def _content(kind: str, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    info = torch.finfo(dtype)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    some = torch.rand(count, generator=generator) < 0.02
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan], dtype=torch.float64)
    match kind:
        case "channels":
            values[::64] *= 60
        case "heavy":
            values = values / torch.randn(count, generator=generator, dtype=torch.float64)
        case "nan":
            values[some] = torch.nan
        case "infinite":
            values[some] = odd[torch.randint(4, (int(some.sum()),), generator=generator)]
        case "all nan":
            values.fill_(torch.nan)
        case "all infinite":
            values = values.sign() * torch.inf
        case "zero":
            values.zero_()
        case "minus zero":
            values = -(some.double()) * 0
        case "denormal":
            values *= info.smallest_normal / 8
        case "tiny":
            values *= info.smallest_normal * 100
        case "huge":
            values *= min(1e30, info.max / 64)
        case "largest":
            values = values.sign() * info.max
        case "mixed scales":
            values *= 10.0 ** torch.randint(-4, 4, (count,), generator=generator).double()
        case "sparse":
            values[torch.rand(count, generator=generator) < 0.9] = 0
        case "two values":
            values = (values > 0).double() / 0.9
        case "constant":
            values.fill_(-3.25)
        case "one spike":
            values[: min(1, count)] = 1e4
        case "uniform":
            values = torch.rand(count, generator=generator, dtype=torch.float64)
    return values.to(dtype)


def _shaped(flat: torch.Tensor, shape: str, generator: torch.Generator) -> torch.Tensor:
    count = len(flat)
    width = next(each for each in (16, 9, 8, 7, 5, 1) if count % each == 0)
    match shape:
        case "scalar" if count:
            return flat[count // 2]
        case "matrix":
            return flat.view(-1, width) if count else flat.view(0, 3)
        case "permuted" if count:
            return flat.view(width, 1, -1).permute(2, 0, 1)
        case "channels last" if count:
            return flat.view(1, width, -1, 1).permute(0, 2, 1, 3)
        case "length 1" if count:
            return flat.as_strided((1, count, 1), (17, 1, 3))
    return flat


def hostile_tensor(seed: int, dtype: torch.dtype | None = None) -> tuple[str, torch.Tensor]:
    """Return a dense tensor that the seed chooses, with its description."""
    generator = torch.Generator().manual_seed(seed)

    def pick(length: int) -> int:
        return int(torch.randint(length, (), generator=generator))

    dtype = dtype or DTYPES[pick(3)]
    kind, count, shape = CONTENTS[pick(len(CONTENTS))], COUNTS[pick(len(COUNTS))], SHAPES[pick(len(SHAPES))]
    tensor = _shaped(_content(kind, count, dtype, generator), shape, generator)
    return f"seed {seed}: {kind} {dtype} {tuple(tensor.shape)} {tensor.stride()}", tensor


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether size, strides, dtype, device and all bits are equal."""
    is_laid_out = one.shape == other.shape and one.stride() == other.stride()
    is_laid_out &= one.dtype == other.dtype and one.device == other.device
    return is_laid_out and bytes_of(one) == bytes_of(other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
