"""Decodes an unpickled `.metadata` file: tensors, their chunks, objects, and the bytes of each.

Source: `torch/distributed/checkpoint/metadata.py` and `filesystem.py` of torch 2.0 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar, cast

import msgspec

from holdfast.backends.foreign.messages import shown
from holdfast.backends.foreign.pickles.objects import OpaqueObject, is_dtype
from holdfast.backends.foreign.typed_values import COUNT_MAX, Count, Shape, typed
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import dtype_named
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.geometry.value_class import value_class
from holdfast.errors import CorruptError, InvalidError

Path = tuple[str | int, ...]
"""Dict keys (text) and list positions (numbers) that lead to a leaf of the saved state."""

DEPTH_MAX = 100
"""The most levels of containers around a leaf. Training states use a handful."""

_T = TypeVar("_T")


@value_class
class Item:
    """Bytes of a file that one call wrote: a stream of torch.save, or all tensors of a safetensors blob."""

    file: str
    """Key of the file."""

    start: int
    """First byte."""

    stop: int
    """Byte past the last, as `.metadata` states it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of a `.metadata` file."""

    tensors: Mapping[str, TensorSpec]
    """By key."""

    chunks: Mapping[str, Sequence[tuple[Box, Item]]]
    """By key of a tensor, its boxes and the bytes that hold their elements; no box is empty."""

    objects: Mapping[str, Item]
    """Values that are not tensors, by key."""

    paths: Mapping[str, Path]
    """Path in the nested state by key; the key alone if the planner states no path."""


class _Metadata(msgspec.Struct):
    """DCP's class of this name: the fields that are read. Later versions may add fields."""

    state_dict_metadata: dict[object, object]
    storage_data: dict[object, object]
    planner_data: object = None


class _MetadataIndex(msgspec.Struct):
    """DCP's class of this name: a key, and the first coordinates of a chunk."""

    fqn: str
    offset: Shape | None = None


class _StorageInfo(msgspec.Struct):
    """DCP's class of this name: the bytes of an item."""

    relative_path: Annotated[str, msgspec.Meta(min_length=1)]
    offset: Count
    length: Count
    transform_descriptors: object = None


class _TensorStorageMetadata(msgspec.Struct):
    """DCP's class of this name: a tensor and its chunks."""

    properties: object
    size: Shape
    chunks: list[object]


class _ChunkStorageMetadata(msgspec.Struct):
    """DCP's class of this name: a box of a tensor."""

    offsets: Shape
    sizes: Shape


def saved_of(value: object, where: str) -> Saved:
    """Return the content of an unpickled `.metadata` file.

    Args:
        value: The value of the pickle.
        where: The file, for messages.
    Raises:
        CorruptError: A field is missing or of a wrong type, or two fields contradict each other.
        InvalidError: Items are compressed or encrypted, or a tensor is of a kind that Holdfast does not store.
    """
    metadata = _fields(value, _Metadata, where)
    stated = metadata.state_dict_metadata
    items = _items(metadata.storage_data, where)
    tensors: dict[str, TensorSpec] = {}
    chunks: dict[str, list[tuple[Box, Item]]] = {}
    objects: dict[str, Item] = {}
    for key, entry in stated.items():
        if not isinstance(key, str) or not key:
            raise CorruptError(f"{where}: a key is {shown(key)}; expected a name. Read another copy")
        kind = entry.qualname.rpartition(".")[2] if isinstance(entry, OpaqueObject) else type(entry).__name__
        if kind == "BytesStorageMetadata":
            objects[key] = _item(items, key, None, where)
        elif kind == "TensorStorageMetadata":
            tensors[key], boxes = _tensor(key, entry, f"{where}: {key}")
            chunks[key] = [(box, _item(items, key, box.start, where)) for box in boxes]
        else:
            raise CorruptError(f"{where}: {key} is of type {kind}; expected a tensor or an object. Read another copy")
    return Saved(tensors, chunks, objects, _paths(metadata.planner_data, stated, where))


_Items = dict[tuple[str, tuple[int, ...] | None], Item]
"""By key and first coordinates of a chunk; None in place of coordinates for an object."""


def _items(storage: Mapping[object, object], where: str) -> _Items:
    """Return the bytes of each chunk and object."""
    items: _Items = {}
    for index, entry in storage.items():
        chunk = _fields(index, _MetadataIndex, f"{where}: storage_data")
        key, coordinates = chunk.fqn, chunk.offset
        info = _fields(entry, _StorageInfo, f"{where}: {key}")
        if info.transform_descriptors:
            raise InvalidError(
                f"{where}: {key} is stored through {shown(info.transform_descriptors)}; expected plain bytes. "
                "Load the checkpoint with torch.distributed.checkpoint and save it without extensions"
            )
        if (key, coordinates) in items:
            raise CorruptError(f"{where}: {key} has two entries for its part at {coordinates}; expected one")
        items[key, coordinates] = Item(info.relative_path, info.offset, info.offset + info.length)
    return items


def _item(items: _Items, key: str, coordinates: tuple[int, ...] | None, where: str) -> Item:
    item = items.get((key, coordinates))
    if item is None:
        part = "" if coordinates is None else f", part at {list(coordinates)}"
        raise CorruptError(f"{where}: {key}{part}: no file is stated for it. Did the save that wrote it fail?")
    return item


def _tensor(key: str, entry: object, where: str) -> tuple[TensorSpec, Sequence[Box]]:
    """Return a tensor and its boxes: each box once, empty boxes left out."""
    tensor = _fields(entry, _TensorStorageMetadata, where)
    properties = tensor.properties.state if isinstance(tensor.properties, OpaqueObject) else None
    # Five fields since torch 1.13: dtype, layout, requires_grad, memory format, pin_memory.
    dtype, layout = properties[:2] if isinstance(properties, tuple) and len(properties) >= 2 else (None, None)
    if not is_dtype(dtype):
        raise CorruptError(f"{where}: its properties are {shown(properties)}; expected dtype and layout")
    name = layout.args[0] if isinstance(layout, OpaqueObject) and layout.args else layout
    if name != "torch.strided":
        raise InvalidError(f"{where}: has layout {shown(name)}; expected a dense tensor. Convert it, or leave it out")
    shape = tensor.size
    spec = TensorSpec(key, dtype_named(str(dtype.value), where).name, shape)
    if math.prod(shape) >= COUNT_MAX:
        raise CorruptError(f"{where}: has shape {list(shape)}; expected fewer elements. Read another copy")
    boxes: dict[Box, None] = {}
    for stated in tensor.chunks:
        chunk = _fields(stated, _ChunkStorageMetadata, where)
        box = _box(chunk.offsets, chunk.sizes, shape, where)
        if box.numel:
            boxes[box] = None
    return spec, list(boxes)


def _box(start: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, ...], where: str) -> Box:
    if start == (0,) * len(shape) and lengths == shape:
        return Box.whole(shape)
    if len(start) == len(lengths) == len(shape):
        box = Box(start, tuple(a + n for a, n in zip(start, lengths, strict=True)))
        # Uneven sharding leaves a rank an empty chunk behind the end of the tensor.
        if Box.whole(shape).contains(box) or not box.numel:
            return box
    raise CorruptError(f"{where}: a chunk of {list(lengths)} at {list(start)}; expected one inside {list(shape)}")


def _paths(planner_data: object, stated: Mapping[object, object], where: str) -> dict[str, Path]:
    """Return the path of each key in the nested state.

    Planners differ: some store no paths, some store data of their own. A key without a usable path is its own path.
    """
    known = planner_data if isinstance(planner_data, dict) else {}
    paths: dict[str, Path] = {}
    for key in cast(Mapping[str, object], stated):
        path = known.get(key)
        if not isinstance(path, tuple) or not path or ".".join(map(str, path)) != key:
            path = (key,)
        if len(path) > DEPTH_MAX:
            raise InvalidError(f"{where}: {key[:200]} is {len(path)} containers deep; expected {DEPTH_MAX} at most")
        if not all(type(name) is str or (type(name) is int and name >= 0) for name in path):
            raise CorruptError(f"{where}: the path of {key} is {shown(path)}; expected names and list positions")
        paths[key] = path
    return paths


def _fields(value: object, kind: type[_T], where: str) -> _T:
    """Return the fields of an unpickled instance of the DCP class that a struct is named after."""
    name = kind.__name__.lstrip("_")
    found = value.qualname if isinstance(value, OpaqueObject) else type(value).__name__
    if not isinstance(value, OpaqueObject) or found.rpartition(".")[2].lstrip("_") != name:
        raise CorruptError(f"{where}: found {found}; expected {name}. Was it written by torch.distributed.checkpoint?")
    return typed(value.state, kind, where)
