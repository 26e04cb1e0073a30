"""Parameters that a state-dict hook of their module stores in parts, as views of their memory, under other names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch

from holdfast.backends.torch.local_shards import is_ordinary
from holdfast.backends.torch.private_layout import storage_identity
from holdfast.base.geometry.box import Box
from holdfast.errors import InvalidError


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A part of a parameter, with a name of its own."""

    name: str
    """FQN in the module's state dict."""

    box: Box
    """The part, in elements of the parameter."""

    def of(self, state: torch.Tensor, parameter: torch.Tensor, path: str) -> torch.Tensor:
        """Return this part of a state tensor: the same region, or all of a tensor of one element.

        Raises:
            InvalidError: The state has neither the parameter's shape nor one element.
        """
        if state.shape == parameter.shape:
            return state[self.box.relative_to((0,) * parameter.ndim)]
        if state.numel() == 1:
            return state
        raise InvalidError(
            f"{path}: has shape {tuple(state.shape)}, and a state-dict hook of the module splits its parameter of "
            f"shape {tuple(parameter.shape)}; expected state of the same shape. Pass "
            "dict(module.named_parameters()) in place of the module"
        )


class PartsByMemory:
    """Finds the entries of modules that are views of a parameter."""

    def __init__(self, modules: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """List the entries by memory.

        Args:
            modules: Tensors by FQN of each module of the state, by the module's path.
        """
        self._entries: dict[int, list[tuple[str, str, torch.Tensor]]] = defaultdict(list)
        for path, tensors in modules.items():
            for fqn, tensor in tensors.items():
                if type(tensor) is torch.Tensor and is_ordinary(tensor):
                    self._entries[storage_identity(tensor)].append((path, fqn, tensor))

    def parts_of(self, parameter: torch.Tensor) -> tuple[str, tuple[ParameterPart, ...]] | None:
        """Return the module's path and the parts, if the views of one module cover a parameter exactly; else None."""
        if not is_ordinary(parameter):
            return None
        of_module: dict[str, list[ParameterPart]] = defaultdict(list)
        for path, fqn, tensor in self._entries.get(storage_identity(parameter), ()):
            if (box := _box_in(parameter, tensor)) is not None:
                of_module[path].append(ParameterPart(fqn, box))
        for path, parts in of_module.items():
            if sum(part.box.numel for part in parts) == parameter.numel() and not any(
                first.box.intersect(second.box) for first, second in combinations(parts, 2)
            ):
                return path, tuple(parts)
        return None


def _box_in(parameter: torch.Tensor, view: torch.Tensor) -> Box | None:
    """Return the box of a parameter that a tensor of the same storage is a view of; None if it is no box of it."""
    if view.dtype != parameter.dtype or view.ndim != parameter.ndim or not view.numel():
        return None
    if view.is_conj() != parameter.is_conj() or view.is_neg() != parameter.is_neg():
        return None
    strides, lengths, shape = parameter.stride(), tuple(view.shape), tuple(parameter.shape)
    if any(length > 1 and view.stride(dim) != strides[dim] for dim, length in enumerate(lengths)):
        return None
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    start = [0] * parameter.ndim
    for dim in sorted(range(parameter.ndim), key=lambda dim: strides[dim], reverse=True):
        if shape[dim] > 1 and strides[dim]:
            start[dim], offset = divmod(offset, strides[dim])
    stop = tuple(first + length for first, length in zip(start, lengths, strict=True))
    box = Box(tuple(start), stop)
    return box if not offset and Box.whole(shape).contains(box) else None
