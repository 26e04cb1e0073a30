"""Dense tensors: memory without gaps, in any order of the dimensions, as packs read and write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class PackedTensor(Protocol):
    """The packed content of one tensor. The tensor itself is not referenced."""

    @property
    def device_bytes(self) -> int:
        """Return how many bytes the pack takes on the tensor's device."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Return how many bytes a plan should reserve: later packs of this tensor have other content."""
        ...

    def unpack(self) -> torch.Tensor:
        """Return a new tensor of the same size, strides, dtype and device. Any number of times."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """How a dense tensor lies in memory."""

    size: tuple[int, ...]
    """Its size."""

    stride: tuple[int, ...]
    """Its strides, in elements; those of dimensions of length 1 may be any."""

    dtype: torch.dtype
    """Its element type."""

    device: torch.device
    """Its device."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> DenseLayout:
        """Return the layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a new tensor of this layout, and its elements in memory order."""
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return tensor, tensor.as_strided((tensor.numel(),), (1,))


def elements_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return all elements in memory order, as a tensor of one dimension over the same memory; None: not dense.

    Not dense are gaps, several elements at one address, subclasses, and layouts other than strided.
    """
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return None
    elements = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and tensor.numel():
            if stride != elements:
                return None
            elements *= length
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def block_elements(device: torch.device) -> int:
    """Return how many elements a pack works on at a time, a multiple of 256.

    On a CPU a block and its temporaries stay in cache: codes of a whole large tensor take 1.4 to 5 times as long. The
    workspace of a pack is at most 8 such blocks of float32 and the bytes of its outliers. A GPU gets fewer and larger
    blocks, since each operation is a launch.
    """
    return (1 << 18) * torch.get_num_threads() if device.type == "cpu" else 1 << 24
