"""Torch files as an attacker would make them: pickles put together code by code, and zip archives that lie."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from holdfast.backends.foreign.torch.reader import TorchSaveFormat
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.base.types.listing import ForeignListing


@dataclass
class Entry:
    """One entry of an archive; what the directory says of it may differ from what is there."""

    name: str
    data: bytes = b""
    method: int = 0
    flags: int = 0
    stated_bytes: int | None = None
    stored_bytes: int | None = None
    place: int | None = None
    extra: bytes = b""
    local_name: str | None = None


def archive(entries: list[Entry], *, count: int | None = None, at: int | None = None, size: int | None = None) -> bytes:
    """Return a zip archive of entries; count, place and size of the directory may be lies."""
    content, directory = b"", b""
    for entry in entries:
        local = (entry.local_name or entry.name).encode()
        place = len(content) if entry.place is None else entry.place
        header = (20, entry.flags, entry.method, 0, 0, 0)
        content += struct.pack("<4s5H3L2H", b"PK\3\4", *header, len(entry.data), len(entry.data), len(local), 0)
        content += local + entry.data
        bytes_stated = len(entry.data) if entry.stated_bytes is None else entry.stated_bytes
        bytes_stored = bytes_stated if entry.stored_bytes is None else entry.stored_bytes
        name = entry.name.encode()
        lengths = (bytes_stored, bytes_stated, len(name), len(entry.extra), 0, 0, 0)
        directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, *header, *lengths, 0, place) + name + entry.extra
    number = len(entries) if count is None else count
    where = len(content) if at is None else at
    long = len(directory) if size is None else size
    return content + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, number, number, long, where, 0)


def state(pickle: bytes, *storages: bytes, order: bytes = b"little") -> list[Entry]:
    """Return the entries that torch.save writes."""
    memory = [Entry(f"archive/data/{number}", data) for number, data in enumerate(storages)]
    return [
        Entry("archive/data.pkl", pickle),
        Entry("archive/byteorder", order),
        *memory,
        Entry("archive/version", b"3"),
    ]


def text(value: str) -> bytes:
    """Return the code that pushes text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """Return the code that pushes an integer."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(values: tuple[int, ...]) -> bytes:
    """Return the code that pushes a tuple of integers."""
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    *,
    key: bytes = text("0"),
    kind: str = "FloatStorage",
    numel: int = 4,
    offset: int = 0,
    shape: bytes = numbers((4,)),
    strides: bytes = numbers((1,)),
    function: str = "_rebuild_tensor_v2",
    tail: bytes = b"\x89N",
) -> bytes:
    """Return the code that pushes a tensor, as torch writes it unless told otherwise."""
    storage = b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + key + text("cpu") + number(numel) + b"tQ"
    return b"ctorch._utils\n" + function.encode() + b"\n(" + storage + number(offset) + shape + strides + tail + b"tR"


def named(value: bytes) -> bytes:
    """Return a pickle of one value under the name `w`."""
    return b"\x80\x02}" + text("w") + value + b"s."


def listed(data: bytes, folder: Path) -> ForeignListing:
    """Return what is found in a file of such bytes."""
    (folder / "state.pt").write_bytes(data)
    return TorchSaveFormat().listing(ForeignFiles(folder), "state.pt")
