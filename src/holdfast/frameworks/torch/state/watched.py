"""Objects of a state that hold tensors, with stamps of these: they show whether a loop has trained since a load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from holdfast.frameworks.torch.held import DENSE, locals_of
from holdfast.frameworks.torch.private_layout import version_counter


def watched_in(value: object, path: str) -> Iterator[tuple[str, tuple[object, object]]]:
    """Return the modules, optimizers and tensors in a state by path, each with the stamps of its tensors."""
    if isinstance(value, torch.Tensor):  # First, since most are.
        yield path, (value, _stamps((value,)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from watched_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from watched_in(item, f"{path}.{number}")
    elif isinstance(value, torch.nn.Module):
        yield path, (value, _stamps((*value.parameters(), *value.buffers())))
    elif isinstance(value, torch.optim.Optimizer):
        states = (each.values() for each in value.state.values() if isinstance(each, Mapping))
        yield path, (value, _stamps(tensor for each in states for tensor in each if isinstance(tensor, torch.Tensor)))


def _stamps(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int, int]]:
    stamps = []
    for tensor in tensors:
        version = version_counter(tensor)
        if type(tensor) in DENSE:
            stamps.append((tensor.data_ptr(), version, version))
        else:
            stamps += [(local.data_ptr(), version, version_counter(local)) for local in locals_of(tensor)]
    return stamps
