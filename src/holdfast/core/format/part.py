"""A rank's part: the file in which it reports what it wrote to the committing rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.base.types.health import Counted, Replicas
from holdfast.base.types.manifest import FileRecord, OptimizerRecord
from holdfast.core.format.digest import digest_of
from holdfast.core.format.health import (
    CountedDocument,
    ReplicasDocument,
    replicas_document,
    replicas_in,
)
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_file import IndexDocument, document_of, index_of
from holdfast.core.format.index.tensor_table import TensorTables
from holdfast.core.format.names import is_pack_name, step_of_pack
from holdfast.core.format.sealed_json import decode_msgpack
from holdfast.errors import CorruptError


class _PartDocument(msgspec.Struct):
    rank: int
    attempt: str
    index: IndexDocument
    packs: tuple[FileRecord, ...]
    tree: bytes | None
    aliases: dict[str, str]
    layouts: tuple[tuple[tuple[int, ...], tuple[str, ...], int], ...]
    per_rank: bytes | None = None
    nonfinite: CountedDocument | UnsetType = UNSET
    replicas: ReplicasDocument | UnsetType = UNSET
    optimizers: dict[str, OptimizerRecord] | UnsetType = UNSET
    order: bytes | UnsetType = UNSET
    order_names: tuple[str, ...] | UnsetType = UNSET
    world_size: int = 0
    digest: bytes = b""


class _Seal(msgspec.Struct):
    world_size: int = 0
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank wrote: everything that the committing rank needs from it."""

    rank: int
    """The rank."""

    attempt: str
    """The attempt of the save."""

    index: Index
    """Tensors and pieces this rank wrote."""

    packs: tuple[FileRecord, ...]
    """Its packs, and packs of other steps that hold its unchanged pieces."""

    tree: bytes | None
    """The encoded non-tensor state. Only the lowest rank of a class has it."""

    aliases: dict[str, str]
    """Tied names; from the same ranks as `tree`."""

    layouts: tuple[tuple[tuple[int, ...], tuple[str, ...], int], ...]
    """Distinct (mesh shape, placements, count of tensors); from the same ranks as `tree`."""

    per_rank: bytes | None = None
    """This rank's own values by path, encoded; None if it has none."""

    counted: Counted | None = None
    """Non-finite elements in what it wrote; None if not counted."""

    replicas: Replicas | None = None
    """Its replicas of tensors that other ranks hold too; None if not compared."""
    world_size: int = 0
    """How many ranks save; 0 if unknown."""

    optimizers: Mapping[str, OptimizerRecord] = field(default_factory=dict)
    """Class and state keys of each optimizer, by path; from the same ranks as `tree`."""

    order: bytes = b""
    """Numbers of the part's own names in the order of the state (`state_order.py`); from the same ranks as `tree`."""

    order_names: tuple[str, ...] = ()
    """Numbered names of tensors that only other parts have."""


def require_part_of(part: RankPart, rank: int, attempt: str, where: str) -> None:
    """Refuse the part of another rank or attempt.

    Raises:
        CorruptError: The part names another rank or attempt.
    """
    if (part.rank, part.attempt) != (rank, attempt):
        raise CorruptError(
            f"{where}: is the part of rank {part.rank}, attempt {part.attempt[:80]!r}; expected rank {rank}, attempt "
            f"{attempt}. Read another copy"
        )


def encode_part(part: RankPart) -> bytes:
    """Return the bytes of a part file. The last 16 are the digest of all bytes before."""
    data = msgspec.msgpack.encode(
        _PartDocument(
            part.rank,
            part.attempt,
            document_of(part.index),
            part.packs,
            part.tree,
            part.aliases,
            part.layouts,
            part.per_rank,
            UNSET if part.counted is None else dict(part.counted),
            replicas_document(part.replicas),
            dict(part.optimizers) if part.optimizers else UNSET,
            part.order or UNSET,
            part.order_names or UNSET,
            part.world_size,
            bytes(DIGEST_BYTES),
        )
    )
    body = data[:-DIGEST_BYTES]
    return body + digest_of(body)


def is_sealed(data: bytes) -> bool:
    """Return whether a part file ends in the digest of all bytes before, so that no manifest is needed to prove it."""
    try:
        seal = decode_msgpack(_SEAL_DECODER, data, "a part", "")
    except CorruptError:
        return False
    return len(seal.digest) == DIGEST_BYTES and seal.digest == digest_of(data[:-DIGEST_BYTES]) == data[-DIGEST_BYTES:]


_SEAL_DECODER = msgspec.msgpack.Decoder(_Seal)
_DECODER = msgspec.msgpack.Decoder(_PartDocument)


def decode_part(data: bytes, where: str, tables: TensorTables | None = None) -> RankPart:
    """Return the part in a file.

    Args:
        data: Content of the file.
        where: Its name, for messages.
        tables: Tensor tables of parts decoded before: thousands of ranks share a few tables.
    Raises:
        CorruptError: The file is not a part, or has an impossible value.
    """
    document = decode_msgpack(_DECODER, data, "a part", where)
    for pack in document.packs:
        if not (is_pack_name(pack.name) or step_of_pack(pack.name) is not None) or pack.bytes < 0:
            raise CorruptError(
                f"{where}: pack {pack.name[:200]!r} of {pack.bytes} bytes; expected a pack of this rank or of another "
                "step. Read another copy"
            )
    return RankPart(
        document.rank,
        document.attempt,
        index_of(document.index, where, tables),
        document.packs,
        document.tree,
        document.aliases,
        document.layouts,
        document.per_rank,
        None if isinstance(document.nonfinite, UnsetType) else document.nonfinite,
        replicas_in(document.replicas, where),
        document.world_size,
        {} if isinstance(document.optimizers, UnsetType) else document.optimizers,
        b"" if isinstance(document.order, UnsetType) else document.order,
        () if isinstance(document.order_names, UnsetType) else document.order_names,
    )
