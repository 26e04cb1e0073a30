"""Checkpoints of DCP that lie or are damaged: each is refused by a typed error, soon, and nothing in it is run."""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251 - crafts what is read here without it
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import holdfast
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError

DATA = "__0_0.distcp"
SECONDS_MAX = 20
MEMORY_BYTES_MAX = 256 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint: two tensors, one of them large enough that only its ends are read, and two objects."""
    path = tmp_path / "ck"
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "big": torch.arange(30_000.0)}, "a": [1, 2], "s": "x"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    assert set(holdfast.open_checkpoint(path).tensors) == {"model.w", "model.big"}
    return path


@pytest.fixture(autouse=True)
def bounded(tmp_path: Path) -> Iterator[None]:
    """Whatever is refused is refused soon, in little memory, and nothing that it names has been run."""
    tracemalloc.start()
    begun = time.process_time()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - begun < SECONDS_MAX
    assert peak < MEMORY_BYTES_MAX
    assert not (tmp_path / "was-here").exists()


def edited(folder: Path, change: Callable[[Any], object]) -> None:
    """Change what `.metadata` says."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def place(metadata: Any, key: str, **fields: object) -> None:
    (index,) = (each for each in metadata.storage_data if each.fqn == key)
    metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)


def place_of(folder: Path, key: str) -> Any:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def refused(folder: Path, kind: type[CheckpointError], match: str) -> None:
    with pytest.raises(kind, match=match):
        holdfast.open_checkpoint(folder)
    with pytest.raises(kind, match=match):
        holdfast.load(folder, {"model": {"w": torch.zeros(3, 4), "big": torch.zeros(30_000)}}, strict=False)


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def test_metadata_that_runs_a_command(folder: Path, tmp_path: Path) -> None:
    edited(folder, lambda metadata: setattr(metadata, "planner_data", Calls(os.system, f"touch {tmp_path}/was-here")))
    refused(folder, InvalidError, r"\.metadata, byte \d+: 'posix\.system'")


def test_an_object_that_runs_a_command(folder: Path, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(Calls(os.system, f"touch {tmp_path}/was-here"), stream)  # noqa: TID251 - what it refuses
    (folder / "evil.distcp").write_bytes(stream.getvalue())
    edited(folder, lambda m: place(m, "s", relative_path="evil.distcp", offset=0, length=len(stream.getvalue())))
    refused(folder, InvalidError, r"evil\.distcp.*'posix\.system'")


def test_an_object_that_is_a_bare_pickle_and_runs_a_command(folder: Path, tmp_path: Path) -> None:
    data = pickle.dumps(Calls(os.system, f"touch {tmp_path}/was-here"))
    (folder / "evil.distcp").write_bytes(data)
    edited(folder, lambda m: place(m, "s", relative_path="evil.distcp", offset=0, length=len(data)))
    refused(folder, InvalidError, r"evil\.distcp.*'posix\.system'")


def test_a_tensor_that_runs_a_command(folder: Path, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save([torch.ones(3, 4), Calls(os.system, f"touch {tmp_path}/was-here")], stream)  # noqa: TID251 - refused
    (folder / "evil.distcp").write_bytes(stream.getvalue())
    edited(folder, lambda m: place(m, "model.w", relative_path="evil.distcp", offset=0, length=len(stream.getvalue())))
    refused(folder, InvalidError, r"evil\.distcp.*'posix\.system'")


def test_an_object_where_a_tensor_should_be(folder: Path) -> None:
    info = place_of(folder, "a")
    edited(folder, lambda m: (m.state_dict_metadata.pop("a"), place(m, "model.w", **vars(info))))
    refused(folder, CorruptError, r"model\.w: byte \d+ holds list; expected a tensor")


def test_files_without_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()
    refused(folder, MissingError, r"\.distcp\) and no \.metadata")


def test_a_file_that_is_not_there(folder: Path) -> None:
    (folder / DATA).unlink()
    refused(folder, MissingError, DATA)


@pytest.mark.parametrize("left", [0.0, 0.3, 0.999])
def test_a_file_cut_short(folder: Path, left: float) -> None:
    data = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(data[: int(len(data) * left)])
    refused(folder, CorruptError, r"ends at byte \d+.*Was it cut short")


@pytest.mark.parametrize("left", [0, 1, 10, 0.5, 0.99])
def test_metadata_cut_short(folder: Path, left: float) -> None:
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: left if isinstance(left, int) else int(len(data) * left)])
    with pytest.raises(CheckpointError):
        holdfast.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "fields", "match"),
    [
        ("model.w", {"offset": 1 << 70}, r"Expected `int` <= \d+ - at `\$\.offset`"),
        ("model.w", {"offset": -8}, r"Expected `int` >= 0 - at `\$\.offset`"),
        ("model.w", {"offset": 2.5}, r"Expected `int`, got `float` - at `\$\.offset`"),
        ("model.w", {"length": 1 << 61}, "ends at byte"),
        ("model.w", {"relative_path": 7}, r"Expected `str`, got `int` - at `\$\.relative_path`"),
        ("model.w", {"offset": 0}, "ends at byte .*, and another starts at"),
        ("s", {"offset": 3}, "ends at byte .*, and another starts at"),
    ],
)
def test_items_that_lie_elsewhere(folder: Path, key: str, fields: dict[str, object], match: str) -> None:
    edited(folder, lambda metadata: place(metadata, key, **fields))
    refused(folder, CorruptError, match)


def test_two_things_at_one_place(folder: Path) -> None:
    info = place_of(folder, "a")
    edited(folder, lambda metadata: place(metadata, "s", offset=info.offset, length=info.length))
    refused(folder, CorruptError, "two items that begin at byte")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "", "a\0b"])
def test_files_outside_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_bytes((folder / DATA).read_bytes())
    edited(folder, lambda metadata: place(metadata, "model.w", relative_path=name))
    with pytest.raises((InvalidError, CorruptError), match=r"expected a path|at `\$\.relative_path`"):
        holdfast.open_checkpoint(folder)


def test_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes((folder / DATA).read_bytes())
    (folder / DATA).unlink()
    (folder / DATA).symlink_to(tmp_path / "outside")
    refused(folder, InvalidError, "link that leads out of the folder")


def test_a_fifo(folder: Path) -> None:
    (folder / DATA).unlink()
    os.mkfifo(folder / DATA)
    refused(folder, InvalidError, "not a regular file")


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.chunks.append(chunk((1, 0), (3, 4))), "expected one inside"),
        (lambda t: t.chunks.append(chunk((0,), (3,))), "expected one inside"),
        (lambda t: t.chunks.append(chunk((1, 1), (1, 1))), "no file is stated for it"),
        (lambda t: setattr(t, "chunks", 7), r"Expected `array`, got `int` - at `\$\.chunks`"),
        (lambda t: setattr(t, "size", torch.Size([1 << 40, 1 << 40])), "expected fewer elements"),
        (lambda t: setattr(t, "size", torch.Size([4, 4])), "leave holes or overlap"),
        (lambda t: setattr(t, "size", (3, -4)), r"Expected `int` >= 0 - at `\$\.size\[1\]`"),
        (lambda t: setattr(t, "size", (1,) * 1000), r"Expected `array` of length <= 64 - at `\$\.size`"),
        (lambda t: setattr(t, "size", torch.Size([4, 3])), "expected"),
        (lambda t: setattr(t.properties, "dtype", torch.int32), r"holds float32 \[3, 4\].*expected int32"),
        (lambda t: setattr(t.properties, "dtype", "float32"), "expected dtype and layout"),
        (lambda t: t.chunks.clear(), "leave holes or overlap"),
    ],
)
def test_tensors_that_are_not_as_stated(folder: Path, change: Callable[[Any], object], match: str) -> None:
    edited(folder, lambda metadata: change(metadata.state_dict_metadata["model.w"]))
    with pytest.raises(CorruptError, match=match):
        holdfast.open_checkpoint(folder).read("model.w")


def test_a_sparse_tensor(folder: Path) -> None:
    edited(folder, lambda m: setattr(m.state_dict_metadata["model.w"].properties, "layout", torch.sparse_coo))
    refused(folder, InvalidError, r"model\.w: has layout 'torch\.sparse_coo'")


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("s",), "s": ("s", "x")},
        {"model.w": ("model", 0, "w")},
        {"a": ("a",) * 5000},
        {"a": 7, "s": ("s", None)},
    ],
)
def test_paths_that_are_not_those_of_the_keys_are_not_followed(folder: Path, paths: dict[str, object]) -> None:
    edited(folder, lambda metadata: metadata.planner_data.update(paths))
    assert holdfast.open_checkpoint(folder).objects["s"] == "x"


def renamed(metadata: Any, old: str, new: str, path: tuple[object, ...]) -> None:
    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
    for index in [index for index in metadata.storage_data if index.fqn == old]:
        metadata.storage_data[replace_key(index, new)] = metadata.storage_data.pop(index)
    metadata.planner_data[new] = path


def replace_key(index: Any, fqn: str) -> Any:
    return type(index)(fqn, index.offset, index.index)


def test_a_list_of_a_billion_places(folder: Path) -> None:
    edited(folder, lambda metadata: renamed(metadata, "a", "a.1000000000", ("a", 1_000_000_000)))
    refused(folder, CorruptError, "a list of 1000000001, with 1 stored")


def test_a_leaf_inside_a_leaf(folder: Path) -> None:
    edited(folder, lambda metadata: renamed(metadata, "a", "s.x", ("s", "x")))
    refused(folder, CorruptError, r"s\.x|'s'")


def test_a_list_that_is_a_dict_too(folder: Path) -> None:
    edited(folder, lambda metadata: renamed(metadata, "a", "model.0", ("model", 0)))
    refused(folder, CorruptError, "a list and a dict")


def test_a_path_of_a_thousand_levels(folder: Path) -> None:
    edited(folder, lambda metadata: renamed(metadata, "a", ".".join("a" * 1000), ("a",) * 1000))
    refused(folder, InvalidError, "containers deep")


@pytest.mark.parametrize("what", ["state_dict_metadata", "storage_data", "whole"])
def test_something_else_in_place_of_a_part(folder: Path, what: str) -> None:
    if what == "whole":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps([metadata]))
    else:
        edited(folder, lambda metadata: setattr(metadata, what, [1, 2]))
    refused(folder, CorruptError, "[Ee]xpected")


@pytest.mark.long
def test_a_flipped_byte_anywhere_in_an_archive_ends_in_a_typed_error_or_in_a_tensor_as_stated(folder: Path) -> None:
    data = bytearray((folder / DATA).read_bytes())
    info = place_of(folder, "model.w")
    for at in range(info.offset, info.offset + info.length, 7):
        changed = bytes((data[at] ^ 0x41,))
        (folder / DATA).write_bytes(data[:at] + changed + data[at + 1 :])
        try:
            found = holdfast.open_checkpoint(folder)
            assert found.tensors["model.w"].shape == (3, 4)
            found.read("model.w")
        except CheckpointError:
            continue
