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

from holdfast.backends.foreign.file_layout import FileLayout, SmallTensor, TensorLeaf
from holdfast.backends.foreign.pickles.constructors import DTYPE_OF_STORAGE
from holdfast.backends.foreign.pickles.objects import GlobalName
from holdfast.backends.foreign.pickles.tensors import row_major_strides
from holdfast.backends.foreign.pickles.writer import Made, PersistentId, pickled
from holdfast.backends.foreign.torch.zip_reader import CHECKSUM_IN_RECORD, END, END64, LOCAL, LOCATOR64, RECORD
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.types.values import FrameworkValue
from holdfast.errors import InvalidError

ALIGNMENT_BYTES = 64
"""Alignment of the content of every entry, from the start of the archive."""

_LARGE = (1 << 32) - 1
_CHECKSUM_IN_DESCRIPTOR = 4
_DESCRIBED, _UTF8 = 0x0008, 0x0800

_STORAGES = {dtype: GlobalName(f"torch.{name}Storage") for name, dtype in DTYPE_OF_STORAGE.items() if dtype}
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
    tensors: dict[object, tuple[int, TensorLeaf | SmallTensor]] = {}

    def stand_in(part: object) -> object:
        """Return the pickle call that builds a tensor, or a value of a class of torch."""
        if isinstance(part, TensorLeaf | SmallTensor):
            # Leaves of one tensor share a storage; a small tensor has its own.
            key: object = (part.fqn, part.dtype) if isinstance(part, TensorLeaf) else len(tensors)
            number, _ = tensors.setdefault(key, (len(tensors), part))
            return _tensor(part, number)
        if isinstance(part, FrameworkValue):
            return _framework_value(part)
        raise InvalidError(f"a {type(part).__name__} is not a value that torch.load accepts; leave it out")

    archive = _Archive(layout, layout.at)
    archive.add("data.pkl", pickled(value, stand_in))
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT_BYTES).encode())
    archive.add("byteorder", b"little")
    for number, tensor in tensors.values():
        archive.add(f"data/{number}", tensor.data if isinstance(tensor, SmallTensor) else tensor)
    archive.add("version", b"3\n")
    archive.close()


def _tensor(tensor: TensorLeaf | SmallTensor, number: int) -> Made:
    """Return the pickle call that builds a contiguous tensor, which fills its storage."""
    storage = _STORAGES.get(tensor.dtype)
    # Untyped storages count bytes, typed ones elements.
    count = math.prod(tensor.shape) * (DTYPES[tensor.dtype].itemsize if storage is None else 1)
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

    start_of_archive: int
    """Byte of the file at which the archive starts."""

    records: list[tuple[bytes, tuple[int, int] | None]] = field(default_factory=list)
    """The directory: each record, and the byte range of the file whose checksum is not known yet."""

    def add(self, name: str, content: bytes | TensorLeaf) -> None:
        """Append an entry: header, content and descriptor; its record goes to the directory."""
        layout, name_bytes = self.layout, f"archive/{name}".encode()
        count = len(content) if isinstance(content, bytes) else content.bytes
        flags = _UTF8 | (_DESCRIBED if count else 0)
        local = layout.at - self.start_of_archive
        # The zip64 field holds those of size, stored size and offset that do not fit 32 bits.
        fields = ([count, count] if count >= _LARGE else []) + ([local] if local >= _LARGE else [])
        wide = struct.pack(f"<2H{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
        # The padding aligns the content. It is an extra field of its own, so that zip readers skip it.
        padding = -(local + LOCAL.size + len(name_bytes) + len(wide) + 4) % ALIGNMENT_BYTES
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        header = LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(name_bytes), len(extra))
        layout.put(header + name_bytes + extra)
        # The checksum of a tensor is not known yet. An export computes it while it writes, and stores it in the
        # descriptor and in the directory.
        crc, unknown = 0, None
        if isinstance(content, bytes):
            layout.put(content)
            crc = zlib.crc32(content)
        else:
            layout.put_tensor(content)
            unknown = (layout.at - count, layout.at) if count else None
        if count:
            layout.put(struct.pack("<4sL2Q" if wide else "<4s3L", b"PK\7\x08", crc, count, count))
        short = min(count, _LARGE)
        record = RECORD.pack(
            b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, short, short, len(name_bytes), len(wide), 0, 0, 0, 0,
            min(local, _LARGE),
        )  # fmt: skip
        self.records.append((record + name_bytes + wide, unknown))

    def close(self) -> None:
        """Append the directory."""
        first = self.layout.at - self.start_of_archive
        for record, unknown in self.records:
            if unknown is not None:
                start, stop = unknown
                places = (stop + _CHECKSUM_IN_DESCRIPTOR, self.layout.at + CHECKSUM_IN_RECORD)
                self.layout.put_sum(start, stop, places)
            self.layout.put(record)
        count, end = len(self.records), self.layout.at - self.start_of_archive
        size = end - first
        # The record states its own size without the first 12 bytes, then the versions that miniz writes.
        self.layout.put(END64.pack(b"PK\6\6", END64.size - 12, 0x031E, 45, 0, 0, count, count, size, first))
        self.layout.put(LOCATOR64.pack(b"PK\6\7", 0, end, 1))
        short = min(count, (1 << 16) - 1)
        self.layout.put(END.pack(b"PK\5\6", 0, 0, short, short, min(size, _LARGE), min(first, _LARGE), 0))
