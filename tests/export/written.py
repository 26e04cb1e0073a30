"""States to be exported to torch's own formats, and what torch's own readers make of the files."""

from __future__ import annotations

import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.utils.serialization import config

from holdfast.base.geometry.dtype import DTYPES
from tests.export.sources import bits, noise

ALL_DTYPES = [getattr(torch, name) for name in DTYPES]
"""Every type that Holdfast stores."""


def every_kind() -> dict[str, torch.Tensor]:
    """Return a tensor of every type, and of every odd shape."""
    state = {str(dtype)[6:]: noise((37, 29), dtype, seed) for seed, dtype in enumerate(ALL_DTYPES)}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 7), "byte": torch.tensor([7], dtype=torch.uint8)}
    state |= {"no.bytes": torch.zeros(3, 0, dtype=torch.float8_e5m2), "deep": noise((3, 1, 5, 7), torch.int16, 99)}
    return state


def same(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    """Require the same names, and under each the same bits."""
    assert {name: bits(each) for name, each in found.items()} == {name: bits(each) for name, each in expected.items()}


def loaded(path: Path) -> Any:
    """Return what `torch.load` finds, read and mapped; all are one."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    found = torch.load(path, weights_only=True)  # noqa: TID251 - what is exported is for it
    for calculated in (False, True):
        alike(mapped(path, calculated), found)
    return found


def mapped(path: Path, calculated: bool) -> Any:
    """Return what `torch.load` maps, at the offsets that the directory states or that it calculates itself."""
    with config.patch("load.calculate_storage_offsets", calculated):
        return torch.load(path, weights_only=True, mmap=True)  # noqa: TID251 - what is exported is for it


def alike(first: Any, second: Any) -> None:
    """Require two nested values to be of the same types throughout, and equal to the last bit."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert bits(first) == bits(second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        assert not isinstance(first, OrderedDict) or list(first) == list(second)
        for key in first:
            alike(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            alike(one, other)
    else:
        assert first == second


def dcp_loaded(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state after `torch.distributed.checkpoint.load`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def dcp_saved(folder: Path, state: dict[str, Any]) -> Path:
    """Save a state with `torch.distributed.checkpoint`; return the folder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder
