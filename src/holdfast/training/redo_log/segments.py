"""Writes the records that one rank seals together as a segment. `stored/repository/logs.py` reads segments.

A segment is planned and written by the functions of a save: a coded pack, whose chunks are raw unless gradients are
compressed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import DONE, Source, Ticket
from holdfast.base.ports.gradients import Captured, RecordedTensor
from holdfast.base.ports.store import Store
from holdfast.base.types.plan import CODED_FOLDER, PackItem, PackPlan, PlannedPack
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.format.log import (
    RECORD_ENTRY,
    SegmentHeader,
    encode_record,
    log_folder,
    segment_key,
)
from holdfast.core.format.pack import coded_header_body
from holdfast.core.plan.coding.coded_pieces import codec_for


@dataclass(frozen=True, slots=True)
class QueuedRecord:
    """A record that is to be sealed."""

    captured: Captured
    """The record and its bytes."""

    previous: int
    """The boundary at which the record begins."""

    log: str
    """Id of the log."""


class _HeldBytes:
    """The bytes of a record, as the source of a piece."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        """Copy a run of the bytes."""
        buffer[: stop - start] = self._data[start:stop]
        return DONE


def write_segment(
    store: Store,
    writer: PackWriter,
    rank: int,
    records: Sequence[QueuedRecord],
    written: Callable[[int], None],
    coded_bytes_min: float = math.inf,
) -> int:
    """Write records of one log as one segment, and return the bytes of the segment once the segment is durable.

    Args:
        store: The root of the run.
        writer: Writes packs there.
        rank: This rank.
        records: The records, by step.
        written: Called whenever bytes were written.
        coded_bytes_min: Smallest piece that is compressed.
    Raises:
        InvalidError: A value of a record cannot be stored.
        CheckpointError: The write failed; nothing of the segment is left.
    """
    items: list[PackItem] = []
    sources: list[Source] = []
    offset = 0

    def add(tensor: TensorSpec, region: Region, source: Source) -> None:
        nonlocal offset
        is_coded = region.numel * tensor.itemsize >= coded_bytes_min
        items.append(PackItem(tensor, region, offset, len(sources), codec_for(tensor.dtype) if is_coded else ""))
        sources.append(source)
        offset += items[-1].bytes

    for queued in records:
        record = queued.captured.record
        data = encode_record(record, queued.previous)
        spec = TensorSpec(f"{record.step}/{RECORD_ENTRY}", "uint8", (len(data),))
        add(spec, Box((0,), (len(data),)), cast(Source, _HeldBytes(data)))  # A segment only copies.
        for name, recorded in _entries(record.step, queued.captured.tensors()):
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
