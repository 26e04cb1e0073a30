"""Hostile safetensors files: refused with a typed error that names the file, in bounded time and memory."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

import holdfast
from holdfast.errors import CheckpointError, CorruptError, InvalidError
from holdfast.settings import MIB
from tests.unit.cli.running import holdfast as command


def crafted(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with any header, given as bytes or as what becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, stop: int, dtype: object = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "a pointer of git lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
    "a header longer than the file": crafted({}, length=500),
    "a header of 100 MB that is not there": crafted({}, length=100_000_000),
    "a header of 2**64 - 1": crafted({}, length=2**64 - 1),
    "a header that ends in the middle": crafted(b'{"w": {"dtype"'),
    "no object": crafted(b"[1, 2]"),
    "not UTF-8": crafted(b'{"\xff": 1}'),
    "deep nesting": crafted(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep objects": crafted(b'{"w":' * 50_000 + b"1" + b"}" * 50_000),
    "a huge number": crafted(b'{"w": ' + b"9" * 10_000 + b"}"),
    "a name twice": crafted(b'{"w":%b,"w":%b}' % ((json.dumps(entry(0, 4)).encode(),) * 2), bytes(4)),
    "a field twice": crafted(b'{"w":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4)),
    "an unknown dtype": crafted({"w": entry(0, 4, "F13")}, bytes(4)),
    "a dtype that is no text": crafted({"w": entry(0, 4, ["F32"])}, bytes(4)),
    "bytes past the end": crafted({"w": entry(0, 40)}, bytes(4)),
    "bytes before the beginning": crafted({"w": entry(-4, 0)}, bytes(4)),
    "bytes backwards": crafted({"w": entry(4, 0, shape=[4])}, bytes(4)),
    "bytes beyond 64 bits": crafted({"w": entry(2**64, 2**64 + 4)}, bytes(4)),
    "a shape that lies": crafted({"w": entry(0, 4, "F32", [2])}, bytes(4)),
    "a shape beyond 64 bits": crafted({"w": entry(0, 0, "U8", [2**62, 2**62, 0])}),
    "a negative shape": crafted({"w": entry(0, 4, "U8", [-2, -2])}, bytes(4)),
    "a shape of fractions": crafted({"w": entry(0, 4, "U8", [4.0])}, bytes(4)),
    "a shape of truths": crafted({"w": entry(0, 1, "U8", [True])}, bytes(1)),
    "a thousand dimensions": crafted({"w": entry(0, 1, "U8", [1] * 1000)}, bytes(1)),
    "one offset": crafted({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0]}}, bytes(4)),
    "no offsets": crafted({"w": {"dtype": "U8", "shape": [4]}}, bytes(4)),
    "overlapping tensors": crafted({"v": entry(0, 4), "w": entry(2, 6)}, bytes(6)),
    "the same bytes twice": crafted({"v": entry(0, 4), "w": entry(0, 4)}, bytes(4)),
    "a hole between tensors": crafted({"v": entry(0, 2), "w": entry(4, 6)}, bytes(6)),
    "a hole at the beginning": crafted({"w": entry(2, 4)}, bytes(4)),
    "bytes that belong to nothing": crafted({"w": entry(0, 4)}, bytes(9)),
    "metadata that is no text": crafted({"__metadata__": {"a": 1}, "w": entry(0, 4)}, bytes(4)),
    "metadata that is a list": crafted({"__metadata__": [], "w": entry(0, 4)}, bytes(4)),
    "a place of a shard that is no Unicode text": crafted(
        b'{"__metadata__":{"DCP_SHARDING_INFO":"\\ud800"},"w":%b}' % json.dumps(entry(0, 4)).encode(), bytes(4)
    ),
    "a name that is no Unicode text": crafted(b'{"\\ud800":%b}' % json.dumps(entry(0, 4)).encode(), bytes(4)),
    "an entry that is a tensor's name": crafted({"w": "v", "v": entry(0, 4)}, bytes(4)),
}  # fmt: skip

TAKEN_BY_STOCK = {"a name twice", "a thousand dimensions"}
"""What the stock library reads, the first as whichever came last."""


@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_stock_library_refuses_is_refused_here_by_place(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[name])
    if name not in TAKEN_BY_STOCK:
        with pytest.raises((SafetensorError, ValueError, OverflowError)):
            load(HOSTILE[name])
    with pytest.raises((CorruptError, InvalidError)) as met:
        holdfast.open_checkpoint(path)
    assert "model.safetensors" in str(met.value)
    held = {"w": torch.zeros(4, dtype=torch.uint8)}
    with pytest.raises(CheckpointError):
        holdfast.load(path, {"model": held}, process_group=False)
    assert not held["w"].any()


def test_a_large_header_of_nothing_is_refused_soon_and_small(tmp_path: Path) -> None:
    """A sparse file costs whoever sends it nothing."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 99_000_000))
        file.truncate(100_000_000)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(CorruptError, match=r"model\.safetensors: not the JSON"):
        holdfast.open_checkpoint(path)
    assert time.process_time() - began < 10
    assert tracemalloc.get_traced_memory()[1] < 450 * MIB
    tracemalloc.stop()


@pytest.mark.parametrize("item", [b"[],", b"{},"])
def test_a_header_of_brackets_is_not_made_into_lists(tmp_path: Path, item: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(crafted(b'{"w":[' + item * 3_000_000 + b"1]}"))
    tracemalloc.start()
    with pytest.raises(CorruptError, match=r"model\.safetensors: 3000002 brackets"):
        holdfast.open_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 32 * MIB
    tracemalloc.stop()


def test_a_header_beyond_what_the_format_allows_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate(1 << 41)
    tracemalloc.start()
    with pytest.raises(CorruptError, match="expected at most 100000000"):
        holdfast.open_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()


def test_tensors_of_petabytes_in_no_bytes_are_never_allocated(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(crafted({"w": entry(0, 0, "U8", [0, 2**61, 2**61])}))
    with pytest.raises(CheckpointError, match="w"):
        holdfast.open_checkpoint(tmp_path)


def test_links_pipes_and_folders_in_place_of_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    save_file({"w": torch.ones(2)}, secret)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    place = folder / "model.safetensors"
    place.symlink_to(secret)
    with pytest.raises(InvalidError, match="leads out of the folder"):
        holdfast.open_checkpoint(folder)
    place.unlink()
    os.mkfifo(place)
    for path in (place, folder):
        with pytest.raises(CheckpointError):
            holdfast.open_checkpoint(path)
    place.unlink()
    place.mkdir()
    with pytest.raises(CheckpointError):
        holdfast.open_checkpoint(folder)


@pytest.mark.long
def test_a_folder_of_a_hundred_thousand_files_is_told_in_seconds(tmp_path: Path) -> None:
    for number in range(100_000):
        os.mknod(tmp_path / f"{number}.txt")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    tracemalloc.start()
    began = time.process_time()
    assert list(holdfast.open_checkpoint(tmp_path).tensors) == ["model.w"]
    assert time.process_time() - began < 60
    assert tracemalloc.get_traced_memory()[1] < 200 * MIB
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07", "\u202e", "a\nb"])
def test_names_steer_no_terminal(tmp_path: Path, name: str) -> None:
    save_file({name: torch.ones(2)}, tmp_path / "model.safetensors", metadata={name: name})
    for arguments in (["inspect"], ["inspect", "--json"], ["verify"], ["verify", "--json"]):
        ended = command(*arguments, tmp_path)
        assert ended.status == 0
        assert all(each.isprintable() or each == "\n" for each in ended.out)
