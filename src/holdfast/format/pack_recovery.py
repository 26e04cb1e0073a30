"""Recovers the pieces of a pack from its header, to rebuild a lost index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CorruptError, InvalidError
from holdfast.format.pack import entries_of
from holdfast.format.values.json_text import loads
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import BY_SAFETENSORS, DTYPES
from holdfast.geometry.region import FlatRange, Region
from holdfast.geometry.tensor import TensorSpec
from holdfast.types.plan import OPAQUE_FOLDER


@dataclass(frozen=True, slots=True)
class StatedPiece:
    """One piece in the header of its pack."""

    tensor: TensorSpec
    """Its tensor."""

    region: Region
    """Its region of the tensor."""

    start: int
    """First byte in the pack."""

    stop: int
    """Byte past the last."""


def stated_pieces(header: bytes, pack: str, where: str) -> Sequence[StatedPiece]:
    """Return the pieces of a pack, by offset.

    Args:
        header: All bytes before the data, including the length.
        pack: Name of the pack.
        where: The pack, for messages.
    Raises:
        CorruptError: It is not the header of a pack, or has an impossible value.
    """
    is_opaque = pack.startswith(OPAQUE_FOLDER)
    try:
        document: Any = loads(header[8:])
        metadata = document["__metadata__"]
        shapes: Any = loads(metadata["holdfast.global_shapes"].encode())
        notes: Any = loads(metadata["holdfast.pieces" if is_opaque else "DCP_SHARDING_INFO"].encode())
        pieces = []
        for entry in entries_of(header, where):
            note = notes[entry.fqn]
            if is_opaque:
                dtype, region = note["dtype"], _region_of(note)
            else:
                start = tuple(note["saved_offsets"])
                dtype = BY_SAFETENSORS[entry.dtype].name
                region = Box(start, tuple(at + length for at, length in zip(start, entry.shape, strict=True)))
            tensor = TensorSpec(entry.fqn, dtype, tuple(shapes[entry.fqn]))
            if region.numel * DTYPES[dtype].itemsize != entry.stop - entry.start:
                raise CorruptError(
                    f"{where}: {entry.fqn} has {entry.stop - entry.start} bytes; expected the size of {region}. Read "
                    "another copy"
                )
            pieces.append(StatedPiece(tensor, region, entry.start, entry.stop))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidError) as error:
        raise CorruptError(
            f"{where}: the header lacks the regions of its pieces: {error}. Read another copy"
        ) from error
    return sorted(pieces, key=lambda piece: (piece.start, piece.stop))


def _region_of(note: Mapping[str, Any]) -> Region:
    if "flat" in note:
        return FlatRange(*note["flat"])
    starts, stops = note["box"]
    return Box(tuple(starts), tuple(stops))
