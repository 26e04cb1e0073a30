"""Collects the tensors of a checkpoint for its listing: names, pieces, further copies, ties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.backends.foreign.deepspeed.layout import TensorParallelLayout, replicated_layout
from holdfast.backends.foreign.messages import CONVERT
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.slices.pieces import ElementRun, Slice, pieces_of, runs_of
from holdfast.backends.foreign.values import remark
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.listing import ListedPiece
from holdfast.errors import CorruptError, InvalidError

PIECES_MAX = 1 << 23
"""Largest number of pieces of all tensors. A listing of more takes gigabytes of memory."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """The local tensor of one tensor-parallel rank."""

    dtype: str
    """Element type."""

    shape: tuple[int, ...]
    """Local shape."""

    runs: Sequence[ElementRun]
    """Its elements in files."""


@dataclass(slots=True)
class Tensors:
    """The tensors of a listing."""

    where: str
    """The checkpoint, for messages."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    """Tensors by FQN."""

    pieces: dict[str, list[ListedPiece]] = field(default_factory=dict)
    """Pieces by FQN."""

    replicas: dict[str, list[ListedPiece]] = field(default_factory=dict)
    """Pieces of further copies, by FQN."""

    aliases: dict[str, str] = field(default_factory=dict)
    """Tied names: alias to FQN."""

    remarks: list[str] = field(default_factory=list)
    """Remarks for the user."""

    _count: int = 0

    def add(self, fqn: str, layout: TensorParallelLayout, held: Sequence[HeldTensor]) -> None:
        """Add a tensor from the local tensors of the tensor-parallel ranks.

        Raises:
            CorruptError: It is listed already, or ranks hold it in different element types.
            InvalidError: Its name cannot be stored, or the checkpoint has too many pieces.
        """
        if fqn in self.specs:
            raise CorruptError(f"{self.where}: {fqn[:300]!r} is stored twice; expected it once. Read another copy")
        if "\0" in fqn or any("\ud800" <= character <= "\udfff" for character in fqn):
            raise InvalidError(f"{self.where}: {fqn[:300]!r} cannot be the name of a tensor; rename the parameter")
        dtypes = {local.dtype for local in held}
        if len(dtypes) != 1:
            raise CorruptError(
                f"{self.where}: ranks hold {fqn} as {sorted(dtypes)}; expected one element type. Read another copy"
            )
        (dtype,) = dtypes
        pieces: list[ListedPiece] = []
        copies: list[ListedPiece] = []
        for rank, local in enumerate(held):
            for cut in layout.slices[rank]:
                more = pieces_of(local.runs, local.shape, cut, layout.global_shape, DTYPES[dtype].itemsize)
                self._extend(copies if cut.copy else pieces, more)
        self.specs[fqn] = TensorSpec(fqn, dtype, layout.global_shape)
        self.pieces[fqn] = pieces
        if copies:
            self.replicas[fqn] = copies

    def remark(self, text: str) -> None:
        """Add a remark that begins with a file; the folder is cut off."""
        remark(self.remarks, text.removeprefix(f"{self.where}/"))

    def runs(self, fqn: str, tensor: StoredTensor) -> list[ElementRun]:
        """Return the runs of a tensor in its file, as `runs_of` does; `fqn` is for messages."""
        return runs_of(tensor, f"{self.where}/{tensor.file}: {fqn}")

    def add_whole(self, fqn: str, tensor: StoredTensor, shape: tuple[int, ...] | None = None) -> None:
        """Add a tensor that one file holds whole. `shape` replaces its own shape and has as many elements."""
        shape = tensor.shape if shape is None else shape
        held = HeldTensor(tensor.dtype, shape, self.runs(fqn, tensor))
        self.add(fqn, replicated_layout([shape]), [held])

    def add_copy(self, fqn: str, tensor: StoredTensor) -> None:
        """Add a further copy of a listed tensor, of the same type and shape."""
        spec = self.specs[fqn]
        whole = Box.whole(spec.global_shape)
        runs = self.runs(fqn, tensor)
        copies = pieces_of(runs, tensor.shape, Slice(whole, whole.start), spec.global_shape, spec.itemsize)
        self._extend(self.replicas.setdefault(fqn, []), copies)

    def add_again(self, fqn: str, other: str) -> None:
        """Add a tensor that shares the bytes of a listed one under a second name, but is not tied to it."""
        spec = self.specs[other]
        self.specs[fqn] = TensorSpec(fqn, spec.dtype, spec.global_shape)
        self.pieces[fqn] = self.pieces[other]
        if other in self.replicas:
            self.replicas[fqn] = self.replicas[other]

    def sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of every file that holds a piece or a copy."""
        lists = (*self.pieces.values(), *self.replicas.values())
        keys = {piece.file for pieces in lists for piece in pieces}
        return {key: known[key] for key in sorted(keys)}

    def _extend(self, pieces: list[ListedPiece], more: Iterable[ListedPiece]) -> None:
        for piece in more:
            pieces.append(piece)
            self._count += 1
            if self._count > PIECES_MAX:
                raise InvalidError(f"{self.where}: has over {PIECES_MAX} pieces; expected larger ones. {CONVERT}")
