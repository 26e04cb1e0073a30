"""Index another system's checkpoint: turns its listing into the manifest and index that all readers work on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import FlatRange
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.listing import ForeignListing, ListedPiece
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.values import Group
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.index_file import decode_unhashed, encode_index
from holdfast.core.format.index.tensor_table import NDIM_MAX, is_addressable
from holdfast.core.format.state_order import numbers_of, paths_of, unless_ascending
from holdfast.core.format.values import values
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import MIB

CHUNK_BYTES = 1 * MIB
"""Chunk size of foreign pieces: the unit of reading."""

_HEAD = ("origin", "step", "world_size", "aliases", "masters")
"""Fields of a foreign manifest that `encode_foreign` sends unchanged."""


def encode_foreign(manifest: Manifest, index: Index) -> list[bytes]:
    """Return a foreign manifest and index as two byte strings, for the other ranks of the job."""
    packs = [[pack.name, pack.bytes] for pack in manifest.packs]
    head = {name: getattr(manifest, name) for name in _HEAD}
    return [values.dumps({**head, "packs": packs, "state": values.encode(manifest.tree, "")}), encode_index(index)]


def decode_foreign(frames: Sequence[bytes], where: str) -> tuple[Manifest, Index]:
    """Return the manifest and the index that `encode_foreign` encoded.

    Raises:
        CorruptError: Rank 0 sent something else.
    """
    head, index = values.loads(frames[0]), decode_unhashed(frames[1], where)
    tree = values.decode(head["state"], "") if isinstance(head, dict) else None
    if not isinstance(head, dict) or not isinstance(tree, Group):
        raise CorruptError(f"{where}: rank 0 sent no listing. Run the same version of Holdfast on all ranks")
    packs = tuple(FileRecord(name, count, "") for name, count in head["packs"])
    return _manifest(index, packs=packs, tree=tree, **{name: head[name] for name in _HEAD}), index


def index_foreign(listing: ForeignListing, where: str) -> tuple[Manifest, Index]:
    """Return a listing as a manifest and an index without digests.

    Args:
        listing: The listing of a foreign format.
        where: The checkpoint, for messages.
    Raises:
        CorruptError: A tensor is impossible, or a piece is outside its tensor or file; the message names it.
        InvalidError: A name cannot be stored.
    """
    for fqn, spec in listing.tensors.items():
        _require_possible(fqn, spec, where)
    for name in (*listing.tensors, *listing.aliases, *listing.files):
        _require_text(name, where)
    for alias, fqn in listing.aliases.items():
        if fqn not in listing.tensors or alias in listing.tensors:
            raise CorruptError(f"{where}: {alias} is tied to {fqn}; expected a stored tensor. Read another copy")
    masters = {fqn: master for master, fqn in listing.casts.items()}
    for pair in listing.casts.items():
        if any(fqn not in listing.tensors for fqn in pair):
            raise CorruptError(
                f"{where}: {pair[0]} is listed as the master copy of {pair[1]}; expected both tensors. Read another "
                "copy"
            )
    builder = IndexBuilder(CHUNK_BYTES, listing.tensors.values())
    for fqn, spec in listing.tensors.items():
        for piece in listing.pieces.get(fqn, ()):
            require_within(piece, spec, listing.files, where)
            builder.add(spec, piece.region, piece.file, piece.offset, b"")
    index = builder.index()
    packs = tuple(FileRecord(name, count, "") for name, count in listing.files.items())
    others = chain(listing.aliases, paths_of(listing.tree))
    manifest = _manifest(
        index,
        packs=packs,
        tree=listing.tree,
        aliases=dict(listing.aliases),
        masters=masters,
        step=listing.step,
        world_size=listing.world_size,
        origin=listing.format,
        order=unless_ascending(numbers_of(listing.order, index.table.fqns, others)),
    )
    return manifest, index


def _manifest(index: Index, **fields: Any) -> Manifest:
    """Return a manifest of another system's checkpoint: `_HEAD`, `packs` and `tree` are given, the rest is empty."""
    fields["tensors"], fields["newer_types"] = len(index.tensors), index.table.newer_types
    fields["tensor_bytes"] = sum(spec.global_bytes for spec in index.tensors.values())
    return Manifest(
        run_id="", attempt="", created="", parent=None, layouts=(), software={}, parts=(), indexes=(), **fields
    )


def _require_possible(fqn: str, spec: TensorSpec, where: str) -> None:
    if not fqn or spec.fqn != fqn:
        raise CorruptError(
            f"{where}: a tensor named {fqn[:200]!r} is listed as {spec.fqn[:200]!r}; expected one name. "
            "Read another copy"
        )
    if spec.dtype not in DTYPES:
        raise InvalidError(f"{where}: {fqn}: dtype {spec.dtype[:80]}; expected one of {', '.join(DTYPES)}")
    shape = spec.global_shape
    if len(shape) > NDIM_MAX or any(length < 0 for length in shape):
        raise CorruptError(f"{where}: {fqn}: shape {str(shape)[:200]}; expected up to {NDIM_MAX} lengths from 0 on")
    if not is_addressable(spec):
        raise CorruptError(f"{where}: {fqn}: {spec.dtype} of shape {shape}; expected under 2**62 bytes")


def _require_text(name: str, where: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(
            f"{where}: the name {name[:200]!a} is no Unicode text. Rename that key of the state"
        ) from error


def require_within(piece: ListedPiece, spec: TensorSpec, files: Mapping[str, int], where: str) -> None:
    """Refuse a piece that is outside its tensor or file.

    Raises:
        CorruptError: The message names the tensor and the file.
    """
    region = piece.region
    if isinstance(region, FlatRange):
        inside = 0 <= region.start <= region.stop <= math.prod(spec.global_shape)
    else:
        inside = len(region.start) == len(spec.global_shape) and all(
            0 <= start <= stop <= length
            for start, stop, length in zip(region.start, region.stop, spec.global_shape, strict=True)
        )
    if not inside:
        raise CorruptError(
            f"{where}: {spec.fqn}: {piece.file} holds {region}; expected a part of shape {spec.global_shape}"
        )
    size, stop = files.get(piece.file), piece.offset + region.numel * spec.itemsize
    if size is None or not 0 <= piece.offset <= stop <= size:
        state = "is not listed" if size is None else f"has {size} bytes"
        raise CorruptError(
            f"{where}: {spec.fqn}: bytes {piece.offset}–{stop} of {piece.file}, which {state}. The file may be cut "
            "short: read another copy"
        )
