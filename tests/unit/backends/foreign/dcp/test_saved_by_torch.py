"""Checkpoints that `torch.distributed.checkpoint` writes in one process, read where they lie."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import holdfast
from holdfast.base.geometry.dtype import DTYPES
from holdfast.errors import CorruptError, InvalidError
from tests.support.small_networks import plain


def saved(path: Path, state: Mapping[str, object], planner: Any = None, **writer: Any) -> Path:
    """Save a state as torch does in one process, and say nothing of there being only one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=FileSystemWriter(path, **writer), planner=planner, no_dist=True)
    return path


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_reads(path: Path, expected: Mapping[str, torch.Tensor]) -> None:
    found = holdfast.open_checkpoint(path)
    assert set(found.tensors) == set(expected)
    for fqn, tensor in expected.items():
        spec = found.tensors[fqn]
        array = found.read(fqn)
        assert isinstance(array, np.ndarray)
        assert (spec.dtype, spec.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert array.tobytes() == bits(tensor), fqn


def some_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of every element type, thousands of them alike but for their elements, and odd ones."""
    random = torch.Generator().manual_seed(4)
    found = {
        f"of.{name}": torch.randint(0, 2, (3, 16), generator=random, dtype=torch.uint8).repeat(1, 16).view(dtype)
        for name in DTYPES
        if (dtype := getattr(torch, name)).itemsize
    }
    found |= {f"alike.{number}": torch.full((5,), float(number)) for number in range(300)}
    found |= {f"twins.{number}": torch.full((1, 5), number, dtype=torch.int32) for number in range(40)}
    found |= {
        "none": torch.zeros(0, 4),
        "one": torch.tensor(3.5, dtype=torch.float64),
        "view": torch.arange(40).reshape(5, 8)[1:3],
        "wide": torch.randn(300, 700, generator=random),
        "row": torch.randn(1, 6, generator=random).t().contiguous().t(),
    }
    return found


@pytest.mark.parametrize("writer", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_every_tensor_reads_bit_for_bit(tmp_path: Path, writer: Mapping[str, Any]) -> None:
    tensors = some_tensors()
    if "single_file_per_rank" in writer:
        tensors = {name: each for name, each in tensors.items() if "." not in name or name.endswith("7")}
    path = saved(tmp_path / "ck", tensors, **writer)
    assert_reads(path, tensors)


def test_tensors_in_safetensors_blobs(tmp_path: Path) -> None:
    tensors = {name: each for name, each in some_tensors().items() if not name.endswith(("complex32", "complex128"))}
    path = saved(
        tmp_path / "ck",
        {**tensors, "note": ["x"]},
        serialization_format=SerializationFormat.SAFETENSORS,
        thread_count=2,
    )
    assert_reads(path, tensors)
    assert holdfast.open_checkpoint(path).objects == {"note": ["x"]}


@pytest.mark.parametrize("old", [False, True], ids=["now", "as before torch 2.4"])
def test_the_nested_state_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    if old:
        monkeypatch.setattr(_nested_dict._version, "_derived_version", "2_3")
    queue = [torch.arange(3), {"inner": torch.ones(2), "label": "b"}, [torch.zeros(1), None]]
    state = {
        "step": 12,
        "nothing": None,
        "pair": (1, ("x", 2.5)),
        "plain": {"a": [1, {"b": 2}], "c.d": b"bytes"},
        "deep": {"x": {"y": {"z": torch.arange(4), "w": "v"}}},
        "queue": queue,
        "numpy": np.arange(3, dtype="<i2"),
    }
    path = saved(tmp_path / "ck", state)
    found = holdfast.open_checkpoint(path)
    assert found.step == 12
    assert found.remarks == ()
    objects = dict(found.objects)
    assert objects.pop("numpy").tolist() == [0, 1, 2]
    assert {key: objects[key] for key in ("step", "nothing", "pair", "plain")} == {
        key: state[key] for key in ("step", "nothing", "pair", "plain")
    }
    assert objects["deep"] == {"x": {"y": {"w": "v"}}}
    target: dict[str, Any] = {"queue": [], "deep": {"x": {"y": {"z": torch.zeros(4, dtype=torch.int64)}}}}
    holdfast.load(path, target, strict=False)
    assert torch.equal(target["queue"][0], queue[0])
    assert torch.equal(target["queue"][1]["inner"], torch.ones(2))
    assert target["queue"][1]["label"] == "b"
    assert torch.equal(target["queue"][2][0], torch.zeros(1))
    assert target["queue"][2][1] is None
    assert torch.equal(target["deep"]["x"]["y"]["z"], torch.arange(4))


def test_tensors_inside_an_object_are_listed(tmp_path: Path) -> None:
    state = {"rng": ({"torch": torch.arange(9, dtype=torch.uint8)}, "seed")}
    path = saved(tmp_path / "ck", state)
    assert_reads(path, {"rng.0.torch": torch.arange(9, dtype=torch.uint8)})
    target: dict[str, Any] = {"rng": None}
    holdfast.load(path, target)
    assert torch.equal(target["rng"][0]["torch"], torch.arange(9, dtype=torch.uint8))


def test_keys_that_were_not_flattened_are_names(tmp_path: Path) -> None:
    state = {"model.weight": torch.arange(6.0), "rng/shard_0_1": {"seed": 3}}
    path = saved(tmp_path / "ck", state, planner=DefaultSavePlanner(flatten_state_dict=False))
    assert_reads(path, {"model.weight": torch.arange(6.0)})
    assert holdfast.open_checkpoint(path).objects == {"rng/shard_0_1": {"seed": 3}}


def test_elements_in_another_order_than_row_by_row_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"model": {"w": torch.arange(6.0).reshape(2, 3).t()}})
    with pytest.raises(InvalidError, match=r"model\.w: is stored with strides \[1, 3\].*\.contiguous\(\)"):
        holdfast.open_checkpoint(path)


class Upside(StreamTransformExtension):
    """Turns every bit, as compression or encryption would."""

    @staticmethod
    def registry_name() -> str:
        return "upside"

    @staticmethod
    def from_descriptor(version: str) -> Upside:
        return Upside()

    def get_descriptor(self) -> str:
        return "upside/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:
        return input


def test_what_went_through_an_extension_is_refused_by_its_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"w": torch.arange(6)}, _extensions=[Upside()])
    with pytest.raises(InvalidError, match=r"w is stored through \['upside/1'\].*without extensions"):
        holdfast.open_checkpoint(path)


class Halves(torch.Tensor):
    """A tensor of which one rank writes two halves."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __create_write_items__(self, fqn: str, each: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([start])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size([start]), torch.Size([2])),
                    properties=TensorProperties(dtype=torch.float32),
                    size=torch.Size([4]),
                ),
            )
            for start in (0, 2)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return torch.arange(4.0)[index.offset[0] : index.offset[0] + 2]


def test_parts_that_one_rank_writes(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"a": Halves()})
    assert_reads(path, {"a": torch.arange(4.0)})
    assert len(holdfast.open_checkpoint(path).pieces("a")) == 2


def test_a_part_that_dcp_lost_in_a_blob_is_missed(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"a": Halves()}, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(CorruptError, match=r"have no a at \(0,\)\. DCP loses"):
        holdfast.open_checkpoint(path)


def test_the_metadata_file_itself_may_be_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"w": torch.arange(6)})
    assert_reads(path / ".metadata", {"w": torch.arange(6)})


def test_what_each_rank_saved_by_itself_is_refused_by_its_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"w": torch.arange(6)})
    (path / ".metadata").rename(path / "__0.metadata")
    with pytest.raises(InvalidError, match="use_collectives=False"):
        holdfast.open_checkpoint(path)


def test_other_verbs(tmp_path: Path) -> None:
    net = plain(1)
    path = saved(tmp_path / "ck", {"model": net.state_dict(), "note": "x"})
    ours = tmp_path / "ours"
    holdfast.save(ours, {"model": net, "note": "x"}, process_group=False)
    assert holdfast.diff(path, ours).equal
    with torch.no_grad():
        net.head.bias[1] += 1
    other = saved(tmp_path / "other", {"model": net.state_dict(), "note": "y"})
    found = holdfast.diff(path, other)
    assert [each.fqn for each in found.tensors if each.verdict.name != "EQUAL"] == ["model.head.bias"]
    assert list(holdfast.open_checkpoint(path).verify()) == []


def test_what_is_not_dcps_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"something else")
    with pytest.raises(holdfast.CheckpointError):
        holdfast.open_checkpoint(tmp_path)
