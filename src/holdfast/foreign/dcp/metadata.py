"""What a `.metadata` file says, out of the pickle and checked: tensors, their chunks, objects and where each lies.

Source: `torch/distributed/checkpoint/metadata.py` and `filesystem.py` of torch 2.0 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from holdfast.errors import CorruptError, InvalidError
from holdfast.foreign.pickles.objects import DTypeRef, OpaqueObject
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import dtype_named
from holdfast.geometry.tensor import TensorSpec
from holdfast.geometry.value_class import value_class

Path = tuple[str | int, ...]
"""Keys of nested dicts (text) and places in lists (numbers) that lead to a leaf of the state that was saved."""

DIMENSIONS_MAX = 64
"""torch has no tensor of more."""

DEPTH_MAX = 100
"""Levels of containers around a leaf; what is saved nests in a handful."""

_LENGTH_MAX = 1 << 62
"""Elements, and bytes of a file, are counted in signed 64 bits."""


@value_class
class Item:
    """A run of bytes of a file that one call wrote: a stream of torch.save, or all tensors of a safetensors blob."""

    file: str
    """Key of the file."""

    start: int
    """First byte."""

    stop: int
    """Past the last byte, as it is stated."""


@value_class
class Chunk:
    """A box of a tensor and the item that holds its elements."""

    box: Box
    """Which part of the tensor; not empty."""

    item: Item
    """Where it was written."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A `.metadata` file."""

    tensors: Mapping[str, TensorSpec]
    """By key."""

    chunks: Mapping[str, Sequence[Chunk]]
    """By key of a tensor; none for an empty one."""

    objects: Mapping[str, Item]
    """What is not a tensor, by key."""

    paths: Mapping[str, Path]
    """By key, where it stood in the nested state; a key of its own where the planner says nothing of it."""


def saved_of(value: object, where: str) -> Saved:
    """Return what an unpickled `.metadata` says.

    Args:
        value: What came out of the pickle.
        where: The file, for messages.
    Raises:
        CorruptError: It is not as torch writes it, or states what cannot be.
        InvalidError: It says that the items were compressed or encrypted, or holds what Holdfast does not store.
    """
    state = _state_of(value, "Metadata", where)
    stated = _mapping(state.get("state_dict_metadata"), f"{where}: state_dict_metadata")
    places = _places(_mapping(state.get("storage_data"), f"{where}: storage_data"), where)
    tensors: dict[str, TensorSpec] = {}
    chunks: dict[str, list[Chunk]] = {}
    objects: dict[str, Item] = {}
    for key, entry in stated.items():
        if not isinstance(key, str) or not key:
            raise CorruptError(f"{where}: a key is {_shown(key)}; expected a name")
        kind = entry.qualname.rpartition(".")[2] if isinstance(entry, OpaqueObject) else type(entry).__name__
        if kind == "BytesStorageMetadata":
            objects[key] = _placed(places, key, None, where)
        elif kind == "TensorStorageMetadata":
            tensors[key], boxes = _tensor(key, cast(OpaqueObject, entry), f"{where}: {key}")
            chunks[key] = [Chunk(box, _placed(places, key, box.start, where)) for box in boxes]
        else:
            raise CorruptError(f"{where}: {key} is of type {kind}; expected a tensor or an object")
    return Saved(tensors, chunks, objects, _paths(state.get("planner_data"), stated, where))


_Places = dict[tuple[str, tuple[int, ...] | None], Item]


def _places(storage: Mapping[object, object], where: str) -> _Places:
    """Return where each chunk and object lies, by key and first coordinate."""
    places: _Places = {}
    for index, entry in storage.items():
        at = _state_of(index, "MetadataIndex", where)
        key, offset = at.get("fqn"), at.get("offset")
        if not isinstance(key, str):
            raise CorruptError(f"{where}: storage_data is by {_shown(key)}; expected names")
        info = _state_of(entry, "_StorageInfo", f"{where}: {key}")
        transforms = info.get("transform_descriptors")
        if transforms:
            raise InvalidError(
                f"{where}: {key} was written through {_shown(transforms)}; Holdfast reads what is stored as it is. "
                "Load it with torch.distributed.checkpoint and save it without extensions"
            )
        file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or not file:
            raise CorruptError(f"{where}: {key} lies in file {_shown(file)}; expected a path")
        if not (_is_length(start) and _is_length(length)):
            raise CorruptError(f"{where}: {key} lies at {_shown(start)}, {_shown(length)} bytes; expected numbers")
        coordinate = None if offset is None else _lengths(offset, f"{where}: {key}: offset")
        if (key, coordinate) in places:
            raise CorruptError(f"{where}: {key} has two places for its part at {coordinate}; expected one")
        first = cast(int, start)
        places[key, coordinate] = Item(file, first, first + cast(int, length))
    return places


def _placed(places: _Places, key: str, coordinate: tuple[int, ...] | None, where: str) -> Item:
    found = places.get((key, coordinate))
    if found is None:
        part = "" if coordinate is None else f", part at {list(coordinate)}"
        raise CorruptError(
            f"{where}: {key}{part}: no file is stated for it. Was the save that wrote it reported to have failed?"
        )
    return found


def _tensor(key: str, entry: OpaqueObject, where: str) -> tuple[TensorSpec, Sequence[Box]]:
    """Return a tensor and the boxes it was saved in, equal ones once and empty ones not at all."""
    state = _state_of(entry, "TensorStorageMetadata", where)
    properties = state.get("properties")
    shown = properties.state if isinstance(properties, OpaqueObject) else None
    # In five fields since torch 1.13: dtype, layout, requires_grad, memory format, pin_memory.
    dtype, layout = (shown[0], shown[1]) if isinstance(shown, tuple) and len(shown) >= 2 else (None, None)
    if not isinstance(dtype, DTypeRef):
        raise CorruptError(f"{where}: its properties are {_shown(shown)}; expected dtype and layout")
    name = layout.args[0] if isinstance(layout, OpaqueObject) and layout.args else layout
    if name != "torch.strided":
        raise InvalidError(f"{where}: has layout {_shown(name)}; Holdfast reads dense tensors. Convert it, or skip it")
    shape = _lengths(state.get("size"), f"{where}: size")
    spec = TensorSpec(key, dtype_named(dtype.name, where).name, shape)
    if math.prod(shape) >= _LENGTH_MAX:
        raise CorruptError(f"{where}: has shape {list(shape)}; expected a tensor that some memory could hold")
    chunks = state.get("chunks")
    if not isinstance(chunks, list):
        raise CorruptError(f"{where}: its chunks are {_shown(chunks)}; expected a list")
    boxes: dict[Box, None] = {}
    for chunk in chunks:
        box = _box(_state_of(chunk, "ChunkStorageMetadata", where), shape, where)
        if box.numel:
            boxes[box] = None
    return spec, list(boxes)


def _box(chunk: Mapping[object, object], shape: tuple[int, ...], where: str) -> Box:
    start, lengths = (_lengths(chunk.get(name), f"{where}: chunk {name}") for name in ("offsets", "sizes"))
    if start == (0,) * len(shape) and lengths == shape:
        return Box.whole(shape)
    if len(start) == len(lengths) == len(shape):
        box = Box(start, tuple(a + n for a, n in zip(start, lengths, strict=True)))
        if Box.whole(shape).contains(box) or not box.numel:
            return box
    raise CorruptError(f"{where}: a chunk of {list(lengths)} at {list(start)}; expected one inside {list(shape)}")


def _paths(planner_data: object, stated: Mapping[object, object], where: str) -> dict[str, Path]:
    """Return by key where it stood in the nested state.

    A planner may keep nothing, or something of its own; then a key is what it is: one name.
    """
    known = planner_data if isinstance(planner_data, dict) else {}
    paths: dict[str, Path] = {}
    for key in stated:
        assert isinstance(key, str)
        path = known.get(key)
        if not isinstance(path, tuple) or not path or ".".join(map(str, path)) != key:
            path = (key,)
        if len(path) > DEPTH_MAX:
            raise InvalidError(f"{where}: {key[:200]} lies {len(path)} containers deep; expected {DEPTH_MAX} at most")
        if not all(type(each) is str or (type(each) is int and each >= 0) for each in path):
            raise CorruptError(f"{where}: {key} lies at {_shown(path)}; expected names and places in lists")
        paths[key] = path
    return paths


def _state_of(value: object, kind: str, where: str) -> dict[object, object]:
    """Return the fields of an instance of one of DCP's own dataclasses, which later ones may have more of."""
    if not isinstance(value, OpaqueObject) or value.qualname.rpartition(".")[2] != kind:
        found = value.qualname if isinstance(value, OpaqueObject) else type(value).__name__
        raise CorruptError(f"{where}: found {found}; expected {kind}. Was it written by torch.distributed.checkpoint?")
    if not isinstance(value.state, dict):
        raise CorruptError(f"{where}: a {kind} holds {type(value.state).__name__}; expected its fields")
    return value.state


def _mapping(value: object, where: str) -> dict[object, object]:
    if not isinstance(value, dict):
        raise CorruptError(f"{where} is {type(value).__name__}; expected a dict")
    return value


def _lengths(value: object, where: str) -> tuple[int, ...]:
    """Return a torch.Size as what it is."""
    if isinstance(value, tuple) and len(value) <= DIMENSIONS_MAX and all(map(_is_length, value)):
        return value
    raise CorruptError(f"{where} is {_shown(value)}; expected at most {DIMENSIONS_MAX} lengths")


def _is_length(value: object) -> bool:
    return type(value) is int and 0 <= value < _LENGTH_MAX


def _shown(value: object) -> str:
    """Return how a value is shown in a message: short, whatever it is."""
    if isinstance(value, list | tuple) and len(value) > DIMENSIONS_MAX:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int | str | bytes | list | tuple | None):
        return repr(value)[:200]
    return type(value).__name__
