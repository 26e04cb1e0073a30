"""Lays out archives as torch.save writes them, byte by byte, before any tensor is read.

Four choices of torch are kept, because readers rely on them. Every entry is uncompressed. Its content starts at a
multiple of 64 bytes. A descriptor behind the content holds its size. The directory ends in a zip64 record at any size.

Source: PyTorch's `caffe2/serialize/inline_container.cc` and its miniz.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass, field

from holdfast.errors import InvalidError
from holdfast.foreign.file_layout import FileLayout, SmallTensor, TensorLeaf
from holdfast.foreign.pickles.constructors import STORAGE_DTYPES
from holdfast.foreign.pickles.objects import GlobalName
from holdfast.foreign.pickles.tensors import row_major_strides
from holdfast.foreign.pickles.writer import Made, PersistentId, pickled
from holdfast.foreign.torch.zip_reader import CHECKSUM_IN_RECORD, END, END64, LOCAL, LOCATOR64, RECORD
from holdfast.geometry.dtype import DTYPES
from holdfast.types.values import FrameworkValue

ALIGNMENT_BYTES = 64
"""Alignment of the content of every entry, from the start of the archive."""

_LARGE = (1 << 32) - 1
_CHECKSUM_IN_DESCRIPTOR = 4
_DESCRIBED, _UTF8 = 0x0008, 0x0800

_STORAGES = {
    dtype: GlobalName(name)
    for name, dtype in STORAGE_DTYPES.items()
    if dtype and name.startswith("torch.") and "." not in name.removeprefix("torch.")
}
_UNTYPED = GlobalName("torch.storage.UntypedStorage")


def put_archive(layout: FileLayout, value: object) -> None:
    """Lay out an archive of a value.

    Args:
        layout: The file; the archive is appended.
        value: Plain values, `TensorLeaf`, `SmallTensor` and `FrameworkValue`, nested. Leaves of the same tensor share
            one storage.
    Raises:
        InvalidError: The value holds an object that torch cannot load.
    """
    storages = _Storages()
    pickle = pickled(value, storages.stand_in)
    archive = _Archive(layout)
    archive.add("data.pkl", pickle)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT_BYTES).encode())
    archive.add("byteorder", b"little")
    for number, tensor in enumerate(storages.tensors):
        if isinstance(tensor, SmallTensor):
            archive.add(f"data/{number}", tensor.data)
        else:
            archive.add_tensor(f"data/{number}", tensor)
    archive.add("version", b"3\n")
    archive.close()


class _Storages:
    """The storages of one archive, by number."""

    def __init__(self) -> None:
        self.tensors: list[TensorLeaf | SmallTensor] = []
        self._numbers: dict[tuple[str, str], int] = {}

    def stand_in(self, value: object) -> object:
        """Return the pickle call that builds a tensor, or a value of a class of torch."""
        if isinstance(value, TensorLeaf):
            key = (value.fqn, value.dtype)
            if key not in self._numbers:
                self._numbers[key] = self._add(value)
            return _tensor(value, self._numbers[key])
        if isinstance(value, SmallTensor):
            return _tensor(value, self._add(value))
        if isinstance(value, FrameworkValue):
            return _framework_value(value)
        raise InvalidError(f"a {type(value).__name__} is not a value that torch.load accepts; leave it out")

    def _add(self, tensor: TensorLeaf | SmallTensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _tensor(tensor: TensorLeaf | SmallTensor, number: int) -> Made:
    """Return the pickle call that builds a contiguous tensor, which fills its storage."""
    numel, itemsize = math.prod(tensor.shape), DTYPES[tensor.dtype].itemsize
    storage = _STORAGES.get(tensor.dtype)
    count = numel * itemsize if storage is None else numel
    data = PersistentId(("storage", storage or _UNTYPED, str(number), "cpu", count))
    view = (data, 0, tensor.shape, row_major_strides(tensor.shape), False, Made(GlobalName("collections.OrderedDict")))
    if storage is None:
        return Made(GlobalName("torch._utils._rebuild_tensor_v3"), (*view, GlobalName(f"torch.{tensor.dtype}")))
    return Made(GlobalName("torch._utils._rebuild_tensor_v2"), view)


def _framework_value(value: FrameworkValue) -> object:
    content = value.value
    if value.kind == "torch.dtype" and isinstance(content, str) and content.isidentifier():
        return GlobalName(f"torch.{content}")
    if value.kind == "torch.size" and isinstance(content, tuple):
        return Made(GlobalName("torch.Size"), (content,))
    if value.kind == "torch.device" and isinstance(content, str):
        kind, _, index = content.partition(":")
        return Made(GlobalName("torch.device"), (kind, int(index)) if index else (kind,))
    raise InvalidError(f"a {value.kind} of {content!r:.100} is not a value that torch.load accepts; leave it out")


@dataclass(slots=True)
class _Archive:
    """A zip archive that is being appended to a file. Its offsets count from its own start."""

    layout: FileLayout
    """The file."""

    start_of_archive: int = field(init=False)
    """Byte of the file at which the archive starts."""

    records: list[tuple[bytes, tuple[int, int] | None]] = field(default_factory=list)
    """The directory: each record, and the byte range of the file whose checksum is not known yet."""

    descriptors: dict[int, int] = field(default_factory=dict)
    """By start of such a range, the byte at which the descriptor stores the checksum too."""

    def __post_init__(self) -> None:
        self.start_of_archive = self.layout.at

    def add(self, name: str, data: bytes) -> None:
        """Append an entry of known bytes."""
        local = self._open(name, len(data))
        self.layout.put(data)
        self._finish(name, local, len(data), zlib.crc32(data))

    def add_tensor(self, name: str, leaf: TensorLeaf) -> None:
        """Append an entry with the elements of a tensor."""
        count = math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize
        local = self._open(name, count)
        self.layout.put_tensor(leaf)
        self._finish(name, local, count, None if count else 0)

    def close(self) -> None:
        """Append the directory."""
        first = self.layout.at - self.start_of_archive
        for record, unknown in self.records:
            if unknown is not None:
                start, stop = unknown
                self.layout.put_sum(start, stop, (self.descriptors[start], self.layout.at + CHECKSUM_IN_RECORD))
            self.layout.put(record)
        count, end = len(self.records), self.layout.at - self.start_of_archive
        size = end - first
        # The record states its own size without the first 12 bytes, then the versions that miniz writes.
        self.layout.put(END64.pack(b"PK\6\6", END64.size - 12, 0x031E, 45, 0, 0, count, count, size, first))
        self.layout.put(LOCATOR64.pack(b"PK\6\7", 0, end, 1))
        short = min(count, (1 << 16) - 1)
        self.layout.put(END.pack(b"PK\5\6", 0, 0, short, short, min(size, _LARGE), min(first, _LARGE), 0))

    def _open(self, name: str, count: int) -> int:
        """Append the header of an entry, padded to align the content; return the offset of the header."""
        local, name_bytes = self.layout.at - self.start_of_archive, _entry_name(name)
        wide = _wide(count, local)
        start = local + LOCAL.size + len(name_bytes) + len(wide) + 4
        # The padding is an extra field of its own, so that zip readers skip it.
        padding = -start % ALIGNMENT_BYTES
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        header = LOCAL.pack(b"PK\3\4", 0, _flags(count), 0, 0, 0, 0, 0, 0, len(name_bytes), len(extra))
        self.layout.put(header + name_bytes + extra)
        return local

    def _finish(self, name: str, local: int, count: int, crc: int | None) -> None:
        """Append the descriptor behind an entry's content, and add its record to the directory."""
        stop, name_bytes, wide = self.layout.at, _entry_name(name), _wide(count, local)
        start = stop - count
        # The checksum of a tensor is not known yet. An export computes it while it writes, and stores it here and in
        # the directory.
        if count:
            self.descriptors[start] = stop + _CHECKSUM_IN_DESCRIPTOR
            sizes = struct.pack("<2Q" if wide else "<2L", count, count)
            self.layout.put(struct.pack("<4sL", b"PK\7\x08", crc or 0) + sizes)
        short = min(count, _LARGE)
        record = RECORD.pack(
            b"PK\1\2", 0, 0, _flags(count), 0, 0, 0, crc or 0, short, short, len(name_bytes), len(wide), 0, 0, 0, 0,
            min(local, _LARGE),
        )  # fmt: skip
        self.records.append((record + name_bytes + wide, (start, stop) if crc is None else None))


def _entry_name(name: str) -> bytes:
    return f"archive/{name}".encode()


def _flags(count: int) -> int:
    return _UTF8 | (_DESCRIBED if count else 0)


def _wide(count: int, local: int) -> bytes:
    """Return the zip64 field with those of size, stored size and offset that do not fit 32 bits; empty if all fit."""
    fields = ([count, count] if count >= _LARGE else []) + ([local] if local >= _LARGE else [])
    return struct.pack(f"<2H{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
