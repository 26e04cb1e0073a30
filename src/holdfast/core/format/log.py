"""The files of a redo log: segments, each a coded pack with the records that one rank sealed together.

    log/<id>/r00003/000000001001.safetensors    the segment of rank 3 whose first record is of step 1001

The entries of a segment are `<step>/record`, a record as msgpack, and `<step>/<part>/<name>`, the tensors of the record
(`base/types/redo.py`); `part` tells apart several regions of one tensor. The header is written last. It holds the
digest of every chunk, and a digest of itself, so a segment needs no manifest to prove its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from holdfast.base.geometry.chunking import DIGEST_BYTES, chunk_count
from holdfast.base.types.plan import Coding, Piece
from holdfast.base.types.redo import AfterImage, OptimizerCall, Record, Software
from holdfast.base.types.values import Group
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.pack import CodedHeaderBody, stated_pieces
from holdfast.core.format.sealed_json import decode_msgpack
from holdfast.core.format.values import values
from holdfast.core.format.values.json_text import loads
from holdfast.errors import CorruptError

LOG_FOLDER = "log/"
RECORD_ENTRY = "record"

_SEGMENT_KEY = re.compile(r"log/([0-9a-f]{16})/r(\d{5})/(\d{12})\.safetensors", re.ASCII)
_NO_SEAL = "0" * 2 * DIGEST_BYTES

_SEGMENT_PACK = "coded/r00000.safetensors"
"""Name by which a header is read: a segment has the header of a coded pack."""


def log_folder(log: str, rank: int) -> str:
    """Return the folder of one rank's segments, with its trailing slash."""
    return f"{LOG_FOLDER}{log}/r{rank:05d}/"


def segment_key(log: str, rank: int, first_step: int) -> str:
    """Return the key of a segment, under the root of the run."""
    return f"{log_folder(log, rank)}{first_step:012d}.safetensors"


def segment_in(key: str) -> tuple[str, int, int] | None:
    """Return log, rank and first step of the key of a segment, under the root of the run; None for any other key."""
    match = _SEGMENT_KEY.fullmatch(key)
    return (match[1], int(match[2]), int(match[3])) if match else None


class _CallDocument(msgspec.Struct, array_like=True):
    path: str
    groups: Any
    gradients: tuple[str, ...]
    scaling: Any


class _LogRecordDocument(msgspec.Struct, array_like=True):
    step: Annotated[int, msgspec.Meta(ge=0)]
    previous: Annotated[int, msgspec.Meta(ge=-1)]
    calls: tuple[_CallDocument, ...]
    images: tuple[tuple[str, int], ...]
    tree: Any
    per_rank: Any
    sums: dict[str, int]
    versions: dict[str, str]
    optimizers: dict[str, str]
    not_resumable: str
    held: tuple[str, ...]


_DECODER = msgspec.msgpack.Decoder(_LogRecordDocument)


def encode_record(record: Record, previous: int) -> bytes:
    """Return the bytes of a record.

    Args:
        record: The record.
        previous: The boundary at which the record begins: a base, or the record before.
    Raises:
        InvalidError: A value of the state has an unsupported type; the message names the path.
    """
    where = f"step {record.step}"
    calls = tuple(
        _CallDocument(
            call.path,
            values.encode([dict(group) for group in call.groups], call.path),
            call.gradients,
            values.encode(dict(call.scaling), call.path),
        )
        for call in record.calls
    )
    document = _LogRecordDocument(
        record.step,
        previous,
        calls,
        tuple((image.fqn, image.after_call) for image in record.images),
        values.encode(record.tree, where),
        values.encode(dict(record.per_rank), where),
        dict(record.sums),
        dict(record.software.versions),
        dict(record.software.optimizers),
        record.not_resumable,
        record.held,
    )
    return msgspec.msgpack.encode(document)


def decode_record(data: bytes, where: str) -> tuple[Record, int]:
    """Return a record, and the boundary at which the record begins.

    Raises:
        CorruptError: The bytes are not a record.
    """
    found = decode_msgpack(_DECODER, data, "a record", where)
    calls = []
    for call in found.calls:
        groups, scaling = values.decode(call.groups, where), values.decode(call.scaling, where)
        if not isinstance(groups, list) or not isinstance(scaling, dict):
            raise CorruptError(f"{where}: {call.path} has no groups; expected a record of the redo log")
        calls.append(OptimizerCall(call.path, tuple(groups), call.gradients, scaling))
    tree, per_rank = values.decode(found.tree, where), values.decode(found.per_rank, where)
    if not isinstance(tree, Group) or not isinstance(per_rank, dict):
        raise CorruptError(f"{where}: the record has no values; expected a record of the redo log")
    images = tuple(AfterImage(fqn, after) for fqn, after in found.images)
    software = Software(found.versions, found.optimizers)
    end = found.sums, software, found.not_resumable, found.held
    return Record(found.step, tuple(calls), images, tree, per_rank, *end), found.previous


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Makes the header of a segment once the data is written."""

    body: CodedHeaderBody
    """The header without provenance."""

    log: str
    """Id of the log."""

    rank: int
    """The rank that recorded."""

    chunks: int
    """Number of chunks of all pieces."""

    @property
    def size(self) -> int:
        """Bytes of the header: the start of the data."""
        return self.body.header_bytes(self._provenance("f" * 2 * DIGEST_BYTES * self.chunks))

    def header(self, codings: Sequence[Coding], digests: Sequence[bytes]) -> bytes:
        """Return the header, by the codings and the chunk digests of the pieces."""
        text = b"".join(digests).hex()
        unsealed = self.body.header(self._provenance(text), codings)
        return unsealed.replace(_NO_SEAL.encode(), hex_digest_of(unsealed).encode())

    def _provenance(self, digests: str) -> Mapping[str, str]:
        return {"log": self.log, "rank": str(self.rank), "digests": digests, "seal": _NO_SEAL}


def pieces_in_segment(header: bytes, key: str, log: str, rank: int) -> Sequence[Piece]:
    """Return the pieces of a segment with their digests, in file order, named as in the segment.

    Args:
        header: All bytes before the data.
        key: The key of the segment.
        log, rank: As the folder of the segment says.
    Raises:
        CorruptError: The header is damaged, or is of another log or rank.
        InvalidError: A codec is of a newer version of the format.
    """
    stated = stated_pieces(header, _SEGMENT_PACK, key)
    document: Any = loads(header[8:])  # With its metadata: its pieces were read from there.
    metadata = document["__metadata__"]
    seal = metadata.get("holdfast.seal")
    named = metadata.get("holdfast.log"), metadata.get("holdfast.rank")
    if not isinstance(seal, str) or len(seal) != len(_NO_SEAL) or header.count(seal.encode()) != 1:
        raise CorruptError(f"{key}: the header has no seal; expected the header of a segment")
    if hex_digest_of(header.replace(seal.encode(), _NO_SEAL.encode())) != seal:
        raise CorruptError(f"{key}: the header differs from the seal in it; expected the bytes that were written")
    if named != (log, str(rank)):
        raise CorruptError(f"{key}: is of log {named[0]}, rank {named[1]}; expected log {log}, rank {rank}")
    digests, at, pieces = bytes.fromhex(metadata["holdfast.digests"]), 0, []
    for each in stated:
        count = chunk_count((each.region.numel * each.tensor.itemsize), each.chunk_bytes)
        own, at = digests[at : at + count * DIGEST_BYTES], at + count * DIGEST_BYTES
        pieces.append(Piece(each.tensor, each.region, key, each.start, own, each.chunk_bytes, each.coding))
    if at != len(digests):
        raise CorruptError(f"{key}: {len(digests)} bytes of digests; expected {at}")
    return pieces
