"""What `.metadata` says, as several versions of torch wrote it, and what cannot be."""

from __future__ import annotations

import pickle  # noqa: TID251 - writes as older versions of torch did what is read here without it
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TensorPropertiesBefore23

import holdfast
from holdfast.backends.foreign.dcp.metadata import Item, Saved, saved_of
from holdfast.backends.foreign.pickles.objects import OpaqueObject
from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.errors import CorruptError
from tests.unit.backends.foreign.dcp.test_saved_by_torch import assert_reads, saved


def test_tensors_chunks_objects_and_paths(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"model": {"w": torch.ones(2, 3, dtype=torch.bfloat16)}, "note": "x"})
    found = saved_of(unpickled((path / ".metadata").read_bytes(), "here"), "here")
    (note,) = found.objects.values()
    ((_, item),) = found.chunks["model.w"]
    assert found == Saved(
        tensors={"model.w": TensorSpec("model.w", "bfloat16", (2, 3))},
        chunks={"model.w": [(Box((0, 0), (2, 3)), Item("__0_0.distcp", note.stop, item.stop))]},
        objects={"note": Item("__0_0.distcp", 0, note.stop)},
        paths={"model.w": ("model", "w"), "note": ("note",)},
    )
    assert item.stop == (path / "__0_0.distcp").stat().st_size


def test_as_torch_before_2_3_wrote_it(tmp_path: Path) -> None:
    """Its properties were of another class, and of storage and of the save it said less."""
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.ones(3, dtype=torch.float16)}
    path = saved(tmp_path / "ck", {"model": tensors})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for entry in metadata.state_dict_metadata.values():
        entry.properties = TensorPropertiesBefore23(dtype=entry.properties.dtype)
    del metadata.storage_meta, metadata.version
    for protocol in (2, 3, 4, 5):
        (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        assert_reads(path, {f"model.{key}": tensor for key, tensor in tensors.items()})


def test_fields_of_a_version_to_come_are_passed_over(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"w": torch.arange(3)})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.something_new = {"a": 1}
    for info in metadata.storage_data.values():
        info.something_new = [1]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_reads(path, {"w": torch.arange(3)})


def test_a_chunk_that_every_replica_states_is_one(tmp_path: Path) -> None:
    """Without deduplication each rank adds the whole tensor to the list, and the last one's bytes are kept."""
    path = saved(tmp_path / "ck", {"w": torch.arange(3)})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks += chunks * 3
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_reads(path, {"w": torch.arange(3)})
    assert len(holdfast.open_checkpoint(path).pieces("w")) == 1


def test_empty_chunks_need_no_place(tmp_path: Path) -> None:
    """A rank that uneven sharding leaves nothing states an empty chunk behind the end."""
    path = saved(tmp_path / "ck", {"w": torch.arange(3)})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    chunk = type(metadata.state_dict_metadata["w"].chunks[0])
    metadata.state_dict_metadata["w"].chunks.append(chunk(torch.Size([3]), torch.Size([0])))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_reads(path, {"w": torch.arange(3)})


@pytest.mark.parametrize("value", [None, 3, {"state_dict_metadata": {}}, [], OpaqueObject("torch.Other", (), {})])
def test_what_is_no_metadata(value: Any) -> None:
    with pytest.raises(CorruptError, match=r"here: found .*; expected Metadata"):
        saved_of(value, "here")


def test_a_state_of_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", {"empty": {}})
    found = holdfast.open_checkpoint(path)
    assert not found.tensors
    assert found.objects == {}
