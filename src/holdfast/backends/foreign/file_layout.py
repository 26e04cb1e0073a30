"""Describes the bytes of a file before any tensor is read: literal bytes, tensors, checksums."""

from __future__ import annotations

from math import prod

from holdfast.backends.foreign.typed_values import DIMENSIONS_MAX
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.value_class import value_class
from holdfast.base.types.export import Checksum, ExportFile, ExportTensor
from holdfast.base.types.values import FrameworkValue
from holdfast.errors import CorruptError, InvalidError


@value_class
class TensorLeaf:
    """Replaces a stored tensor in a state that is exported."""

    fqn: str
    """The stored tensor."""

    dtype: str
    """Element type in the file."""

    shape: tuple[int, ...]
    """Elements along each dimension."""

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return Box.whole(self.shape).numel * DTYPES[self.dtype].itemsize


class FileLayout:
    """The layout of a file, built from its first byte to its last."""

    def __init__(self) -> None:
        """Start an empty file."""
        self.at = 0
        """Bytes laid out so far."""
        self._literals: list[tuple[int, bytearray | bytes]] = []
        self._tensors: list[ExportTensor] = []
        self._checksums: list[Checksum] = []

    def put(self, data: bytes) -> None:
        """Append literal bytes."""
        start, last = self._literals[-1] if self._literals else (0, b"")
        # Merge adjacent literals, so that an archive of small entries has one.
        if not isinstance(last, bytearray) or start + len(last) != self.at:
            last = bytearray()
            self._literals.append((self.at, last))
        last += data
        self.at += len(data)

    def put_file(self, file: ExportFile, fqn: str) -> None:
        """Append the layout of another file, without copying bytes.

        Args:
            file: A file without a name.
            fqn: The tensor that replaces the tensor of that file.
        """
        self._literals += [(self.at + at, data) for at, data in file.literals]
        self._tensors += [ExportTensor(fqn, part.dtype, part.box, self.at + part.offset) for part in file.tensors]
        for checksum in file.checksums:
            self.put_sum(self.at + checksum.start, self.at + checksum.stop, tuple(self.at + at for at in checksum.at))
        self.at += file.bytes

    def put_tensor(self, leaf: TensorLeaf) -> None:
        """Append the elements of a tensor."""
        if leaf.bytes:
            self._tensors.append(ExportTensor(leaf.fqn, leaf.dtype, Box.whole(leaf.shape), self.at))
        self.at += leaf.bytes

    def skip_to_multiple(self, count: int) -> None:
        """Append zeros up to the next multiple of a number of bytes."""
        self.at += -self.at % count

    def put_sum(self, start: int, stop: int, at: tuple[int, ...]) -> None:
        """Store the CRC-32 of bytes `[start, stop)` at places that are zero so far."""
        self._checksums.append(Checksum(start, stop, at))

    def file(self, name: str, *, completes: bool = False) -> ExportFile:
        """Return the finished layout; arguments as in `ExportFile`."""
        return ExportFile(
            name=name,
            bytes=self.at,
            literals=tuple((at, bytes(data)) for at, data in self._literals),
            tensors=tuple(self._tensors),
            checksums=tuple(sorted(self._checksums, key=lambda checksum: checksum.start)),
            completes=completes,
        )


@value_class
class SmallTensor:
    """A small tensor in a state that is exported, with its elements."""

    dtype: str
    """Element type, a key of `DTYPES`."""

    shape: tuple[int, ...]
    """Elements along each dimension."""

    data: bytes
    """Elements in row-major order."""


def small_tensor_of(value: FrameworkValue, where: str) -> SmallTensor:
    """Return a small tensor that was stored as a value.

    Args:
        value: A value of kind `torch.tensor`.
        where: Its name, for messages.
    Raises:
        InvalidError: This version of Holdfast does not know its element type.
        CorruptError: Its fields are none of a tensor.
    """
    fields = value.value
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data"}:
        raise CorruptError(f"{where}: a small tensor without dtype, shape and data; expected all three. {_ANOTHER}")
    dtype, shape, data = fields["dtype"], fields["shape"], fields["data"]
    if not isinstance(dtype, str) or not isinstance(shape, tuple) or not isinstance(data, bytes):
        raise CorruptError(f"{where}: a small tensor; expected a text, a tuple and bytes in its fields. {_ANOTHER}")
    if dtype not in DTYPES:
        raise InvalidError(
            f"{where}: a small tensor of dtype {dtype[:80]!r}; expected one of {', '.join(DTYPES)}. Read it with the "
            "version of Holdfast that saved it"
        )
    is_shape = len(shape) <= DIMENSIONS_MAX and all(type(length) is int and length >= 0 for length in shape)
    if not is_shape or prod(shape) * DTYPES[dtype].itemsize != len(data):
        raise CorruptError(
            f"{where}: a small tensor of {dtype} {list(shape)[:DIMENSIONS_MAX]} with {len(data)} bytes; expected as "
            f"many as its elements take. {_ANOTHER}"
        )
    return SmallTensor(dtype, shape, data)


_ANOTHER = "Read another copy"
