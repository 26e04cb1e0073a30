"""Collects the tensors of torch files for a listing: names, ties, and the pieces of strided views."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.torch.checksums import ArchiveChecksums
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ForeignListing, ListedPiece
from holdfast.base.types.values import Group
from holdfast.errors import InvalidError

PIECES_MAX = 1 << 16
"""Largest number of pieces of all strided tensors of a checkpoint; each run of consecutive elements is one."""

_NAMES_BYTES_MAX = 1 << 30
"""Memory of all names: 256 bytes and the characters of each. A tied name costs a hostile file only two bytes."""


class TorchTensors:
    """The tensors of one checkpoint, added file by file."""

    def __init__(self, folder: Readable) -> None:
        """Start without tensors.

        Args:
            folder: The folder.
        """
        self._folder, self._url = folder, folder.url
        self.specs: dict[str, TensorSpec] = {}
        self.files: dict[str, int] = {}
        """Bytes of each file that holds tensors."""
        self.order: list[str] = []
        """Names in the order of the state."""
        self.remarks: list[str] = []
        """Remarks for the user."""
        self._pieces: dict[str, list[ListedPiece]] = {}
        self._aliases: dict[str, str] = {}
        self._first: dict[StoredTensor, str] = {}
        self._pieces_left = PIECES_MAX
        self._names_left = _NAMES_BYTES_MAX

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.specs or fqn in self._aliases

    def add(self, fqn: str, tensor: StoredTensor) -> None:
        """Add a tensor. If it is the same view of the same storage as an earlier tensor, it is tied to that one.

        Raises:
            InvalidError: The name is taken or cannot be stored, or the tensor consists of too many pieces.
        """
        where = f"{self._url}/{tensor.file}"
        if fqn in self:
            raise InvalidError(f"{where}: two tensors are named {fqn[:300]!r}; rename a key of the state")
        if not fqn or "\0" in fqn or fqn == "__metadata__":
            raise InvalidError(f"{where}: {fqn[:300]!r} cannot be the name of a tensor; rename the key of the state")
        # Ties are free in a file: one storage can be named a million times.
        self._names_left -= 256 + len(fqn)
        if self._names_left < 0:
            raise InvalidError(f"{where}: names of tensors take over {_NAMES_BYTES_MAX} bytes. Save several files")
        # Empty tensors share a place without being tied.
        first = self._first.setdefault(tensor, fqn) if tensor.numel else fqn
        if first != fqn:
            self._aliases[fqn] = first
            return
        if not tensor.is_contiguous:
            count = math.prod(tensor.shape) // math.prod(_run(tensor))
            self._pieces_left -= count
            if self._pieces_left < 0:
                raise InvalidError(
                    f"{where}: {fqn}: {tensor.dtype} of shape {list(tensor.shape)} with strides "
                    f"{list(tensor.strides)} consists of {count} runs; expected {PIECES_MAX} at most in all tensors. "
                    "Save it .contiguous()"
                )
        self.specs[fqn] = TensorSpec(fqn, tensor.dtype, tensor.shape)
        self._pieces[fqn] = list(pieces_of(tensor))

    def listing(self, format_name: str, tree: Group) -> ForeignListing:
        """Return the listing of all tensors."""
        return ForeignListing(
            format=format_name,
            tensors=self.specs,
            pieces=self._pieces,
            files=self.files,
            tree=tree,
            order=self.order,
            aliases=self._aliases,
            checksums=ArchiveChecksums(self._folder, {key: (0, size) for key, size in self.files.items()}),
            remarks=self.remarks,
        )


def pieces_of(tensor: StoredTensor) -> Iterator[ListedPiece]:
    """Yield boxes that cover a tensor, each contiguous in the file; none for an empty tensor.

    A contiguous tensor is one box. A strided view is one box a run: a row of a slice, a column of a transposed matrix,
    or a single element.
    """
    if not tensor.numel:
        return
    run = _run(tensor)
    if run == tensor.shape:
        yield ListedPiece(Box.whole(tensor.shape), tensor.file, tensor.offset)
        return
    steps = [range(0, length, part) for length, part in zip(tensor.shape, run, strict=True)]
    for start in itertools.product(*steps):
        at = sum(coordinate * stride for coordinate, stride in zip(start, tensor.strides, strict=True))
        stop = tuple([low + part for low, part in zip(start, run, strict=True)])
        yield ListedPiece(Box(start, stop), tensor.file, tensor.offset + at * tensor.itemsize)


def _run(tensor: StoredTensor) -> tuple[int, ...]:
    """Return the shape of the boxes that are contiguous in the file: each dimension whole, or of length 1.

    From the last dimension to the first, a dimension is whole if its stride is the product of the whole ones behind.
    """
    run = [1] * len(tensor.shape)
    step = 1
    for dim in reversed(range(len(run))):
        if tensor.strides[dim] == step or tensor.shape[dim] == 1:
            run[dim] = tensor.shape[dim]
            step *= tensor.shape[dim]
    return tuple(run)
