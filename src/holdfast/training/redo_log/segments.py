"""Writes the records that one rank seals together as a segment, and reads the segments of a rank.

A segment is planned and written by the functions of a save: a coded pack whose chunks are raw.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count, chunk_range
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import Source, Ticket
from holdfast.base.ports.gradients import Captured, RecordedTensor
from holdfast.base.ports.store import Store
from holdfast.base.types.plan import CODED_FOLDER, PackItem, PackPlan, Piece, PlannedPack
from holdfast.base.types.redo import Record
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.format.digest import digest_of
from holdfast.core.format.log import (
    RECORD_ENTRY,
    SegmentHeader,
    decode_record,
    encode_record,
    log_folder,
    pieces_in_segment,
    segment_in,
    segment_key,
)
from holdfast.core.format.pack import HEADER_BYTES_MAX, coded_header_body
from holdfast.errors import CorruptError

logger = logging.getLogger(__name__)

_FIRST_READ_BYTES = 1 << 18
"""The first read of a segment: most often the header and the first record."""


@dataclass(frozen=True, slots=True)
class QueuedRecord:
    """A record that is to be sealed."""

    captured: Captured
    """The record and its bytes."""

    previous: int
    """The boundary at which the record begins."""

    log: str
    """Id of the log."""


class _CopyEnded:
    def wait(self) -> None:
        """Return: nothing is under way."""


class _HeldBytes:
    """The bytes of a record, as the source of a piece."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        """Copy a run of the bytes."""
        buffer[: stop - start] = self._data[start:stop]
        return _CopyEnded()


def write_segment(
    store: Store, writer: PackWriter, rank: int, records: Sequence[QueuedRecord], written: Callable[[int], None]
) -> int:
    """Write records of one log as one segment, and return the bytes of the segment once the segment is durable.

    Args:
        store: The root of the run.
        writer: Writes packs there.
        rank: This rank.
        records: The records, by step.
        written: Called whenever bytes were written.
    Raises:
        InvalidError: A value of a record cannot be stored.
        CheckpointError: The write failed; nothing of the segment is left.
    """
    items: list[PackItem] = []
    sources: list[Source] = []
    offset = 0

    def add(tensor: TensorSpec, region: Region, source: Source) -> None:
        nonlocal offset
        items.append(PackItem(tensor, region, offset, len(sources)))
        sources.append(source)
        offset += items[-1].bytes

    for queued in records:
        record = queued.captured.record
        data = encode_record(record, queued.previous)
        spec = TensorSpec(f"{record.step}/{RECORD_ENTRY}", "uint8", (len(data),))
        add(spec, Box((0,), (len(data),)), cast(Source, _HeldBytes(data)))  # A segment only copies.
        for name, recorded in _entries(record.step, queued.captured.tensors):
            add(replace(recorded.tensor, fqn=name), recorded.region, recorded.source)
    plan = PackPlan(f"{CODED_FOLDER}r{rank:05d}.safetensors", tuple(items))
    chunk_bytes = writer.chunk_bytes
    chunks = sum(chunk_count(item.bytes, chunk_bytes) for item in items)
    log = records[0].log
    header = SegmentHeader(coded_header_body(plan, chunk_bytes), log, rank, chunks)
    key = segment_key(log, rank, records[0].captured.record.step)
    pack = PlannedPack(key, b"", plan, header.size, header.header)
    count = writer.write(pack, sources, written).record.bytes
    # A writer leaves the names of packs to the commit of a save. A segment has no commit.
    store.sync(log_folder(log, rank))
    return count


def _entries(step: int, tensors: Sequence[RecordedTensor]) -> Iterator[tuple[str, RecordedTensor]]:
    """Yield the name of each tensor in a segment: regions of one tensor have different numbers."""
    regions: dict[str, int] = {}
    for recorded in tensors:
        name = recorded.tensor.fqn
        part = regions[name] = regions.get(name, -1) + 1
        yield f"{step}/{part}/{name}", recorded


@dataclass(frozen=True, slots=True)
class SealedRecord:
    """A record in storage."""

    record: Record
    """The record."""

    previous: int
    """The boundary at which the record begins."""

    pieces: Mapping[str, Sequence[Piece]]
    """Its pieces by their names in the record."""


def read_records(store: Store, log: str, rank: int, after: int) -> dict[int, SealedRecord]:
    """Return the sealed records of one rank after a step, by step; damaged segments are left out with a warning.

    Args:
        store: The root of the run.
        log: Id of the log.
        rank: The rank that recorded.
        after: The base: older records are not read.
    Raises:
        UnavailableError: The store failed.
    """
    entries = [(named[2], entry) for entry in store.list(log_folder(log, rank)) if (named := segment_in(entry.key))]
    entries.sort(key=lambda each: each[0])
    # The segment before the first newer one may hold newer records too.
    older = sum(first <= after for first, _ in entries)
    found: dict[int, SealedRecord] = {}
    for _, entry in entries[max(older - 1, 0) :]:
        try:
            records = _read_segment(store, entry.key, entry.bytes, log, rank)
        except CorruptError as error:
            logger.warning("%s: the log ends before this segment: %s", store.url, error)
            continue
        found.update((step, record) for step, record in records.items() if step > after)
    return found


def reach_near(store: Store, log: str, rank: int, step: int) -> int | None:
    """Return the last step up to a given one in the segment that would hold the given step; None without a segment."""
    entries = [(named[2], entry) for entry in store.list(log_folder(log, rank)) if (named := segment_in(entry.key))]
    before = [each for each in sorted(entries, key=lambda each: each[0]) if each[0] <= step]
    if not before:
        return None
    entry = before[-1][1]
    return max(each for each in _read_segment(store, entry.key, entry.bytes, log, rank) if each <= step)


def _read_segment(store: Store, key: str, size: int, log: str, rank: int) -> dict[int, SealedRecord]:
    where = f"{store.url}/{key}"
    head = _read(store, key, 0, min(size, _FIRST_READ_BYTES))
    header_bytes = struct.unpack("<Q", head[:8])[0] + 8 if len(head) >= 8 else 0
    if not 8 < header_bytes <= min(size, HEADER_BYTES_MAX):
        raise CorruptError(
            f"{where}: a header of {header_bytes} bytes in {size}; expected a segment. Read another copy"
        )
    if header_bytes > len(head):
        head += _read(store, key, len(head), header_bytes)
    pieces = pieces_in_segment(head[:header_bytes], key, log, rank)
    records: dict[int, tuple[Record, int]] = {}
    by_step: dict[int, dict[str, list[Piece]]] = {}
    for piece in pieces:
        step_text, _, rest = piece.tensor.fqn.partition("/")
        if not step_text.isdecimal() or not (rest == RECORD_ENTRY or int(step_text) in records):
            raise CorruptError(f"{where}: holds {piece.tensor.fqn[:80]!r}; expected the entry of a record before")
        step = int(step_text)
        if piece.offset + piece.stored_bytes > size:
            raise CorruptError(f"{where}: ends at {size}; expected {piece.offset + piece.stored_bytes}")
        if rest == RECORD_ENTRY:
            start, stop = piece.offset, piece.offset + piece.stored_bytes
            data = head[start:stop] if stop <= len(head) else _read(store, key, start, stop)
            _require_digests(piece, data, where)
            records[step] = decode_record(data, where)
            by_step[step] = {}
            continue
        name = rest.partition("/")[2]
        # Under its name in the record: a read of another rank finds the pieces of all ranks by this name.
        named = replace(piece, tensor=replace(piece.tensor, fqn=name))
        by_step[step].setdefault(name, []).append(named)
    return {step: SealedRecord(record, previous, by_step[step]) for step, (record, previous) in records.items()}


def _require_digests(piece: Piece, data: bytes, where: str) -> None:
    for number in range(chunk_count(piece.bytes, piece.chunk_bytes)):
        start, stop = chunk_range(piece.bytes, piece.chunk_bytes, number)
        if digest_of(data[start:stop]) != piece.digests[16 * number : 16 * number + 16]:
            raise CorruptError(f"{where}: {piece.tensor.fqn} differs from its digest. Read another copy")


def _read(store: Store, key: str, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    store.read_into(key, [(start, stop)], [memoryview(buffer)])
    return bytes(buffer)


def steps_reached(records: Mapping[int, SealedRecord], base: int, below: int | None = None) -> list[int]:
    """Return the steps of the records that follow a base without a gap, ascending.

    Args:
        records: Sealed records of one rank, by step.
        base: The step of the base.
        below: The log counts below this step only; None: to its end.
    """
    following = {each.previous: step for step, each in records.items()}
    steps, at = [], base
    while (step := following.get(at)) is not None and step > at and (below is None or step < below):
        steps.append(step)
        at = step
    return steps
