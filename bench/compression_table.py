"""Measured ratios by element type and kind of tensor, for docs/compression.md: `python -m bench.compression --table`.

Each state is trained, or made of a trained one in the form that libraries store. It is saved with `compression="on"`,
loaded again and compared. A ratio is the bytes of the tensors ÷ the bytes of the packs, headers included.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

import holdfast
from bench import conditions
from bench.compression_auto import continued
from bench.compression_ratios import zeros_like
from bench.compression_state import (
    PEAK,
    Batches,
    Gpt,
    Schedule,
    State,
    bytes_of,
    made,
    of_kinds,
    path_of,
    split,
)
from bench.compression_store import packs_in
from bench.settings import settings

QUANTISED_BLOCK = 256
"""Elements that share a scale in 8-bit optimizer state, as in bitsandbytes."""

LORA_RANK, LORA_STEPS = 8, 20

Row = tuple[str, str, float]
"""Kind of tensor, element type, ratio."""


def lines(cache: Path, schedule: Schedule) -> list[str]:
    """Measure every row; return the table as Markdown. The trainings of fp16 and bf16 are kept in `cache`."""
    folder = cache / "table"
    shown = ["| state | element type | ratio | bytes stored of 100 |", "|-|-|-|-|"]
    try:
        for kind, dtype, ratio in _rows(cache, schedule, folder):
            shown.append(f"| {kind} | {dtype} | {ratio:.2f} | {100 / ratio:.0f} |")
            print(f"    {kind}, {dtype}: {ratio:.3f}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return shown


def _rows(cache: Path, schedule: Schedule, folder: Path) -> Iterator[Row]:
    last: dict[str, State] = {}
    for name in ("bf16", "fp16"):
        last[name] = load_file(path_of(made(cache / "state", schedule, name), schedule.steps))
        yield from _mixed_rows(last[name], "bfloat16" if name == "bf16" else "float16", folder)
    state = last["bf16"]
    masters = {split(name)[1]: tensor for name, tensor in of_kinds(state, "master").items()}
    yield "weights, no 16-bit copy", "float32", _ratio(of_kinds(state, "master"), folder)
    fp32 = of_kinds(state, "master", "exp_avg", "exp_avg_sq")
    yield "whole state, 12 bytes a parameter", "float32", _ratio(fp32, folder)
    yield "gradients of bf16, in fp32 and clipped", "float32", _ratio(clipped_gradients(state), folder)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        quantised = {f"model.{name}": to_float8(tensor, dtype) for name, tensor in masters.items()}
        yield "weights, one scale a tensor", _name(dtype), _ratio(quantised, folder)
    rows = {f"model.{name}": to_int8(tensor) for name, tensor in masters.items() if tensor.dim() == 2}
    yield "weights, one scale a row", "int8", _ratio(rows, folder)
    for kind, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
        moments = {name: to_dynamic_8bit(tensor, is_signed) for name, tensor in of_kinds(state, kind).items()}
        yield f"8-bit optimizer: {kind}, blocks of {QUANTISED_BLOCK}", "uint8", _ratio(moments, folder)
    yield f"LoRA of rank {LORA_RANK}: many pieces under 64 KiB", "float32", _ratio(trained_adapters(masters), folder)


def _mixed_rows(state: State, dtype: str, folder: Path) -> Iterator[Row]:
    """Yield the rows of a mixed-precision state."""
    weights = of_kinds(state, "weight")
    stored_weights, both = (_stored_bytes(each, folder) for each in (weights, of_kinds(state, "weight", "master")))
    masters = of_kinds(state, "master")
    yield "weights", dtype, bytes_of(weights) / stored_weights
    yield f"masters of {dtype} weights", "float32", bytes_of(masters) / (both - stored_weights)
    for kind in ("exp_avg", "exp_avg_sq"):
        yield f"{kind} beside {dtype} weights", "float32", _ratio(of_kinds(state, kind), folder)
    yield "whole state, 14 bytes a parameter", f"{dtype}, float32", _ratio(state, folder)
    plain = bytes_of(state) / _stored_bytes(state, folder, skip=("model.*",))
    yield "the same, weights left plain", f"{dtype}, float32", plain


def _ratio(state: State, folder: Path) -> float:
    return bytes_of(state) / _stored_bytes(state, folder)


def _stored_bytes(state: State, folder: Path, *, skip: tuple[str, ...] = ()) -> int:
    """Save, load and compare; return the bytes of the packs."""
    shutil.rmtree(folder, ignore_errors=True)
    holdfast.save(folder, state, settings=settings(compression="on", compression_skip=skip))
    target = zeros_like(state)
    holdfast.load(folder, target)
    # As bytes: torch compares no float8.
    conditions.require_equal(*({name: each.view(torch.uint8) for name, each in one.items()} for one in (state, target)))
    return sum(path.stat().st_size for path in packs_in(folder))


# ------------------------------------------------------------------------------- states made of the trained one


def clipped_gradients(state: State) -> State:
    """Return the gradients of one more step: bf16 numbers in fp32, multiplied by the factor of clipping."""
    training = continued(state)
    training.step(Batches(seed=1).next(), PEAK / 10)
    return {f"model.{name}.grad": master.grad for name, master in training.masters.items() if master.grad is not None}


def to_float8(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in 8 bits: the largest element becomes the largest number of the type."""
    scale = torch.finfo(dtype).max / tensor.abs().max().clamp(min=1e-12)
    return (tensor * scale).to(dtype)


def to_int8(tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix in whole numbers from -127 to 127, each row by its largest element."""
    scale = 127 / tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    return (tensor * scale).round().to(torch.int8)


def to_dynamic_8bit(tensor: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Return the numbers of the nearest codes, by blocks that are scaled to 1: as 8-bit optimizers store moments.

    Source: the dynamic data type of arXiv:2110.02861.
    """
    codes = dynamic_codes(is_signed)
    flat = tensor.reshape(-1)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % QUANTISED_BLOCK)).view(-1, QUANTISED_BLOCK)
    scaled = rows / rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    above = torch.searchsorted(codes, scaled.contiguous()).clamp(1, len(codes) - 1)
    nearest = torch.where(scaled - codes[above - 1] < codes[above] - scaled, above - 1, above)
    return nearest.to(torch.uint8).reshape(-1)[: len(flat)].view(tensor.shape)


def dynamic_codes(is_signed: bool) -> torch.Tensor:
    """Return the 256 numbers of the dynamic type, ascending: each power of ten has twice the steps of the one below."""
    found = [torch.tensor([0.0, 1.0])]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power + (not is_signed)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (power - 6)
        found += [middles, -middles] if is_signed else [middles]
    return torch.cat(found).sort().values


def trained_adapters(masters: State) -> State:
    """Return the adapters of a frozen model after some steps, with their moments."""
    torch.manual_seed(1)
    model, batches = Gpt(), Batches(seed=2)
    adapted = [name for name in masters if name.startswith("layers.") and masters[name].dim() == 2]
    pairs = {
        name: (
            (torch.randn(LORA_RANK, masters[name].shape[1]) / masters[name].shape[1] ** 0.5).requires_grad_(),
            torch.zeros(masters[name].shape[0], LORA_RANK, requires_grad=True),
        )
        for name in adapted
    }
    optimizer = torch.optim.AdamW([each for pair in pairs.values() for each in pair], lr=1e-3)
    for _ in range(LORA_STEPS):
        changed = {name: masters[name] + b @ a for name, (a, b) in pairs.items()}
        torch.func.functional_call(model, {**masters, **changed}, (batches.next(),)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: State = {}
    for name, pair in pairs.items():
        for letter, tensor in zip(("lora_A", "lora_B"), pair, strict=True):
            found[f"model.{name}.{letter}"] = tensor.detach()
            moments = optimizer.state[tensor]
            found |= {f"optimizer.state.{name}.{letter}.{key}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
