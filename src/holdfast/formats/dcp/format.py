"""Checkpoints of `torch.distributed.checkpoint` and of Megatron-core's `torch_dist`, listed where they lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast.errors import CorruptError, InvalidError
from holdfast.formats.dcp.items import ALSO, piece_of, read_items
from holdfast.formats.dcp.metadata import Path, Saved, saved_of
from holdfast.formats.dcp.nesting import nested_of, tree_of
from holdfast.formats.pickled import unpickled
from holdfast.formats.reading import read_bytes
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.formats.torch_zip import read_torch_file
from holdfast.formats.values_in import plain
from holdfast.ports.store import Readable
from holdfast.settings import KIB, MIB
from holdfast.spec.box import Box
from holdfast.spec.listing import ListedPiece, Listing
from holdfast.spec.tensor import TensorSpec
from holdfast.spec.values import FrameworkValue, TensorRef, Value

METADATA = ".metadata"
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

    @property
    def name(self) -> str:
        """What it is called."""
        return "dcp"

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether it is a folder with a `.metadata` that names DCP's classes, or that file itself."""
        if name not in ("", METADATA) or not any(entry.key == METADATA for entry in files.list("")):
            return False
        head = read_bytes(files, METADATA, 0, min(files.size(METADATA), KIB), KIB)
        return any(each in head for each in _NAMES)

    def listing(self, files: Readable, name: str) -> Listing:
        """Return every tensor and object that `.metadata` names."""
        where = f"{files.url}/{METADATA}"
        saved = saved_of(unpickled(files.get(METADATA, _METADATA_BYTES_MAX), where), where)
        reading = _Reading(files, saved)
        reading.read_items(where)
        nested = nested_of(reading.leaves, where)
        remarks = reading.remarks
        is_megatron = _holds(files, COMMON)
        if is_megatron:
            reading.read_common(nested)
        tree = tree_of(nested, reading.small_tensor, remarks)
        return Listing(
            format="Megatron-core torch_dist" if is_megatron else "torch.distributed.checkpoint",
            tensors=reading.tensors,
            pieces=reading.pieces,
            files=reading.sizes,
            tree=tree,
            step=_step_of(nested),
            world_size=_world_size(reading.sizes),
            remarks=remarks,
        )


def _holds(files: Readable, key: str) -> bool:
    return any(entry.key == key for entry in files.list(""))
