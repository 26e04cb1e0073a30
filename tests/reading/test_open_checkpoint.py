"""open_checkpoint: any part of any tensor, without a job and without torch."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import holdfast
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange
from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from tests.doubles.faults import Faults, FaultyStore
from tests.support.tuning import tuned

SMALL_CHUNKS = tuned(Settings(chunk_bytes=PAGE_BYTES), window_bytes=PAGE_BYTES)
"""Chunks so small that tensors of a test have many."""

SHAPES = {"cube": (23, 31, 29), "matrix": (700, 90), "line": (5000,), "point": (), "empty": (4, 0, 3), "one": (1, 1)}
UNSIGNED = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "float4_e2m1fn_x2": "uint8",
    "complex32": "uint32",
}


def random_bits(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any bits its type can have, NaNs with payloads among them."""
    count = int(np.prod(shape, dtype=int))
    if dtype == "bool":
        return torch.from_numpy(np.random.default_rng(1).integers(0, 2, shape).astype(bool))
    raw = np.random.default_rng(1).integers(0, 256, count * DTYPES[dtype].itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    return {
        name: np.arange(0, 7 * np.prod(shape, dtype=int), 7, dtype=np.int32).reshape(shape)
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, np.ndarray]) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 8))
    model[1].tied = model[0].weight
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias], "lr": 0.25, "weight_decay": 0.0}]
    )
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = {
        **{name: torch.from_numpy(array.copy()) for name, array in arrays.items()},
        **{f"all.{name}": random_bits(name, (17, 300)) for name in DTYPES},
        "model": model,
        "optimizer": optimizer,
        "plain": {"epoch": 3, "names": ["a", "b"], "best": (1.5, float("inf")), "nested": {"deep": b"\x00"}},
    }
    path = tmp_path_factory.mktemp("reading") / "checkpoint"
    holdfast.save(path, state, process_group=False, settings=SMALL_CHUNKS)
    return path


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> Checkpoint:
    return holdfast.open_checkpoint(path)


def observed(path: Path) -> tuple[Checkpoint, Faults]:
    """A checkpoint, and the record of every operation on its store."""
    faults = Faults()
    store = FaultyStore(LocalStore(path, settings=SMALL_CHUNKS), faults)
    return Checkpoint(CheckpointLocation(store, "", None), SMALL_CHUNKS, lambda array, dtype: array), faults


class CountingStore(LocalStore):
    """Keeps the byte ranges that were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, settings=SMALL_CHUNKS)
        self.ranges: list[tuple[int, int]] = []

    def read_into(self, key, ranges, buffers, on_range=None):  # type: ignore[no-untyped-def]
        self.ranges += ranges
        super().read_into(key, ranges, buffers, on_range)


# ------------------------------------------------------------------------------------------------ what it tells


def test_tensors_tell_dtype_shape_and_bytes(checkpoint: Checkpoint, arrays: dict[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        info = checkpoint.tensors[name]
        assert (info.dtype, info.shape, info.bytes) == ("int32", array.shape, array.nbytes)
    for name in DTYPES:
        assert checkpoint.tensors[f"all.{name}"].dtype == name
    assert list(checkpoint.tensors) == sorted(checkpoint.tensors)


def test_objects_are_nested_as_saved_with_hyperparameters_by_fqn(checkpoint: Checkpoint) -> None:
    objects = checkpoint.objects
    assert objects["plain"] == {
        "epoch": 3,
        "names": ["a", "b"],
        "best": (1.5, float("inf")),
        "nested": {"deep": b"\x00"},
    }
    groups = objects["optimizer"]["param_groups"]
    assert set(groups) == {"0.weight", "0.bias", "1.tied"}, "a tied parameter goes by all its names"
    assert groups["1.tied"] == groups["0.weight"]
    assert (groups["0.weight"]["lr"], groups["0.bias"]["lr"]) == (0.5, 0.25)
    assert groups["0.bias"]["weight_decay"] == 0.0
    assert groups["0.weight"]["betas"] == (0.9, 0.999)


KEYS = ("exp_avg", "exp_avg_sq", "step")


def test_a_tied_name_reads_the_tensor_it_is_tied_to(checkpoint: Checkpoint) -> None:
    state = {f"optimizer.state.1.tied.{key}": f"optimizer.state.0.weight.{key}" for key in KEYS}
    assert checkpoint.aliases == {"model.1.tied": "model.0.weight", **state}
    assert "model.1.tied" not in checkpoint.tensors
    assert np.array_equal(checkpoint.read("model.1.tied"), checkpoint.read("model.0.weight"))


# ----------------------------------------------------------------------------------------------- what it reads


@given(st.data())
def test_every_index_gives_what_numpy_gives(
    checkpoint: Checkpoint, arrays: dict[str, np.ndarray], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    array = arrays[name]
    index = data.draw(npst.basic_indices(array.shape, allow_newaxis=False, allow_ellipsis=True))
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, slice) and each.step is not None and each.step < 0:
            with pytest.raises(InvalidError, match="positive step"):
                checkpoint.read(name, index)
            return
    found = checkpoint.read(name, index)
    expected = array[index]
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@given(st.data())
def test_torch_indexes_alike(checkpoint: Checkpoint, arrays: dict[str, np.ndarray], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    starts = [data.draw(st.integers(0, length)) for length in arrays[name].shape]
    index = tuple(slice(start, None, data.draw(st.integers(1, 3))) for start in starts)
    found = checkpoint.read(name, index, framework="torch")
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, torch.from_numpy(arrays[name].copy())[index])


def test_numpy_integers_index_too(checkpoint: Checkpoint, arrays: dict[str, np.ndarray]) -> None:
    assert checkpoint.read("matrix", (np.int64(5), 3)) == arrays["matrix"][5, 3]
    assert np.array_equal(checkpoint.read("line", slice(np.int32(7), np.int32(9))), arrays["line"][7:9])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_bit_exactly_in_both_frameworks(checkpoint: Checkpoint, dtype: str) -> None:
    expected = random_bits(dtype, (17, 300))
    found = checkpoint.read(f"all.{dtype}")
    assert found.dtype == np.dtype(UNSIGNED.get(dtype, dtype))
    assert found.tobytes() == bits(expected)
    tensor = checkpoint.read(f"all.{dtype}", framework="torch")
    assert tensor.dtype is getattr(torch, dtype)
    assert bits(tensor) == bits(expected)
    part = checkpoint.read(f"all.{dtype}", (slice(3, 15, 2), slice(7, 290)), framework="torch")
    assert bits(part) == bits(expected[3:15:2, 7:290])


def test_what_is_read_belongs_to_the_caller(checkpoint: Checkpoint) -> None:
    first = checkpoint.read("line")
    first[:] = 0
    assert checkpoint.read("line")[1] == 7
    tensor = checkpoint.read("line", framework="torch")
    tensor.zero_()
    assert checkpoint.read("line", 1) == 7


# ------------------------------------------------------------------------------------------- how little it reads


def test_opening_reads_the_manifest_and_nothing_else(path: Path) -> None:
    checkpoint, faults = observed(path)
    assert {operation.subject for operation in faults.seen} == {"manifest.json"}
    _ = checkpoint.objects, checkpoint.aliases, checkpoint.step, checkpoint.manifest
    assert {operation.subject for operation in faults.seen} == {"manifest.json"}
    _ = checkpoint.tensors
    touched = {operation.subject.rpartition("/")[2] for operation in faults.seen}
    assert touched == {"manifest.json", "index-00000.msgpack"}, "no pack is needed to tell what there is"


def test_the_index_is_read_once(path: Path) -> None:
    checkpoint, faults = observed(path)
    for _ in range(3):
        checkpoint.read("point")
        _ = checkpoint.tensors
    assert len([each for each in faults.seen if each.name == "get" and "index" in each.subject]) == 1


@given(st.data())
def test_a_slice_reads_only_the_chunks_it_meets(path: Path, arrays: dict[str, np.ndarray], data: st.DataObject) -> None:
    store = CountingStore(path)
    checkpoint = Checkpoint(CheckpointLocation(store, "", None), SMALL_CHUNKS, lambda array, dtype: array)
    name = data.draw(st.sampled_from(["cube", "matrix", "line"]))
    array = arrays[name]
    index = tuple(
        slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)), label="range"))) for n in array.shape
    )
    assert np.array_equal(checkpoint.read(name, index), array[index])
    (piece,) = checkpoint.pieces(name)
    touched = np.arange(array.size).reshape(array.shape)[index].reshape(-1) * array.itemsize // PAGE_BYTES
    expected = set(touched.tolist())
    chunks = []
    for start, stop in store.ranges:
        first, last = (start - piece.offset) / PAGE_BYTES, -(-(stop - piece.offset) // PAGE_BYTES)
        assert first == int(first), "reads start at a chunk"
        chunks += range(int(first), last)
    assert sorted(chunks) == sorted(expected), "each chunk that intersects, once, and no other"


def test_a_damaged_chunk_spoils_only_what_meets_it(path: Path, tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    import shutil

    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    (piece,) = holdfast.open_checkpoint(copy).pieces("matrix")
    (pack,) = copy.glob(f"*/{piece.pack}")
    data = bytearray(pack.read_bytes())
    data[piece.offset + 3 * PAGE_BYTES + 17] ^= 4
    pack.write_bytes(data)
    checkpoint = holdfast.open_checkpoint(copy)
    row_bytes = arrays["matrix"].strides[0]
    last_whole = 3 * PAGE_BYTES // row_bytes
    assert np.array_equal(checkpoint.read("matrix", slice(0, last_whole)), arrays["matrix"][:last_whole])
    assert np.array_equal(checkpoint.read("line"), arrays["line"])
    with pytest.raises(CorruptError, match="matrix"):
        checkpoint.read("matrix", last_whole + 1)


# -------------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [
        ("matrix", 700, "index 700 of a dimension of length 700"),
        ("matrix", (0, -91), "index -91 of a dimension of length 90"),
        ("matrix", (0, 0, 0), "index of 3 dimensions; the tensor has 2"),
        ("point", 0, "index of 1 dimensions; the tensor has 0"),
        ("matrix", slice(None, None, -1), "slice step -1"),
        ("matrix", (..., ...), "one Ellipsis"),
        ("matrix", (..., 0, 0, 0), "dimensions"),
        ("matrix", "0", "expected integers and slices"),
        ("matrix", [0, 1], "expected integers and slices"),
        ("matrix", True, "expected integers and slices"),
        ("matrix", 1.0, "expected integers and slices"),
        ("matrix", (None,), "expected integers and slices"),
        ("matrix", np.zeros((700, 90), dtype=bool), "expected integers and slices"),
        ("matrix", slice(0.5, 1), "expected integers and slices"),
        ("matrix", slice(None, None, 0), "step"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(checkpoint: Checkpoint, name: str, index: object, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        checkpoint.read(name, index)


def test_a_name_that_is_not_there_is_missing_and_near_ones_are_told(checkpoint: Checkpoint) -> None:
    with pytest.raises(MissingError, match=r"model\.0\.weight"):
        checkpoint.read("network.0.weight")
    with pytest.raises(MissingError):
        checkpoint.read("")


def test_an_unknown_framework_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(InvalidError, match="expected 'numpy' or 'torch'"):
        checkpoint.read("line", framework="jax")


def test_a_root_is_refused_and_a_step_named(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(4, {"x": torch.ones(2)}).wait()
    with pytest.raises(InvalidError, match="step-000000000004"):
        holdfast.open_checkpoint(tmp_path / "run")
    assert holdfast.open_checkpoint(tmp_path / "run" / "step-000000000004").step == 4


def test_nothing_there_is_missing_and_nothing_is_made(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(MissingError):
            holdfast.open_checkpoint(path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_path_is_refused(path: Path) -> None:
    for wrong in ({}, 5, None, b"bytes", "", "nothing://host/x"):
        with pytest.raises(InvalidError):
            holdfast.open_checkpoint(wrong)
    assert holdfast.open_checkpoint(str(path)).url == holdfast.open_checkpoint(f"file://{path}").url


# ---------------------------------------------------------------------------------------------------- without torch

_READ = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {source!r})
import holdfast
checkpoint = holdfast.open_checkpoint({path!r})
assert checkpoint.read("matrix", (3, slice(1, 4))).tolist() == {expected!r}
assert checkpoint.read("all.bfloat16").dtype.name == "uint16"
assert checkpoint.objects["plain"]["epoch"] == 3
assert list(checkpoint.verify()) == []
try:
    checkpoint.read("matrix", framework="torch")
except holdfast.InvalidError as error:
    assert "holdfast[torch]" in str(error), error
else:
    raise AssertionError("torch is not there")
try:
    holdfast.load({path!r}, {{}})
except holdfast.InvalidError as error:
    assert "holdfast[torch]" in str(error), error
else:
    raise AssertionError("torch is not there")
"""

_NOT_IMPORTED = """
import sys
sys.path.insert(0, {source!r})
import holdfast
holdfast.open_checkpoint({path!r}).read("matrix")
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("program", [_READ, _NOT_IMPORTED], ids=["absent", "there"])
def test_reading_needs_no_torch_and_imports_none(path: Path, arrays: dict[str, np.ndarray], program: str) -> None:
    source = str(Path(holdfast.__file__).parents[1])
    text = program.format(source=source, path=str(path), expected=arrays["matrix"][3, 1:4].tolist())
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", (0, 1))
def test_a_bit_that_is_flipped_on_the_way_is_no_damage(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chunk, which is read first, or in a header; a bit that is flipped twice is damage."""
    url = f"memory://{uuid.uuid4().hex}"
    holdfast.save(url, {"w": torch.arange(5000.0)}, process_group=False)
    read_into = MemoryStore.read_into
    reads: list[str] = []
    flipped = [number]

    def flip(
        store: MemoryStore, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None
    ) -> None:
        read_into(store, key, ranges, buffers, on_range)
        if len(reads) in flipped:
            buffers[0].cast("B")[-1] ^= 1
        reads.append(key)

    checkpoint = holdfast.open_checkpoint(url)
    monkeypatch.setattr(MemoryStore, "read_into", flip)
    assert list(checkpoint.verify()) == []
    assert len(reads) == 3
    reads.clear()
    flipped.append(number + 1)
    assert len(list(checkpoint.verify())) == 1
