"""Objects of a state that hold tensors, with stamps of these: they show whether a loop has trained since a load.

A save compares the bytes of every tensor later on, but for those that a rank has for itself: their stamps have digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from holdfast.backends.torch.local_shards import DENSE, bytes_of, locals_of
from holdfast.backends.torch.private_layout import version_counter
from holdfast.base.types.per_rank import PerRank


def watched_in(value: object, path: str, *, of_rank: bool = False) -> Iterator[tuple[str, tuple[object, object]]]:
    """Return the modules, optimizers and tensors in a state by path, each with the stamps of its tensors.

    Args:
        value: The state, or a value in it.
        path: Where it is.
        of_rank: Whether this rank has the value for itself.
    """
    if isinstance(value, torch.Tensor):  # First, since most are.
        yield path, (value, _stamps((value,), of_rank))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from watched_in(item, f"{path}.{key}", of_rank=of_rank)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from watched_in(item, f"{path}.{number}", of_rank=of_rank)
    elif isinstance(value, PerRank):
        yield from watched_in(value.value, path, of_rank=True)
    elif isinstance(value, torch.nn.Module):
        yield path, (value, _stamps((*value.parameters(), *value.buffers()), of_rank))
    elif isinstance(value, torch.optim.Optimizer):
        states = (each.values() for each in value.state.values() if isinstance(each, Mapping))
        tensors = (tensor for each in states for tensor in each if isinstance(tensor, torch.Tensor))
        yield path, (value, _stamps(tensors, of_rank))


def _stamps(tensors: Iterable[torch.Tensor], of_rank: bool) -> list[tuple[int, int, int, bytes]]:
    stamps = []
    for tensor in tensors:
        version = version_counter(tensor)
        if type(tensor) in DENSE and not of_rank:
            stamps.append((tensor.data_ptr(), version, version, b""))
        else:
            stamps += [
                (local.data_ptr(), version, version_counter(local), _digest(local) if of_rank else b"")
                for local in locals_of(tensor)
            ]
    return stamps


def _digest(tensor: torch.Tensor) -> bytes:
    content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return hashlib.blake2b(bytes_of(content), digest_size=16).digest()
