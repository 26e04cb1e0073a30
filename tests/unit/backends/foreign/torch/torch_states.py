"""States as people pass them to torch.save, drawn at random, and a listing's tensors put together from its files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from holdfast.backends.foreign.torch.reader import TorchSaveFormat
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.backends.torch.tensors import torch_dtype
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.types.listing import ForeignListing


def saved(state: object, folder: Path, **options: Any) -> Path:
    """Return the file that torch saved a state in."""
    path = folder / "state.pt"
    torch.save(state, path, **options)  # noqa: TID251 - what is read here is what torch writes
    return path


def listed(path: Path) -> ForeignListing:
    """Return what the format finds in a file."""
    return TorchSaveFormat().listing(ForeignFiles(path.parent), path.name)


def read(listing: ForeignListing, fqn: str, folder: Path) -> torch.Tensor:
    """Return a tensor put together piece by piece from the files' own bytes; every element must come once."""
    spec = listing.tensors[listing.aliases.get(fqn, fqn)]
    dtype = DTYPES[spec.dtype]
    found = np.zeros(spec.global_shape, f"V{dtype.itemsize}")
    counts = np.zeros(spec.global_shape, np.int64)
    for piece in listing.pieces[spec.fqn]:
        assert isinstance(piece.region, Box)
        data = (folder / piece.file).read_bytes()
        stop = piece.offset + piece.region.numel * dtype.itemsize
        assert stop <= listing.files[piece.file] == len(data)
        at = piece.region.relative_to((0,) * found.ndim)
        found[at] = np.frombuffer(data[piece.offset : stop], found.dtype).reshape(piece.region.shape)
        counts[at] += 1
    assert (counts == 1).all()
    if not math.prod(spec.global_shape):
        return torch.empty(spec.global_shape, dtype=torch_dtype(spec.dtype))
    return torch.frombuffer(bytearray(found.tobytes()), dtype=torch_dtype(spec.dtype)).reshape(spec.global_shape)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are of one dtype and shape and hold the same bits."""
    return first.dtype == second.dtype and first.shape == second.shape and _bits(first) == _bits(second)


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@st.composite
def bases(draw: st.DrawFn) -> torch.Tensor:
    """Draw a contiguous tensor of random bits."""
    dtype = torch_dtype(draw(st.sampled_from(sorted(DTYPES))))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(each & 1 for each in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape).clone()


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """Draw a view of a tensor, contiguous or not."""
    view = base
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.integers(0, 4))
        if not view.dim():
            view = view.expand(draw(st.integers(1, 3)))
            continue
        dim = draw(st.integers(0, view.dim() - 1))
        if kind == 0:
            view = view.transpose(dim, view.dim() - 1)
        elif kind == 1:
            start = draw(st.integers(0, view.shape[dim]))
            view = view.narrow(dim, start, draw(st.integers(0, view.shape[dim] - start)))
        elif kind == 2 and view.shape[dim]:
            view = view[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        elif kind == 3 and view.shape[dim]:
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
        else:
            view = view.unsqueeze(dim).expand(*view.shape[:dim], draw(st.integers(1, 3)), *view.shape[dim:])
    return view


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw a few tensors, some of which share their memory."""
    several = draw(st.lists(bases(), min_size=1, max_size=3))
    return [draw(views(draw(st.sampled_from(several)))) for _ in range(draw(st.integers(1, 6)))]


def names() -> st.SearchStrategy[str]:
    """Draw keys that no two paths of different nesting have in common."""
    return st.text(st.characters(exclude_characters=".\0", codec="utf-8"), min_size=1, max_size=6).filter(
        lambda name: name not in ("__metadata__",) and not name.endswith("_extra_state")
    )


@st.composite
def nested(draw: st.DrawFn, depth: int = 0) -> dict[str, Any]:
    """Draw a dict of tensors, values, and dicts of these."""
    state: dict[str, Any] = {}
    for each in draw(tensors()):
        state[draw(names())] = each
    state[draw(names())] = draw(st.integers() | st.floats(allow_nan=False) | st.text() | st.none())
    if depth < 2 and draw(st.booleans()):
        state[draw(names())] = draw(nested(depth + 1))
    return state


def leaves(state: dict[str, Any], path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return every tensor of nested dicts with its name."""
    found = []
    for key, each in state.items():
        name = f"{path}.{key}" if path else key
        if isinstance(each, torch.Tensor):
            found.append((name, each))
        elif isinstance(each, dict):
            found += leaves(each, name)
    return found
