"""Measured ratios by element type and kind of tensor, for docs/compression.md: `python -m bench.compression --table`.

Each state is trained, or made of a trained one in the form that libraries store. It is saved with `compression="on"`,
loaded again and compared. A ratio is the bytes of the tensors ÷ the bytes of the packs, headers included. The rows go
to `bench/results/compression.json` and into the page.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
from bench.job import ROOT
from bench.settings import settings

QUANTISED_BLOCK = 256
"""Elements that share a scale in 8-bit optimizer state, as in bitsandbytes."""

LORA_RANK, LORA_STEPS = 8, 20

PAGE = ROOT / "docs" / "compression.md"
BEGIN, END = "<!-- ratios: begin; bench/compression.py measures the table -->", "<!-- ratios: end -->"


class Row(NamedTuple):
    """One line of the table."""

    tensors: str
    """Which tensors."""

    dtype: str
    """Their element type; empty for several."""

    codec: str
    """The codec of most of their bytes; empty for several, `none` if they are stored raw."""

    ratio: float
    """Their bytes ÷ the bytes that they are stored in."""


def measured(cache: Path, schedule: Schedule) -> list[Row]:
    """Measure every row. The trainings in bf16 and fp16 are kept in `cache`."""
    found: list[Row] = []
    folder = cache / "table"
    try:
        for row in _rows(cache, schedule, folder):
            found.append(row._replace(ratio=round(row.ratio, 4)))
            print(f"    {row.tensors}, {row.dtype or 'several types'}: {row.ratio:.3f}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def lines(rows: Iterable[Row]) -> list[str]:
    """Return the table as Markdown."""
    shown = ["| Tensors | Type | Codec | Raw ÷ stored |", "|---|---|---|---|"]
    for row in rows:
        codec = f"`{row.codec}`" if row.codec not in ("", "none") else row.codec
        shown.append(f"| {row.tensors} | {row.dtype} | {codec} | {row.ratio:.2f} |")
    return shown


def block(rows: Iterable[Row]) -> str:
    """Return the text of the page from marker to marker."""
    return "\n".join([BEGIN, "", *lines(rows), "", END])


def put_block(page: Path, rows: Iterable[Row]) -> None:
    """Replace the table of a page.

    Raises:
        ValueError: The page has no markers.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: no {BEGIN} … {END}; the table goes between them")
    page.write_text(before + block(rows) + after)


def _rows(cache: Path, schedule: Schedule, folder: Path) -> Iterator[Row]:
    bf16, fp16 = (
        load_file(path_of(made(cache / "state", schedule, name), schedule.steps)) for name in ("bf16", "fp16")
    )
    masters = {split(name)[1]: tensor for name, tensor in of_kinds(bf16, "master").items()}
    saved = partial(_saved, folder)
    for state, dtype in ((bf16, "bfloat16"), (fp16, "float16")):
        yield saved("weights", dtype, of_kinds(state, "weight"))
    for state, dtype in ((bf16, "bfloat16"), (fp16, "float16")):
        weights = of_kinds(state, "weight")
        yield saved(f"masters of {dtype} weights", "float32", of_kinds(state, "weight", "master"), besides=weights)
    yield saved("weights without a 16-bit copy", "float32", of_kinds(bf16, "master"))
    for key in ("exp_avg", "exp_avg_sq"):
        yield saved(f"`{key}`", "float32", of_kinds(bf16, key))
    yield saved("gradients of bfloat16, in float32 and clipped", "float32", clipped_gradients(bf16))
    for dtype8 in (torch.float8_e4m3fn, torch.float8_e5m2):
        quantised = {f"model.{name}": to_float8(tensor, dtype8) for name, tensor in masters.items()}
        yield saved("weights, one scale a tensor", str(dtype8).removeprefix("torch."), quantised)
    rows = {f"model.{name}": to_int8(tensor) for name, tensor in masters.items() if tensor.dim() == 2}
    yield saved("weights, one scale a row", "int8", rows)
    for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
        moments = {name: to_dynamic_8bit(tensor, is_signed) for name, tensor in of_kinds(bf16, key).items()}
        yield saved(f"8-bit optimizer state: `{key}`", "uint8", moments)
    yield saved("adapters (LoRA): many pieces below 64 KiB", "float32", trained_adapters(masters))
    for state, dtype in ((bf16, "bfloat16"), (fp16, "float16")):
        whole = f"whole state: {dtype} weights, float32 masters and moments"
        yield saved(whole, "", state)
        yield saved(f"{whole}; weights left plain by `compression_skip`", "", state, skip=("model.*",))
    fp32 = of_kinds(bf16, "master", "exp_avg", "exp_avg_sq")
    yield saved("whole state in float32", "", fp32)


def _saved(
    folder: Path,
    tensors: str,
    dtype: str,
    state: State,
    *,
    besides: State | None = None,
    skip: tuple[str, ...] = (),
) -> Row:
    """Save a state and return its row; of a state that needs others beside it, that of its other tensors."""
    stored, codecs = _stored(folder, state, skip)
    whole = bytes_of(state)
    if besides:
        stored -= _stored(folder, besides, skip)[0]
        whole -= bytes_of(besides)
    codec = next((codec for kind, codec in codecs.items() if kind.startswith(f"{dtype} ")), "") or "none"
    return Row(tensors, dtype, codec if dtype else "", whole / stored)


def _stored(folder: Path, state: State, skip: tuple[str, ...]) -> tuple[int, dict[str, str]]:
    """Save, load and compare; return the bytes of the packs, headers included, and the codec of each kind."""
    shutil.rmtree(folder, ignore_errors=True)
    report = holdfast.save(folder, state, settings=settings(compression="on", compression_skip=skip))
    target = zeros_like(state)
    holdfast.load(folder, target)
    # As bytes: torch compares no float8.
    conditions.require_equal(*({name: each.view(torch.uint8) for name, each in one.items()} for one in (state, target)))
    stored = sum(path.stat().st_size for path in packs_in(folder))
    return stored, {coding.kind: coding.codec for coding in report.codings}


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
