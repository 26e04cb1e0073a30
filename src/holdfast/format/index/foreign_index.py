"""Another system's checkpoint, adopted: its listing as the manifest and the index that every verb works on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast.errors import CorruptError, InvalidError
from holdfast.format.index.index import Index
from holdfast.format.index.index_builder import IndexBuilder
from holdfast.format.index.index_file import decode_unhashed, encode_index
from holdfast.format.index.tensor_table import NDIM_MAX, is_addressable
from holdfast.format.values import values
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.region import FlatRange
from holdfast.geometry.tensor import TensorSpec
from holdfast.settings import MIB
from holdfast.types.listing import ForeignListing, ListedPiece
from holdfast.types.manifest import FileRecord, Manifest
from holdfast.types.values import Group

CHUNK_BYTES = 1 * MIB
"""What another system's pieces are cut to: the unit of reading."""


def encode_foreign(manifest: Manifest, index: Index) -> list[bytes]:
    """Return a manifest and an index of another system's files, for `decode_foreign` in the same job."""
    head = {
        "origin": manifest.origin,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "aliases": manifest.aliases,
        "masters": manifest.masters,
        "packs": [[pack.name, pack.bytes] for pack in manifest.packs],
        "state": values.encode(manifest.tree, ""),
    }
    return [values.dumps(head), encode_index(index)]


def decode_foreign(frames: Sequence[bytes], where: str) -> tuple[Manifest, Index]:
    """Return what `encode_foreign` wrote down."""
    head, index = values.loads(frames[0]), decode_unhashed(frames[1], where)
    tree = values.decode(head["state"], "") if isinstance(head, dict) else None
    if not isinstance(head, dict) or not isinstance(tree, Group):
        raise CorruptError(f"{where}: rank 0 sent no listing; expected one of this version of Holdfast")
    packs = tuple(FileRecord(name, count, "") for name, count in head["packs"])
    manifest = _manifest(index, packs, tree, head["aliases"], head["step"], head["world_size"], head["origin"])
    return replace(manifest, masters=head["masters"]), index


def index_foreign(listing: ForeignListing, where: str) -> tuple[Manifest, Index]:
    """Return a listing as a manifest and an index; the index says nothing of what chunks hash to.

    Args:
        listing: What a format found.
        where: The checkpoint, for messages.
    Raises:
        CorruptError: A piece lies outside its tensor or its file, or a tensor is impossible; the message names it.
        InvalidError: A name cannot be stored.
    """
    for fqn, spec in listing.tensors.items():
        _require_possible(fqn, spec, where)
    for name in (*listing.tensors, *listing.aliases, *listing.files):
        _require_text(name, where)
    for alias, fqn in listing.aliases.items():
        if fqn not in listing.tensors or alias in listing.tensors:
            raise CorruptError(f"{where}: {alias} is tied to {fqn}; expected a tensor that is listed")
    masters = {fqn: master for master, fqn in listing.casts.items()}
    for pair in listing.casts.items():
        if any(fqn not in listing.tensors for fqn in pair):
            raise CorruptError(
                f"{where}: {pair[0]} is listed as the master copy of {pair[1]}; expected both to be there"
            )
    builder = IndexBuilder(CHUNK_BYTES, listing.tensors.values())
    for fqn, spec in listing.tensors.items():
        for piece in listing.pieces.get(fqn, ()):
            require_within(piece, spec, listing.files, where)
            builder.add(spec, piece.region, piece.file, piece.offset, b"")
    index = builder.index()
    packs = tuple(FileRecord(name, count, "") for name, count in listing.files.items())
    manifest = _manifest(index, packs, listing.tree, listing.aliases, listing.step, listing.world_size, listing.format)
    return replace(manifest, masters=masters), index


def _manifest(
    index: Index,
    packs: tuple[FileRecord, ...],
    tree: Group,
    aliases: Mapping[str, str],
    step: int | None,
    world_size: int,
    origin: str,
) -> Manifest:
    return Manifest(
        run_id="",
        step=step,
        attempt="",
        created="",
        parent=None,
        world_size=world_size,
        layouts=(),
        software={},
        tensors=len(index.tensors),
        tensor_bytes=sum(spec.global_bytes for spec in index.tensors.values()),
        aliases=dict(aliases),
        tree=tree,
        packs=packs,
        parts=(),
        indexes=(),
        origin=origin,
    )


def _require_possible(fqn: str, spec: TensorSpec, where: str) -> None:
    if not fqn or spec.fqn != fqn:
        raise CorruptError(f"{where}: a tensor named {fqn[:200]!r} is listed as {spec.fqn[:200]!r}; expected one name")
    if spec.dtype not in DTYPES:
        raise InvalidError(f"{where}: {fqn}: dtype {spec.dtype[:80]}; expected one of {', '.join(DTYPES)}")
    shape = spec.global_shape
    if len(shape) > NDIM_MAX or any(length < 0 for length in shape):
        raise CorruptError(f"{where}: {fqn}: shape {str(shape)[:200]}; expected up to {NDIM_MAX} lengths of 0 and more")
    if not is_addressable(spec):
        raise CorruptError(f"{where}: {fqn}: {spec.dtype} of shape {shape}; expected under 2**62 bytes")


def _require_text(name: str, where: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(f"{where}: the name {name[:200]!a} is no Unicode text; rename it") from error


def require_within(piece: ListedPiece, spec: TensorSpec, files: Mapping[str, int], where: str) -> None:
    """Refuse a piece that lies outside its tensor or its file.

    Raises:
        CorruptError: Names both.
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
        there = "is not listed" if size is None else f"has {size} bytes"
        raise CorruptError(
            f"{where}: {spec.fqn}: bytes {piece.offset}–{stop} of {piece.file}, which {there}. Was it cut short?"
        )
