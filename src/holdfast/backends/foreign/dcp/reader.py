"""Lists checkpoints of `torch.distributed.checkpoint` and of Megatron-core's `torch_dist` in place."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping

from holdfast.backends.foreign.dcp.items import ALSO, piece_of, read_items
from holdfast.backends.foreign.dcp.metadata import Saved, saved_of
from holdfast.backends.foreign.dcp.nesting import nested_of, tree_of
from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.read import read_bytes
from holdfast.backends.foreign.torch.archive_reader import read_torch_file
from holdfast.backends.foreign.torch.checksums import ArchiveChecksums
from holdfast.backends.foreign.typed_values import typed
from holdfast.backends.foreign.values import remark, to_value
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ForeignListing, ListedPiece
from holdfast.base.types.values import FrameworkValue, Skipped, TensorRef, Value
from holdfast.errors import InvalidError, MissingError
from holdfast.settings import KIB, MIB

METADATA = ".metadata"
_BY_RANK = "__0.metadata"
COMMON = "common.pt"
"""Megatron-core's file beside `.metadata`: all values that are equal on every rank."""

_METADATA_BYTES_MAX = 1024 * MIB
"""Largest `.metadata`: about five million tensors. As Python values they take 20 times as much memory."""

_CLASS_MODULES = (b"torch.distributed.checkpoint.metadata", b"torch.distributed._shard.checkpoint.metadata")
_SMALL_BYTES_MAX = 8 * KIB
_STEP_NAMES = ("step", "iteration", "global_step")
_RANK = re.compile(r"__(\d{1,7})_\d+\.distcp")


class DcpFormat:
    """Lists folders of `torch.distributed.checkpoint`."""

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether a folder with a `.metadata` file of DCP was named, or that file itself."""
        if name in ("", _BY_RANK) and not _exists(files, METADATA) and _exists(files, _BY_RANK):
            return True
        if name not in ("", METADATA) or not _exists(files, METADATA):
            return False
        head = read_bytes(files, METADATA, 0, min(files.size(METADATA), KIB), KIB)
        return any(module in head for module in _CLASS_MODULES)

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return every tensor and object that `.metadata` lists."""
        if not _exists(files, METADATA):
            raise InvalidError(
                f"{files.url}/{_BY_RANK}: each rank saved alone, with use_collectives=False; expected one {METADATA} "
                "of all ranks. Load it with torch.distributed.checkpoint, and save it with collectives"
            )
        where = f"{files.url}/{METADATA}"
        reading = _OpenCheckpoint(files)
        nested = reading.state(saved_of(unpickled(files.get(METADATA, _METADATA_BYTES_MAX), where), where), where)
        # Megatron-core writes DCP files, and the values that are equal on every rank beside them.
        is_megatron = _exists(files, COMMON)
        if is_megatron:
            reading.add_common(nested)
        tree = tree_of(nested, reading.small_tensor, reading.remarks)
        return ForeignListing(
            format="Megatron-core torch_dist" if is_megatron else "torch.distributed.checkpoint",
            tensors=reading.tensors,
            pieces=reading.pieces,
            files=reading.sizes,
            tree=tree,
            checksums=ArchiveChecksums(files, reading.archives),
            step=_step_of(nested),
            world_size=_world_size(reading.sizes),
            remarks=reading.remarks,
        )


class _OpenCheckpoint:
    """The parts of a checkpoint that have been read."""

    def __init__(self, files: Readable) -> None:
        self._files = files
        self.tensors: dict[str, TensorSpec] = {}
        self.pieces: dict[str, list[ListedPiece]] = {}
        self.sizes: dict[str, int] = {}
        self.archives: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        self.remarks: list[str] = []

    def state(self, saved: Saved, where: str) -> dict[str, Value]:
        """Return the nested state, with a `TensorRef` for each tensor, and add the tensors to the listing."""
        self.tensors.update(saved.tensors)
        self.pieces.update({key: [] for key in saved.tensors})
        objects: dict[str, Value] = {}
        for entry in read_items(self._files, saved, where, self.sizes, self.archives):
            if entry.box is None:
                objects[entry.key] = to_value(entry.value, entry.key, self._on_tensor, self.remarks)
            else:
                place = f"{self._files.url}/{entry.item.file}: {entry.key}"
                self.pieces[entry.key].append(piece_of(entry, saved.tensors[entry.key], place))
        leaves = ((path, TensorRef(key) if key in saved.tensors else objects[key]) for key, path in saved.paths.items())
        return nested_of(leaves, where)

    def add_common(self, nested: dict[str, Value]) -> None:
        """Add the values that Megatron-core stores in `common.pt`.

        Raises:
            CorruptError: The file does not hold a dict of names.
        """
        common = read_torch_file(self._files, COMMON, also=ALSO)
        self.archives[COMMON].extend((0, self._files.size(COMMON)))
        for key, value in typed(common, dict[str, object], f"{self._files.url}/{COMMON}").items():
            if key in nested:
                remark(self.remarks, f"{COMMON}: {key} is left out; {METADATA} holds it too")
            else:
                nested[key] = to_value(value, key, self._on_tensor, self.remarks)

    def small_tensor(self, fqn: str) -> Value:
        """Return a small tensor as a value and remove it from the listing; None if it is not small."""
        spec, pieces = self.tensors[fqn], self.pieces[fqn]
        if spec.global_bytes > _SMALL_BYTES_MAX or len(pieces) != 1:
            remark(self.remarks, f"{fqn}: a hyperparameter of shape {list(spec.global_shape)} is left out of its group")
            return None
        piece = pieces[0]
        data = read_bytes(self._files, piece.file, piece.offset, piece.offset + spec.global_bytes, _SMALL_BYTES_MAX)
        del self.tensors[fqn], self.pieces[fqn]
        return FrameworkValue("torch.tensor", {"dtype": spec.dtype, "shape": spec.global_shape, "data": data})

    def _on_tensor(self, path: str, tensor: StoredTensor) -> Value:
        """Add a tensor inside an object to the listing."""
        if path in self.tensors:
            raise InvalidError(f"{self._files.url}: two tensors are named {path}; expected one. Rename either")
        if not tensor.is_contiguous:
            remark(self.remarks, f"{path}: is left out; it is stored with strides {list(tensor.strides)}")
            return Skipped(path)
        self.tensors[path] = TensorSpec(path, tensor.dtype, tensor.shape)
        self.pieces[path] = [ListedPiece(Box.whole(tensor.shape), tensor.file, tensor.offset)]
        if tensor.file not in self.sizes:
            self.sizes[tensor.file] = self._files.size(tensor.file)
        return TensorRef(path)


def _exists(files: Readable, key: str) -> bool:
    try:
        files.size(key)
    except MissingError:  # Any other error, e.g. a link out of the folder, is for the user to see.
        return False
    return True


def _step_of(nested: Mapping[str, Value]) -> int | None:
    """Return the training step, if the state holds it under one of its usual names."""
    steps = (nested.get(name) for name in _STEP_NAMES)
    return next((step for step in steps if type(step) is int and step >= 0), None)


def _world_size(files: Iterable[str]) -> int:
    """Return the number of ranks that wrote, from the names of files."""
    matches = [_RANK.fullmatch(file) for file in files]
    return max((int(match[1]) + 1 for match in matches if match), default=1)
