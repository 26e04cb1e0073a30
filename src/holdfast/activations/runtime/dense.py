"""The geometry of tensors, and dense ones: memory without gaps, in any order of the dimensions, as packs read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorGeometry:
    """The place of a tensor in a storage."""

    size: tuple[int, ...]
    """Size."""
    stride: tuple[int, ...]
    """Strides, in elements."""
    offset: int
    """First element in the storage."""
    dtype: torch.dtype
    """Element type."""
    device: torch.device
    """Device."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorGeometry:
        """Return the geometry of a strided tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)

    @property
    def reach_bytes(self) -> int:
        """Return the bytes from the start of the storage to the end of the last element."""
        if 0 in self.size:
            return 0
        steps = ((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (self.offset + sum(steps) + 1) * self.dtype.itemsize

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this geometry that shows a storage."""
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)

    def whole(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """Return the tensor that shows a storage; None if the tensor leaves a part of the storage out."""
        return self.view_of(storage) if self.offset == 0 and self.reach_bytes == storage.nbytes() else None


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """The packed content of one tensor. The tensor itself is not referenced."""

    layout: TensorGeometry
    """Geometry of the tensor."""
    parts: tuple[torch.Tensor, ...]
    """All that is stored."""
    fill: Callable[..., object]
    """Writes the content of the parts to the elements of a new tensor, in memory order."""
    reserve_bytes: int = 0
    """Bytes that a plan should reserve above those of the parts: later packs of this tensor have other content."""

    @property
    def device_bytes(self) -> int:
        """Return how many bytes the pack takes on the tensor's device."""
        return sum(part.nbytes for part in self.parts)

    @property
    def reserved_bytes(self) -> int:
        """Return how many bytes a plan should reserve."""
        return self.device_bytes + self.reserve_bytes

    def unpack(self) -> torch.Tensor:
        """Return a new tensor of the same size, strides, dtype and device. Any number of times."""
        layout = self.layout
        tensor = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)
        self.fill(tensor.as_strided((tensor.numel(),), (1,)), *self.parts)
        return tensor


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


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN equals itself."""
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (first, second)))
