"""A file to be written, laid out from its first byte to its last."""

from __future__ import annotations

from holdfast.geometry.box import Box
from holdfast.geometry.value_class import value_class
from holdfast.types.export import Checksum, ExportFile, ExportTensor


@value_class
class TensorLeaf:
    """Stands in a state to be written for a tensor that is stored."""

    fqn: str
    """The stored tensor."""

    dtype: str
    """What its elements are cast to."""

    shape: tuple[int, ...]
    """Elements along each dimension."""


class FileLayout:
    """What a file is made of, as far as it is laid out."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.at = 0
        """Bytes laid out so far."""
        self._literals: list[tuple[int, bytearray | bytes]] = []
        self._tensors: list[ExportTensor] = []
        self._checksums: list[Checksum] = []

    def put(self, data: bytes) -> None:
        """Lay out bytes that are known."""
        start, last = self._literals[-1] if self._literals else (0, b"")
        if not isinstance(last, bytearray) or start + len(last) != self.at:
            last = bytearray()
            self._literals.append((self.at, last))
        last += data
        self.at += len(data)

    def put_file(self, file: ExportFile, fqn: str) -> None:
        """Lay out what makes up another file, of which nothing is copied.

        Args:
            file: A file without a name.
            fqn: The tensor that stands in it, in place of the one that it was laid out for.
        """
        self._literals += [(self.at + at, data) for at, data in file.literals]
        self._tensors += [ExportTensor(fqn, each.dtype, each.box, self.at + each.offset) for each in file.tensors]
        for each in file.checksums:
            self.put_sum(self.at + each.start, self.at + each.stop, tuple(self.at + at for at in each.at))
        self.at += file.bytes

    def put_tensor(self, leaf: TensorLeaf) -> None:
        """Lay out the elements of a tensor."""
        tensor = ExportTensor(leaf.fqn, leaf.dtype, Box.whole(leaf.shape), self.at)
        if tensor.bytes:
            self._tensors.append(tensor)
        self.at += tensor.bytes

    def skip_to_multiple(self, count: int) -> None:
        """Leave zeros up to the next multiple of a count of bytes."""
        self.at += -self.at % count

    def put_sum(self, start: int, stop: int, at: tuple[int, ...]) -> None:
        """Have the CRC-32 of a run stand at places that hold zeros so far."""
        self._checksums.append(Checksum(start, stop, at))

    def file(self, name: str) -> ExportFile:
        """Return the file under a name."""
        return ExportFile(
            name=name,
            bytes=self.at,
            literals=tuple((at, bytes(data)) for at, data in self._literals),
            tensors=tuple(self._tensors),
            checksums=tuple(sorted(self._checksums, key=lambda each: each.start)),
        )


@value_class
class SmallTensor:
    """Stands in a state to be written for a tensor whose elements are known already."""

    dtype: str
    """Element type, a key of `DTYPES`."""

    shape: tuple[int, ...]
    """Elements along each dimension."""

    data: bytes
    """Its elements in row-major order."""
