"""The tensors of a checkpoint as they are found: names, pieces, further copies, ties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import CorruptError, InvalidError
from holdfast.foreign.deepspeed.layout import TensorParallelLayout, whole_layout
from holdfast.foreign.layouts.pieces import ElementRun, Slice, pieces_of, runs_of
from holdfast.foreign.pickles.tensors import StoredTensor
from holdfast.foreign.values import remark
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.tensor import TensorSpec
from holdfast.types.listing import ListedPiece

PIECES_MAX = 1 << 23
"""Of all tensors; beyond it a listing takes gigabytes."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """What one tensor-parallel rank holds of a tensor."""

    dtype: str
    """Element type."""

    shape: tuple[int, ...]
    """Shape of what it holds."""

    runs: Sequence[ElementRun]
    """Where that lies."""


@dataclass(slots=True)
class Tensors:
    """What a listing says of tensors."""

    where: str
    """The checkpoint, for messages."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    """Tensors by FQN."""

    pieces: dict[str, list[ListedPiece]] = field(default_factory=dict)
    """Where each lies."""

    replicas: dict[str, list[ListedPiece]] = field(default_factory=dict)
    """Where further copies lie."""

    aliases: dict[str, str] = field(default_factory=dict)
    """Tied names."""

    remarks: list[str] = field(default_factory=list)
    """What a reader should know."""

    _count: int = 0

    def add(self, fqn: str, layout: TensorParallelLayout, held: Sequence[HeldTensor]) -> None:
        """List a tensor of which each tensor-parallel rank holds something.

        Raises:
            CorruptError: It is listed already, or ranks hold it in different element types.
        """
        if fqn in self.specs:
            raise CorruptError(f"{self.where}: {fqn[:300]!r} is there twice; expected each name once")
        if "\0" in fqn or any("\ud800" <= each <= "\udfff" for each in fqn):
            raise InvalidError(f"{self.where}: {fqn[:300]!r} cannot be the name of a tensor; rename the parameter")
        dtypes = {each.dtype for each in held}
        if len(dtypes) != 1:
            raise CorruptError(f"{self.where}: ranks hold {fqn} as {sorted(dtypes)}; expected one element type")
        (dtype,) = dtypes
        own: list[ListedPiece] = []
        copies: list[ListedPiece] = []
        for rank, each in enumerate(held):
            for cut in layout.slices[rank]:
                found = pieces_of(each.runs, each.shape, cut, layout.global_shape, DTYPES[dtype].itemsize)
                self._extend(copies if cut.copy else own, found)
        self.specs[fqn] = TensorSpec(fqn, dtype, layout.global_shape)
        self.pieces[fqn] = own
        if copies:
            self.replicas[fqn] = copies

    def remark(self, text: str) -> None:
        """Take a remark, which begins with the file that it is about."""
        remark(self.remarks, text.removeprefix(f"{self.where}/"))

    def add_copied(self, fqn: str, every: Sequence[StoredTensor]) -> None:
        """List a tensor of which several files hold a copy; the first is the one that is read."""
        self.add(
            fqn, whole_layout([every[0].shape]), [HeldTensor(every[0].dtype, every[0].shape, runs_of(every[0], fqn))]
        )
        whole = self.pieces[fqn][0].region
        copies = [ListedPiece(whole, each.file, each.offset) for each in every[1:] if each.shape == every[0].shape]
        if copies:
            self.replicas[fqn] = copies

    def add_copy(self, fqn: str, tensor: StoredTensor) -> None:
        """List a further copy, of one type and shape, of a tensor that is listed already."""
        spec = self.specs[fqn]
        whole = Box.whole(spec.global_shape)
        runs = runs_of(tensor, f"{self.where}/{tensor.file}: {fqn}")
        found = pieces_of(runs, tensor.shape, Slice(whole, whole.start), spec.global_shape, spec.itemsize)
        self._extend(self.replicas.setdefault(fqn, []), found)

    def add_again(self, fqn: str, other: str) -> None:
        """List a tensor that is another one's bytes under a second name, without being tied to it."""
        spec = self.specs[other]
        self.specs[fqn] = TensorSpec(fqn, spec.dtype, spec.global_shape)
        self.pieces[fqn] = self.pieces[other]
        if other in self.replicas:
            self.replicas[fqn] = self.replicas[other]

    def sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of every file that a piece or a copy lies in."""
        keys = {piece.file for found in (self.pieces, self.replicas) for each in found.values() for piece in each}
        return {key: known[key] for key in sorted(keys)}

    def _extend(self, found: list[ListedPiece], more: Iterable[ListedPiece]) -> None:
        for piece in more:
            found.append(piece)
            self._count += 1
            if self._count > PIECES_MAX:
                raise InvalidError(
                    f"{self.where}: its tensors lie in over {PIECES_MAX} pieces; expected larger ones. Convert it with "
                    "DeepSpeed's ds_to_universal, and read what that writes"
                )
