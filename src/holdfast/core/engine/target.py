"""A load target in host memory, held by numpy: for loads without a framework."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box, grid_within
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.framework import Target
from holdfast.errors import UnavailableError


class HostTarget(Target):
    """A box of a tensor as a numpy array."""

    def __init__(self, dtype: str, box: Box) -> None:
        self.dtype = dtype
        """Element type by name."""
        self._numpy = np.dtype(DTYPES[dtype].numpy)
        self.box = box
        """The box, in global coordinates."""
        try:
            self.array: NDArray[np.generic] = np.empty(box.shape, dtype=self._numpy)
            """The placed elements; shape `box.shape`; unsigned integers if numpy lacks the dtype."""
        except MemoryError as error:
            raise UnavailableError(
                f"no memory for {dtype} of shape {list(box.shape)}: {error}. Read the tensor slice by slice"
            ) from error

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        """Copy `part` out of the row-major bytes of `source_box`."""
        stored = np.frombuffer(source, dtype=self._numpy).reshape(source_box.shape)
        self.array[part.relative_to(self.box.start)] = stored[part.relative_to(source_box.start)]

    def put(self, at: Sequence[slice], elements: NDArray[np.generic]) -> None:
        """Copy elements of a grid into the array."""
        self.array[grid_within(at, self.box)] = elements

    def memory(self, part: Box) -> memoryview | None:
        """Return the bytes of `part` if they are contiguous in the array."""
        run = self.array[part.relative_to(self.box.start)]
        return run.view(np.uint8).data.cast("B") if run.flags.c_contiguous and run.ndim else None
