"""Copies of tensors in the memory of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.backends.torch.local_shards import LocalPart
from holdfast.backends.torch.tensors import TorchSource, torch_dtype
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.gradients import RecordedTensor, RecordMemory


@dataclass(slots=True)
class ToRecord:
    """A region of a tensor to copy."""

    tensor: TensorSpec
    """The tensor, by its name in the record."""

    region: Region
    """The region."""

    source: TorchSource
    """Its bytes."""


class RecordedBytes:
    """The copies of one record: one buffer for each call of an optimizer, and one for a boundary."""

    def __init__(self, memory: RecordMemory) -> None:
        self._memory = memory
        self._buffers: list[memoryview] = []
        self._copied: list[tuple[ToRecord, memoryview, int]] = []

    def copy(self, wanted: Sequence[ToRecord]) -> None:
        """Copy regions; they are complete when this returns.

        Raises:
            UnavailableError: The record gets no memory.
        """
        # By itemsize: then each of them begins at a multiple of the size of its elements.
        ordered = sorted([each for each in wanted if each.region.numel], key=lambda each: -each.tensor.itemsize)
        if not ordered:
            return
        total = sum([each.region.numel * each.tensor.itemsize for each in ordered])
        buffer = self._memory.take(total)
        self._buffers.append(buffer)
        for side in {each.source.side for each in ordered if each.source.side is not None}:
            side.follow()
        # The wait is here even for a GPU: a fused or foreach step may change gradients.
        sources, pieces = [each.source for each in ordered], [each.region for each in ordered]
        TorchSource.copy_together(sources, pieces, buffer[:total]).wait()
        offset = 0
        for each in ordered:
            self._copied.append((each, buffer, offset))
            offset += each.region.numel * each.tensor.itemsize

    @property
    def size(self) -> int:
        """Bytes of all copies."""
        return sum(map(len, self._buffers))

    def tensors(self) -> list[RecordedTensor]:
        """Return the copied tensors."""
        return [_recorded(*each) for each in self._copied]

    def release(self) -> None:
        """Give the memory back."""
        buffers, self._buffers, self._copied = self._buffers, [], []
        for buffer in buffers:
            self._memory.give(buffer)


def _recorded(wanted: ToRecord, buffer: memoryview, offset: int) -> RecordedTensor:
    region, dtype = wanted.region, torch_dtype(wanted.tensor.dtype)
    local = torch.frombuffer(buffer, dtype=dtype, count=region.numel, offset=offset)
    part = LocalPart(region, local.view(region.shape) if isinstance(region, Box) else local)
    return RecordedTensor(wanted.tensor, region, TorchSource((part,), (part.local,)))
