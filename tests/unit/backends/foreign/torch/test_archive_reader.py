"""A torch file's archive: found inside another file, and read by kilobytes however large it is."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import torch

from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.torch.archive_reader import read_torch_file
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange
from tests.hostile.torch_files import Entry, archive, named, number, numbers, tensor


class Counted(ForeignFiles):
    """Counts what is read."""

    read_bytes = 0
    calls = 0

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        self.read_bytes += sum(stop - start for start, stop in ranges)
        self.calls += 1
        super().read_into(key, ranges, buffers, on_range)


def test_an_archive_in_the_middle_of_a_file(tmp_path: Path) -> None:
    held = io.BytesIO()
    weight = torch.randn(3, 4)
    torch.save({"w": weight, "step": 3}, held)  # noqa: TID251 - as torch.distributed.checkpoint keeps values
    before, after = b"PK\5\6" * 100, b"PK\1\2" * 100
    (tmp_path / "file").write_bytes(before + held.getvalue() + after)
    start, stop = len(before), len(before) + len(held.getvalue())
    found: Any = read_torch_file(ForeignFiles(tmp_path), "file", start=start, stop=stop)
    assert found["step"] == 3
    stored = found["w"]
    assert isinstance(stored, StoredTensor)
    data = (tmp_path / "file").read_bytes()[stored.offset : stored.offset + 48]
    assert data == weight.numpy().tobytes()


def test_many_tensors_take_few_reads(tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.full((3,), float(number)) for number in range(2000)}
    torch.save(state, tmp_path / "state.pt")  # noqa: TID251 - what is read here is what torch writes
    files = Counted(tmp_path)
    found: Any = read_torch_file(files, "state.pt")
    data = (tmp_path / "state.pt").read_bytes()
    for name, expected in state.items():
        assert data[found[name].offset : found[name].offset + 12] == expected.numpy().tobytes()
    assert files.calls < 20


def test_a_file_of_many_gigabytes_is_read_by_kilobytes(tmp_path: Path) -> None:
    count = 5 << 30
    storage_bytes = 4 * count
    pickle = named(tensor(numel=count, shape=numbers((count,))) + text_of_second())
    path = tmp_path / "state.pt"
    head = archive([Entry("archive/data.pkl", pickle)])
    first = head[: head.index(b"PK\1\2")]
    with path.open("wb") as file:
        file.write(first)
        place = file.tell()
        for number_of in range(2):
            name = f"archive/data/{number_of}".encode()
            file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name)
            file.seek(storage_bytes, io.SEEK_CUR)
        directory = file.tell()
        file.write(head[head.index(b"PK\1\2") : head.index(b"PK\5\6")])
        step = 30 + len(name) + storage_bytes
        for number_of in range(2):
            name = f"archive/data/{number_of}".encode()
            extra = struct.pack("<2H3Q", 1, 24, storage_bytes, storage_bytes, place + number_of * step)
            lengths = (0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra), 0, 0, 0, 0, 0xFFFFFFFF)
            file.write(struct.pack("<4s6H3L5H2L", b"PK\1\2", *(45, 45, 0, 0, 0, 0, 0), *lengths) + name + extra)
        end = file.tell()
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 3, 3, end - directory, directory))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, end, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    files = Counted(tmp_path)
    found: Any = read_torch_file(files, "state.pt")
    assert found["w"].shape == (count,)
    assert found["w"].offset == place + 30 + len(name)
    assert found["v"].offset == place + step + 30 + len(name) + 4  # Its second element.
    assert files.read_bytes < 100_000
    assert path.stat().st_size > 40 << 30


def text_of_second() -> bytes:
    """Return the codes that put a second tensor, of another storage, under the name `v`."""
    from tests.hostile.torch_files import text

    second = tensor(key=text("1"), numel=5 << 30, shape=numbers((7,)), offset=1, strides=b"(" + number(2) + b"t")
    return b"s" + text("v") + second
