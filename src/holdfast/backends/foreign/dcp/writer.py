"""Lays out folders like `torch.distributed.checkpoint`: `.metadata`, and `.distcp` files of one archive per item."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from holdfast.backends.foreign.dcp.metadata import Item, Path
from holdfast.backends.foreign.dcp.nesting import is_tensor, items_of
from holdfast.backends.foreign.file_layout import FileLayout, TensorLeaf
from holdfast.backends.foreign.nested_state import State, model_state, nested_state
from holdfast.backends.foreign.pickles.objects import GlobalName
from holdfast.backends.foreign.pickles.writer import Made, Pairs, pickled
from holdfast.backends.foreign.torch.archive_writer import ALIGNMENT_BYTES, put_archive
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.types.export import ExportContent, ExportFile, ExportOptions
from holdfast.errors import InvalidError

_METADATA = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"
"""Version of the metadata of torch 2.13. Earlier versions do not read it."""

_LAYOUT = Made(GlobalName("torch.serialization._get_layout"), ("torch.strided",), shared=True)
_MEMORY_FORMAT = Made(GlobalName(f"{_METADATA}._MEM_FORMAT_ENCODING"), (0,), shared=True)


class DcpWriter:
    """Lays out a checkpoint for `torch.distributed.checkpoint.load`. The keys are Holdfast's FQNs."""

    name = "dcp"
    """Name of the format on the command line."""

    def files(self, content: ExportContent, options: ExportOptions) -> Sequence[ExportFile]:
        """Return `.metadata` and one `.distcp` file for each `shard_bytes` of tensors.

        A tied name gets its own bytes: the format has no ties.
        """
        if options.model_only:
            prefix, model = model_state(content, options)
            state: State = {prefix: model} if prefix else model
        else:
            state = nested_state(content, options, flat_optimizers=True)
        items: dict[str, object] = {}
        paths: dict[str, Path] = {}
        for path, value in items_of(state, ()):
            key = ".".join(map(str, path))
            if key in items:
                raise InvalidError(f"{key}: two values of the state have this name in dcp; expected one. Rename either")
            items[key], paths[key] = value, path
        files, stored = _packed(items, options.shard_bytes)
        return [*files, _metadata(items, paths, stored)]


def _packed(items: Mapping[str, object], shard_bytes: int) -> tuple[list[ExportFile], dict[str, Item]]:
    """Return files of the items, filled in order, and the bytes of each item."""
    layouts = [FileLayout()]
    stored = {}
    filled = 0
    known: dict[object, ExportFile] = {}
    for key, value in items.items():
        count = math.prod(value.shape) * DTYPES[value.dtype].itemsize if is_tensor(value) else 0
        if filled and count and filled + count > shard_bytes:
            layouts.append(FileLayout())
            filled = 0
        filled += count
        layout = layouts[-1]
        layout.skip_to_multiple(ALIGNMENT_BYTES)
        start = layout.at
        try:
            _put_archive(layout, value, known)
        except InvalidError as error:
            raise InvalidError(f"{key}: {error}") from error
        stored[key] = Item(_file_name(len(layouts) - 1), start, layout.at)
    return [layout.file(_file_name(number)) for number, layout in enumerate(layouts)], stored


def _put_archive(layout: FileLayout, value: object, known: dict[object, ExportFile]) -> None:
    """Lay out the archive of an item. Equal values, and tensors of one type and shape, are laid out once.

    Every parameter has a dozen hyperparameters, so few of the hundreds of thousands of values differ.

    Args:
        layout: The file; the archive is appended.
        value: The value of the item.
        known: The archives that are laid out already, by kind.
    """
    kind = _kind(value)
    if kind is None:
        put_archive(layout, value)
        return
    if kind not in known:
        alone = FileLayout()
        put_archive(alone, value)
        known[kind] = alone.file("")
    layout.put_file(known[kind], value.fqn if isinstance(value, TensorLeaf) else "")


def _kind(value: object) -> object:
    """Return a key that is equal for items with equal archives, apart from the tensor; None if there is no such key."""
    if isinstance(value, TensorLeaf):
        return value.dtype, value.shape
    if value is None or isinstance(value, bool | int | float | str | tuple):
        try:
            return pickled(value)
        except TypeError:  # A tuple that contains a tensor.
            return None
    return None


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"


def _metadata(items: Mapping[str, object], paths: Mapping[str, Path], stored: Mapping[str, Item]) -> ExportFile:
    """Return the `.metadata` file."""
    content = {
        "state_dict_metadata": Pairs((key, _described(value)) for key, value in items.items()),
        "planner_data": dict(paths),
        "storage_data": Pairs(_entry(key, value, stored[key]) for key, value in items.items()),
        "storage_meta": None,
        "version": _VERSION,
    }
    data = pickled(_object(f"{_METADATA}.Metadata", content))
    return ExportFile(name=".metadata", bytes=len(data), literals=((0, data),), completes=True)


def _entry(key: str, value: object, item: Item) -> tuple[Made, Made]:
    """Return the index and the storage info of an item."""
    index: dict[str, object] = {"fqn": key, "index": None}
    if is_tensor(value):
        index = {"fqn": key, "offset": _size((0,) * len(value.shape)), "index": 0}
    where = {"relative_path": item.file, "offset": item.start, "length": item.stop - item.start}
    entry = _object("torch.distributed.checkpoint.filesystem._StorageInfo", where)
    return _object(f"{_METADATA}.MetadataIndex", index), entry


def _described(value: object) -> Made:
    """Return the description of an item. A tensor is stored as one chunk."""
    if not is_tensor(value):
        return _object(f"{_METADATA}.BytesStorageMetadata")
    state = (GlobalName(f"torch.{value.dtype}"), _LAYOUT, False, _MEMORY_FORMAT, False)
    properties = Made(GlobalName(f"{_METADATA}.TensorProperties"), state=state, new=True)
    size = _size(value.shape)
    chunk = _object(f"{_METADATA}.ChunkStorageMetadata", {"offsets": _size((0,) * len(value.shape)), "sizes": size})
    return _object(f"{_METADATA}.TensorStorageMetadata", {"properties": properties, "size": size, "chunks": [chunk]})


def _object(qualname: str, attributes: Mapping[str, object] | None = None) -> Made:
    """Return a pickled object of a class with attributes."""
    return Made(GlobalName(qualname), state=dict(attributes) if attributes else None, new=True)


def _size(shape: tuple[int, ...]) -> Made:
    return Made(GlobalName("torch.Size"), (shape,))
