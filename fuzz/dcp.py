"""Fuzzes DCP checkpoints: the bytes of `.metadata` and `.distcp` files, and documents of nearly valid metadata."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from holdfast.backends.foreign.dcp.metadata import saved_of
from holdfast.backends.foreign.dcp.nesting import nested_of, tree_of
from holdfast.backends.foreign.dcp.reader import METADATA, DcpFormat
from holdfast.backends.foreign.pickles.objects import OpaqueObject
from holdfast.base.ports.ranges import hand_out
from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, StoreEntry, StoreTraits
from holdfast.base.types.values import FrameworkValue, TensorRef
from holdfast.core.format.index.foreign_index import index_foreign
from holdfast.errors import CheckpointError, MissingError

DATA = "__0_0.distcp"


class FilesInMemory:
    """Files in memory under any names, also those that no store accepts."""

    url = "here"
    traits = StoreTraits()

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def size(self, key: str) -> int:
        """Return the bytes of a file."""
        return len(self._file(key))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a file."""
        return self._file(key)

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read ranges of a file."""
        data = self._file(key)
        hand_out([data[start:stop] for start, stop in ranges], buffers, on_range)

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Return 0: there is no page cache."""
        return 0

    def folders(self, prefix: str = "") -> list[str]:
        """Return no folders."""
        return []

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every file."""
        return (StoreEntry(key, len(data)) for key, data in sorted(self._files.items()))

    def _file(self, key: str) -> bytes:
        if key not in self._files:
            raise MissingError(f"here: no file {key!r}")
        return self._files[key]


@cache
def checkpoint() -> Mapping[str, bytes]:
    """Return the files of a small checkpoint, written by torch."""
    state = {
        "model": {"w": torch.arange(4.0), "v": torch.ones(4)},
        "optimizer": {"param_groups": [{"lr": 0.5, "params": ["w", "v"]}]},
        "pair": (1, "x"),
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def metadata(data: bytes) -> None:
    """Fuzz the bytes of `.metadata` beside intact data."""
    _listed({**checkpoint(), METADATA: data})


def items(data: bytes) -> None:
    """Fuzz the bytes of a `.distcp` file of any length."""
    _listed({**checkpoint(), DATA: data})


def _listed(files: Mapping[str, bytes]) -> None:
    try:
        listing = DcpFormat().listing(FilesInMemory(files), "")
        index_foreign(listing, "here")
    except CheckpointError as error:
        assert "here" in str(error), error
        return
    for fqn, pieces in listing.pieces.items():
        for piece in pieces:
            assert piece.offset >= 0
            assert piece.offset + piece.region.numel * listing.tensors[fqn].itemsize <= len(files[piece.file])


def document(data: bytes) -> None:
    """Fuzz the numbers and names of a `.metadata` file rather than its bytes."""
    draw = _drawn(data)
    try:
        saved = saved_of(_metadata(draw), "here")
        for chunks in saved.chunks.values():
            for box, item in chunks:
                assert box.numel
                assert item.start <= item.stop
        leaves = [(path, TensorRef(key) if key in saved.tensors else 1) for key, path in saved.paths.items()]
        tree_of(nested_of(leaves, "here"), lambda fqn: None, [])
    except CheckpointError as error:
        assert "here" in str(error), error


_NAMES = ("a", "b", "state", "param_groups", "params", "model", "0", "lr", "a.b", "")
_NUMBERS = (0, 1, 2, 3, 4, 7, -1, 1 << 40, 1 << 63, 1.0, True, None, "x")


def _metadata(draw: Iterator[int]) -> OpaqueObject:
    paths = [tuple(_key(draw) for _ in range(next(draw) % 4 + 1)) for _ in range(next(draw) % 7)]
    keys = [".".join(map(str, path)) for path in paths]
    stated: dict[object, object] = {}
    storage: dict[object, object] = {}
    for key in keys:
        shape = _lengths(draw)
        chunks = []
        for _ in range(next(draw) % 3):
            offsets = (0,) * len(shape) if next(draw) % 2 else _lengths(draw)
            sizes = shape if next(draw) % 2 else _lengths(draw)
            chunks.append(_instance("ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes}))
            storage[_instance("MetadataIndex", {"fqn": key, "offset": offsets})] = _info(draw)
        layout = OpaqueObject("torch.serialization._get_layout", ("torch.strided" if next(draw) % 16 else "torch.csr",))
        properties = _instance(
            "TensorProperties", (FrameworkValue("torch.dtype", "float32"), layout, False, None, False)
        )
        tensor = {"properties": properties, "size": shape, "chunks": chunks}
        if next(draw) % 3:
            stated[key] = _instance("TensorStorageMetadata", tensor)
        else:
            stated[key] = _instance("BytesStorageMetadata", {})
            storage[_instance("MetadataIndex", {"fqn": key, "offset": None})] = _info(draw)
    planner_data = dict(zip(keys, paths, strict=True)) if next(draw) % 8 else None
    return _instance("Metadata", {"state_dict_metadata": stated, "storage_data": storage, "planner_data": planner_data})


def _info(draw: Iterator[int]) -> OpaqueObject:
    fields: dict[str, object] = {"relative_path": DATA, "offset": _number(draw), "length": _number(draw)}
    if not next(draw) % 16:
        fields["transform_descriptors"] = ["zstd"]
    return _instance("_StorageInfo", fields)


def _instance(kind: str, state: object) -> OpaqueObject:
    return OpaqueObject(f"torch.distributed.checkpoint.metadata.{kind}", (), state)


def _key(draw: Iterator[int]) -> object:
    choice = next(draw)
    return _NAMES[choice % len(_NAMES)] if choice % 3 else choice % 5


def _lengths(draw: Iterator[int]) -> tuple[object, ...]:
    return tuple(_number(draw) for _ in range(next(draw) % 4))


def _number(draw: Iterator[int]) -> object:
    choice = next(draw)
    return choice % 8 if choice < 200 else _NUMBERS[choice % len(_NUMBERS)]


def _drawn(data: bytes) -> Iterator[int]:
    yield from data
    while True:
        yield 0
