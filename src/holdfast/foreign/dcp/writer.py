"""Folders as `torch.distributed.checkpoint` writes them: `.metadata`, and `.distcp` files of one archive per item."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

from holdfast.errors import InvalidError
from holdfast.foreign.file_layout import FileLayout, SmallTensor, TensorLeaf
from holdfast.foreign.nested_state import State, model_state, nested_state
from holdfast.foreign.pickles.objects import GlobalName
from holdfast.foreign.pickles.writer import Made, Pairs, pickled
from holdfast.foreign.torch.archive_writer import ALIGNMENT_BYTES, put_archive
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.value_class import value_class
from holdfast.types.export import ExportContent, ExportFile, ExportOptions

_METADATA = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"
"""What torch 2.13 calls the layout of its metadata; earlier ones do not look at it."""

_Path = tuple[str | int, ...]
"""Keys of dicts and numbers in lists that lead to a value."""


@value_class
class _Stored:
    """Where an item lies."""

    file: str
    """Its file."""

    offset: int
    """First byte."""

    bytes: int
    """Its length."""


class DcpWriter:
    """Lays a checkpoint out as `torch.distributed.checkpoint.load` reads it; keys are our FQNs."""

    name = "dcp"
    """Name of the format on the command line."""

    def files(self, content: ExportContent, options: ExportOptions) -> Sequence[ExportFile]:
        """Return `.metadata` and as many `.distcp` files as the bytes of the tensors take.

        A tied name has bytes of its own: this format knows no ties.
        """
        if options.model_only:
            prefix, model = model_state(content, options)
            state: State = {prefix: model} if prefix else model
        else:
            state = nested_state(content, options, flat_optimizers=True)
        items: dict[str, object] = {}
        paths: dict[str, _Path] = {}
        for path, value in _items(state, ()):
            key = ".".join(map(str, path))
            if key in items:
                raise InvalidError(f"{key}: two values of the state have this name in dcp; expected one. Rename either")
            items[key], paths[key] = value, path
        files, places = _packed(items, options.shard_bytes)
        return [*files, _metadata(items, paths, places)]


def _items(value: object, path: _Path) -> Iterator[tuple[_Path, object]]:
    """Yield what is written by itself, with its path.

    That is every value of dicts, and of lists that hold tensors or dicts, as `traverse_state_dict` has it: a reader
    asks for keys that it forms in the same way.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _items(each, (*path, str(key)))
    elif isinstance(value, list) and not _is_whole(value):
        for number, each in enumerate(value):
            yield from _items(each, (*path, number))
    else:
        yield path, value


def _is_whole(value: list[object]) -> bool:
    """Return whether a list is one item."""
    return not any(
        isinstance(each, dict) or _is_tensor(each) or (isinstance(each, list) and not _is_whole(each)) for each in value
    )


def _is_tensor(value: object) -> TypeGuard[TensorLeaf | SmallTensor]:
    return isinstance(value, TensorLeaf | SmallTensor)


def _packed(items: Mapping[str, object], shard_bytes: int) -> tuple[list[ExportFile], dict[str, _Stored]]:
    """Return the files that items lie in, filled in their order, and where each lies."""
    layouts = [FileLayout()]
    places = {}
    filled = 0
    archives = _Archives()
    for key, value in items.items():
        count = math.prod(value.shape) * DTYPES[value.dtype].itemsize if _is_tensor(value) else 0
        if filled and count and filled + count > shard_bytes:
            layouts.append(FileLayout())
            filled = 0
        filled += count
        layout = layouts[-1]
        layout.skip_to_multiple(ALIGNMENT_BYTES)
        start = layout.at
        try:
            archives.put(layout, value)
        except InvalidError as error:
            raise InvalidError(f"{key}: {error}") from error
        places[key] = _Stored(_file_name(len(layouts) - 1), start, layout.at - start)
    return [layout.file(_file_name(number)) for number, layout in enumerate(layouts)], places


class _Archives:
    """Archives of one item each. Those of equal values, and of tensors of one type and shape, are laid out once.

    Every parameter has a dozen hyperparameters, so there are few different ones among hundreds of thousands.
    """

    def __init__(self) -> None:
        self._known: dict[object, ExportFile] = {}

    def put(self, layout: FileLayout, value: object) -> None:
        """Lay out the archive of an item."""
        key = _kind(value)
        if key is None:
            put_archive(layout, value)
            return
        if key not in self._known:
            alone = FileLayout()
            put_archive(alone, value)
            self._known[key] = alone.file("")
        layout.put_file(self._known[key], value.fqn if isinstance(value, TensorLeaf) else "")


def _kind(value: object) -> object:
    """Return what is equal for items whose archives are, but for which tensor stands in them; None if not known."""
    if isinstance(value, TensorLeaf):
        return value.dtype, value.shape
    if value is None or isinstance(value, bool | int | float | str | tuple):
        try:
            return pickled(value)
        except TypeError:  # A tuple in which a tensor stands.
            return None
    return None


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"


def _metadata(items: Mapping[str, object], paths: Mapping[str, _Path], places: Mapping[str, _Stored]) -> ExportFile:
    """Return the file that tells what lies where."""
    kinds = _Kinds()
    content = {
        "state_dict_metadata": Pairs((key, kinds.described(value)) for key, value in items.items()),
        "planner_data": dict(paths),
        "storage_data": Pairs(_entry(key, value, places[key]) for key, value in items.items()),
        "storage_meta": None,
        "version": _VERSION,
    }
    data = pickled(_object(f"{_METADATA}.Metadata", content))
    return ExportFile(name=".metadata", bytes=len(data), literals=((0, data),))


def _entry(key: str, value: object, place: _Stored) -> tuple[Made, Made]:
    """Return what tells where an item lies."""
    index: dict[str, object] = {"fqn": key, "index": None}
    if _is_tensor(value):
        index = {"fqn": key, "offset": _size((0,) * len(value.shape)), "index": 0}
    where = {"relative_path": place.file, "offset": place.offset, "length": place.bytes}
    entry = _object("torch.distributed.checkpoint.filesystem._StorageInfo", where)
    return _object(f"{_METADATA}.MetadataIndex", index), entry


class _Kinds:
    """Descriptions that many tensors share."""

    def __init__(self) -> None:
        self._layout = Made(GlobalName("torch.serialization._get_layout"), ("torch.strided",), shared=True)
        self._memory = Made(GlobalName(f"{_METADATA}._MEM_FORMAT_ENCODING"), (0,), shared=True)

    def described(self, value: object) -> Made:
        """Return the description of an item; tensors are stored in one piece."""
        return self._tensor(value) if _is_tensor(value) else _object(f"{_METADATA}.BytesStorageMetadata")

    def _tensor(self, tensor: TensorLeaf | SmallTensor) -> Made:
        state = (GlobalName(f"torch.{tensor.dtype}"), self._layout, False, self._memory, False)
        properties = Made(GlobalName(f"{_METADATA}.TensorProperties"), state=state, new=True)
        size = _size(tensor.shape)
        chunk = _object(
            f"{_METADATA}.ChunkStorageMetadata", {"offsets": _size((0,) * len(tensor.shape)), "sizes": size}
        )
        return _object(
            f"{_METADATA}.TensorStorageMetadata", {"properties": properties, "size": size, "chunks": [chunk]}
        )


def _object(qualname: str, attributes: Mapping[str, object] | None = None) -> Made:
    """Return an object of a class by its attributes."""
    return Made(GlobalName(qualname), state=dict(attributes) if attributes else None, new=True)


def _size(shape: tuple[int, ...]) -> Made:
    return Made(GlobalName("torch.Size"), (shape,))
