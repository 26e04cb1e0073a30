"""Checkpoints of `torch.distributed.checkpoint` and of Megatron-core's `torch_dist`, listed where they lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.foreign.dcp.items import ALSO, piece_of, read_items
from holdfast.foreign.dcp.metadata import Saved, saved_of
from holdfast.foreign.dcp.nesting import nested_of, tree_of
from holdfast.foreign.pickles.reader import unpickled
from holdfast.foreign.pickles.tensors import StoredTensor
from holdfast.foreign.read import read_bytes
from holdfast.foreign.torch.archive_reader import read_torch_file
from holdfast.foreign.values import remark, to_value
from holdfast.geometry.box import Box
from holdfast.geometry.tensor import TensorSpec
from holdfast.ports.store import Readable
from holdfast.settings import KIB, MIB
from holdfast.types.listing import ForeignListing, ListedPiece
from holdfast.types.values import FrameworkValue, Skipped, TensorRef, Value

METADATA = ".metadata"
_BY_RANK = "__0.metadata"
COMMON = "common.pt"
"""What Megatron-core keeps beside it: everything that is the same on every rank."""

_METADATA_BYTES_MAX = 1024 * MIB
"""About five million tensors; as values of Python they take twenty times as much."""

_NAMES = (b"torch.distributed.checkpoint.metadata", b"torch.distributed._shard.checkpoint.metadata")
_SMALL_BYTES_MAX = 8 * KIB
_STEP_NAMES = ("step", "iteration", "global_step")
_RANK = re.compile(r"__(\d{1,7})_\d+\.distcp")


class DcpFormat:
    """Lists what `torch.distributed.checkpoint` wrote to a folder."""

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether it is a folder with a `.metadata` that names DCP's classes, or that file itself."""
        if name in ("", _BY_RANK) and not _holds(files, METADATA) and _holds(files, _BY_RANK):
            return True
        if name not in ("", METADATA) or not _holds(files, METADATA):
            return False
        head = read_bytes(files, METADATA, 0, min(files.size(METADATA), KIB), KIB)
        return any(each in head for each in _NAMES)

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return every tensor and object that `.metadata` names."""
        if not _holds(files, METADATA):
            raise InvalidError(
                f"{files.url}/{_BY_RANK}: each rank saved by itself, with use_collectives=False; expected a {METADATA} "
                "of all. Load it with torch.distributed.checkpoint, and save it with collectives"
            )
        where = f"{files.url}/{METADATA}"
        reading = _OpenCheckpoint(files)
        nested = reading.state(saved_of(unpickled(files.get(METADATA, _METADATA_BYTES_MAX), where), where), where)
        is_megatron = _holds(files, COMMON)
        if is_megatron:
            reading.add_common(nested)
        tree = tree_of(nested, reading.small_tensor, reading.remarks)
        return ForeignListing(
            format="Megatron-core torch_dist" if is_megatron else "torch.distributed.checkpoint",
            tensors=reading.tensors,
            pieces=reading.pieces,
            files=reading.sizes,
            tree=tree,
            step=_step_of(nested),
            world_size=_world_size(reading.sizes),
            remarks=reading.remarks,
        )


class _OpenCheckpoint:
    """A checkpoint as far as it has been read."""

    def __init__(self, files: Readable) -> None:
        self._files = files
        self.tensors: dict[str, TensorSpec] = {}
        self.pieces: dict[str, list[ListedPiece]] = {}
        self.sizes: dict[str, int] = {}
        self.remarks: list[str] = []

    def state(self, saved: Saved, where: str) -> dict[str, Value]:
        """Return the nested state that was saved, a `TensorRef` for each tensor, which is listed."""
        self.tensors.update(saved.tensors)
        self.pieces.update({key: [] for key in saved.tensors})
        objects: dict[str, Value] = {}
        for found in read_items(self._files, saved, where, self.sizes):
            if found.chunk is None:
                objects[found.key] = to_value(found.value, found.key, self._on_tensor, self.remarks)
            else:
                place = f"{self._files.url}/{found.item.file}: {found.key}"
                self.pieces[found.key].append(piece_of(found, saved.tensors[found.key], place))
        leaves = ((path, TensorRef(key) if key in saved.tensors else objects[key]) for key, path in saved.paths.items())
        return nested_of(leaves, where)

    def add_common(self, nested: dict[str, Value]) -> None:
        """Add what Megatron-core keeps of the state in a file of its own.

        Raises:
            CorruptError: It is no dict of names.
        """
        common = read_torch_file(self._files, COMMON, also=ALSO).value
        if not isinstance(common, dict) or not all(isinstance(key, str) for key in common):
            raise CorruptError(f"{self._files.url}/{COMMON}: {type(common).__name__}; expected a dict of names")
        for key, value in common.items():
            if key in nested:
                remark(self.remarks, f"{COMMON}: {key} is left out; {METADATA} has it too")
            else:
                nested[key] = to_value(value, key, self._on_tensor, self.remarks)

    def small_tensor(self, fqn: str) -> Value:
        """Return a tensor as a value and list it no longer; None, and leave it listed, where it is not small."""
        spec, pieces = self.tensors[fqn], self.pieces[fqn]
        if spec.global_bytes > _SMALL_BYTES_MAX or len(pieces) != 1:
            remark(self.remarks, f"{fqn}: a hyperparameter of shape {list(spec.global_shape)} is left out of its group")
            return None
        place = pieces[0]
        data = read_bytes(self._files, place.file, place.offset, place.offset + spec.global_bytes, _SMALL_BYTES_MAX)
        del self.tensors[fqn], self.pieces[fqn]
        return FrameworkValue("torch.tensor", {"dtype": spec.dtype, "shape": spec.global_shape, "data": data})

    def _on_tensor(self, path: str, found: StoredTensor) -> Value:
        """List a tensor that stood inside an object."""
        if path in self.tensors:
            raise InvalidError(f"{self._files.url}: two tensors are named {path}; expected each name once")
        if not found.is_contiguous:
            remark(self.remarks, f"{path}: is left out; it is stored with strides {list(found.strides)}")
            return Skipped(path)
        self.tensors[path] = TensorSpec(path, found.dtype, found.shape)
        self.pieces[path] = [ListedPiece(Box.whole(found.shape), found.file, found.offset)]
        if found.file not in self.sizes:
            self.sizes[found.file] = self._files.size(found.file)
        return TensorRef(path)


def _holds(files: Readable, key: str) -> bool:
    try:
        files.size(key)
    except MissingError:
        return False
    return True


def _step_of(nested: Mapping[str, Value]) -> int | None:
    """Return the training iteration where the state has it under one of its usual names."""
    for name in _STEP_NAMES:
        value = nested.get(name)
        if type(value) is int and value >= 0:
            return value
    return None


def _world_size(files: Iterable[str]) -> int:
    """Return how many ranks wrote, out of the names of files."""
    found = [_RANK.fullmatch(file) for file in files]
    return max((int(each[1]) + 1 for each in found if each), default=1)
