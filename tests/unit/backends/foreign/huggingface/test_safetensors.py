"""Safetensors files, and a Hugging Face model in several; the stock library writes them and judges with us."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

import holdfast
from holdfast.backends.foreign.huggingface.safetensors_reader import SafetensorsFormat
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.dtype import BY_SAFETENSORS
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def every_dtype() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    found = {}
    for dtype in BY_SAFETENSORS.values():
        bits = torch.randint(0, 2 if dtype.name == "bool" else 256, (3, 5 * dtype.itemsize), generator=chance)
        found[dtype.name] = bits.to(torch.uint8).view(getattr(torch, dtype.name))
    return found


def test_the_framework_that_metadata_tells_is_no_tied_name(tmp_path: Path) -> None:
    save_file({"pt": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = holdfast.open_checkpoint(tmp_path / "x.safetensors")
    assert list(found.tensors) == ["model.pt"]
    held = {"pt": torch.zeros(2)}
    holdfast.load(tmp_path / "x.safetensors", {"model": held}, process_group=False)
    assert torch.equal(held["pt"], torch.ones(2))


def test_remarks_on_what_an_index_leaves_out_have_an_end(tmp_path: Path) -> None:
    save_file({f"w{number}": torch.ones(1) for number in range(300)}, tmp_path / FIRST)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w0": FIRST}}))
    remarks = holdfast.open_checkpoint(tmp_path).remarks
    assert len(remarks) == 101
    assert "w1 is left out" in remarks[0]


def raw(tensor: object) -> bytes:
    assert isinstance(tensor, torch.Tensor)
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sharded(folder: Path, weight_map: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
    """A model in two files with an index, as Hugging Face lays it out."""
    folder.mkdir(exist_ok=True)
    state = {"a.weight": torch.randn(7, 5), "a.bias": torch.randn(7), "b.weight": torch.randn(2, 3, 4)}
    save_file({name: state[name] for name in ("a.weight", "a.bias")}, folder / FIRST, metadata={"format": "pt"})
    save_file({"b.weight": state["b.weight"]}, folder / SECOND, metadata={"format": "pt"})
    if weight_map is None:
        weight_map = {"a.weight": FIRST, "a.bias": FIRST, "b.weight": SECOND}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 264}, "weight_map": weight_map}))
    return state


def test_every_dtype_is_read_bit_for_bit(tmp_path: Path) -> None:
    save_file(every_dtype(), tmp_path / "model.safetensors")
    checkpoint = holdfast.open_checkpoint(tmp_path)
    assert {fqn: info.dtype for fqn, info in checkpoint.tensors.items()} == {f"model.{n}": n for n in every_dtype()}
    for name, tensor in every_dtype().items():
        read = checkpoint.read(f"model.{name}", framework="torch")
        assert isinstance(read, torch.Tensor)
        assert read.dtype == tensor.dtype
        assert raw(read) == raw(tensor)
        assert raw(checkpoint.read(f"model.{name}", np.s_[1:, 2], framework="torch")) == raw(tensor[1:, 2])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=20), st.lists(st.integers(0, 5), max_size=4), max_size=6))
def test_any_names_and_shapes_lie_where_the_stock_library_put_them(shapes: dict[str, list[int]]) -> None:
    shapes = {name: shape for name, shape in shapes.items() if name != "__metadata__"}
    state = {name: torch.full(shape, number, dtype=torch.int16) for number, (name, shape) in enumerate(shapes.items())}
    data = save(state)
    store = MemoryStore("unit-safetensors")
    store.put("model.safetensors", data)
    listing = SafetensorsFormat().listing(store, "model.safetensors")
    assert {fqn: list(spec.global_shape) for fqn, spec in listing.tensors.items()} == {
        f"model.{name}": shape for name, shape in shapes.items()
    }
    for name, tensor in state.items():
        (piece,) = listing.pieces[f"model.{name}"]
        assert data[piece.offset : piece.offset + 2 * tensor.numel()] == raw(tensor)


@pytest.mark.parametrize("named", ["", INDEX])
def test_a_model_in_several_files_loads_into_a_module(tmp_path: Path, named: str) -> None:
    state = sharded(tmp_path)
    held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    report = holdfast.load(tmp_path / named, {"model": held}, process_group=False)
    assert report.missing == report.unexpected == ()
    assert all(torch.equal(held[name], tensor) for name, tensor in state.items())
    checkpoint = holdfast.open_checkpoint(tmp_path / named)
    assert checkpoint.objects["metadata"] == {"format": "pt"}
    assert checkpoint.origin == "safetensors"
    assert checkpoint.step is None


def test_one_file_of_several_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert list(holdfast.open_checkpoint(tmp_path / SECOND).tensors) == ["model.b.weight"]


def test_files_without_an_index_are_read_together(tmp_path: Path) -> None:
    state = sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    assert set(holdfast.open_checkpoint(tmp_path).tensors) == {f"model.{name}" for name in state}


def test_what_the_index_does_not_name_is_left_out_and_said(tmp_path: Path) -> None:
    sharded(tmp_path, {"a.weight": FIRST, "b.weight": SECOND})
    save_file({"c": torch.ones(2)}, tmp_path / "other.safetensors")
    checkpoint = holdfast.open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {"model.a.weight", "model.b.weight"}
    assert [remark for remark in checkpoint.remarks if "a.bias is left out" in remark]


def test_a_tensor_that_lies_in_two_files_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CorruptError, match=r"w is stored in .*safetensors too"):
        holdfast.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "error", "text"),
    [
        ({"a.weight": "../x.safetensors"}, InvalidError, "names '../x.safetensors'"),
        ({"a.weight": "/etc/passwd"}, InvalidError, "names '/etc/passwd'"),
        ({"a.weight": "sub/x.safetensors"}, InvalidError, "expected .*safetensors files beside it"),
        ({"a.weight": "model.bin"}, InvalidError, "names 'model.bin'"),
        ({"a.weight": 3}, CorruptError, r"Expected `str`, got `int` - at `\$\.weight_map"),
        ([], CorruptError, r"Expected `object`, got `array` - at `\$\.weight_map`"),
        ({"a.weight": "gone.safetensors"}, MissingError, "gone.safetensors"),
        ({"a.weight": FIRST, "lost": SECOND}, MissingError, r"1 tensors are not in the files it names: lost"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map: object, error: type[Exception], text: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(save({"a.weight": torch.ones(1)}))
    folder = tmp_path / "checkpoint"
    sharded(folder, weight_map)  # type: ignore[arg-type]
    with pytest.raises(error, match=text):
        holdfast.open_checkpoint(folder)


def test_several_indexes_are_refused_unless_one_is_named(tmp_path: Path) -> None:
    state = sharded(tmp_path)
    (tmp_path / "model.fp16.safetensors.index.json").write_text((tmp_path / INDEX).read_text())
    with pytest.raises(InvalidError, match="expected one index"):
        holdfast.open_checkpoint(tmp_path)
    assert len(holdfast.open_checkpoint(tmp_path / INDEX).tensors) == len(state)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_header_is_refused_or_says_what_the_stock_library_reads(data: st.DataObject) -> None:
    """Whatever is changed, we never list what the stock library would read otherwise."""
    state = {"a.weight": torch.arange(12, dtype=torch.int16).reshape(3, 4), "b": torch.arange(5, dtype=torch.uint8)}
    whole = bytearray(save(state))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 18))
        whole[at] = data.draw(st.sampled_from([*b'0123456789"[]{},:FUI', 0, 255]))
    store = MemoryStore("unit-safetensors-damaged")
    store.put("model.safetensors", bytes(whole))
    try:
        listing = SafetensorsFormat().listing(store, "model.safetensors")
    except CheckpointError:
        return
    try:
        stock = load(bytes(whole))
    except (SafetensorError, ValueError, AttributeError):
        return  # We tell no more than the stock library does, but of names: it refuses some that we can read.
    assert {f"model.{name}" for name in stock} == set(listing.tensors)
    for name, tensor in stock.items():
        (piece,) = listing.pieces[f"model.{name}"]
        assert listing.tensors[f"model.{name}"].global_shape == tuple(tensor.shape)
        assert bytes(whole[piece.offset : piece.offset + tensor.nbytes]) == raw(tensor)
