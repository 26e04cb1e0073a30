"""The redo logs of a run as stored: segments by rank, records in segments, and the steps that a log reaches.

Every reader of logs begins here: a load, a collection, a listing, a verification.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from holdfast.base.geometry.chunking import DIGEST_BYTES, chunk_count, chunk_range
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import Piece
from holdfast.base.types.redo import Record
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.format.digest import digest_of
from holdfast.core.format.log import LOG_FOLDER, RECORD_ENTRY, decode_record, log_folder, pieces_in_segment, segment_in
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.core.format.pack import HEADER_BYTES_MAX
from holdfast.errors import CorruptError, MissingError
from holdfast.stored.repository.quarantine import is_skipped, list_records
from holdfast.stored.repository.timelines import RunTimelines, StoredManifest, timelines_from

logger = logging.getLogger(__name__)

BASES_KEPT = 2
"""Newest bases that stay, with the log after the older one."""

_FIRST_READ_BYTES = 1 << 17
"""The first read of a segment: header and first record of about 300 tensors. Training of many ranks records fewer."""


class TornSegment(CorruptError):
    """A segment without its end: the writer was killed, and the segment was never sealed."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of a redo log."""

    log: str
    """Id of the log."""

    rank: int
    """The rank that recorded."""

    first: int
    """Step of the first record."""

    key: str
    """The key under the root of the run."""

    bytes: int
    """The size."""


@dataclass(frozen=True, slots=True)
class RunLog:
    """The redo log after a base: the records from which a load goes on."""

    id: str
    """Id of the log."""

    base: int
    """Step of the base."""

    steps: tuple[int, ...]
    """Steps after the base that every rank has recorded without a gap, ascending."""

    segments: tuple[Segment, ...]
    """The segments of all ranks that may hold records after the base, by rank and step."""

    store: Store = field(repr=False, compare=False)
    """The root of the run."""

    @property
    def reach(self) -> int:
        """The last step to which every rank has recorded; the base if there is no such record."""
        return self.steps[-1] if self.steps else self.base

    @property
    def bytes(self) -> int:
        """Bytes of the segments."""
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class SealedRecord:
    """A record in storage."""

    record: Record
    """The record."""

    previous: int
    """The boundary at which the record begins."""

    pieces: Mapping[str, Sequence[Piece]]
    """Its pieces by their names in the record."""


def segments_of(store: Store, folder: str = LOG_FOLDER) -> Mapping[str, Mapping[int, list[Segment]]]:
    """Return the segments in a folder of logs, by log and rank; ascending. One listing."""
    found: dict[str, dict[int, list[Segment]]] = {}
    for entry in store.list(folder):
        named = segment_in(entry.key)
        if named is not None:
            log, rank, first = named
            found.setdefault(log, {}).setdefault(rank, []).append(Segment(log, rank, first, entry.key, entry.bytes))
    for by_rank in found.values():
        for listed in by_rank.values():
            listed.sort(key=lambda segment: segment.first)
    return found


def newest_logs(store: Store, stored: RunTimelines, suspects: Collection[str | None] = ()) -> tuple[RunLog, ...]:
    """Return the logs after the newest bases of a run, the newest first: those that a restart may need.

    Args:
        store: The root of the run.
        stored: The manifests of the run.
        suspects: Digests of manifests under quarantine: no load takes these.
    """
    trusted = (each for each in reversed(stored.chain) if each.log and each.digest not in suspects)
    bases = list(islice(trusted, BASES_KEPT))
    listed = segments_of(store) if bases else {}
    found = []
    for base in bases:
        with suppress(MissingError):  # A collection has removed the base meanwhile.
            found.append(_log_of(store, stored, base, listed))
    return tuple(found)


def log_after(store: Store, base: Manifest) -> RunLog | None:
    """Return the log after one base; None if the step is no base, or if a newer timeline superseded the base.

    Args:
        store: The root of the run.
        base: The manifest of the base.
    """
    if not base.log or base.step is None:
        return None
    stored = timelines_from(store, base.step)
    found = next((each for each in stored.chain if each.digest == base.digest), None)
    return None if found is None else _log_of(store, stored, found)


def base_reaching(store: Store, stored: RunTimelines, step: int) -> int | None:
    """Return the base from which the log reaches a step; None if no log reaches the step.

    Args:
        store: The root of the run.
        stored: The manifests of the run.
        step: The step.
    """
    records = list_records(store)
    older = (each for each in reversed(stored.chain) if each.timeline is not None and each.step < step)
    base = next((each for each in older if not is_skipped(store, each.step, each.key, records)), None)
    if base is None or not base.log or step not in _log_of(store, stored, base).steps:
        return None
    return base.step


def _log_of(
    store: Store,
    stored: RunTimelines,
    base: StoredManifest,
    listed: Mapping[str, Mapping[int, Sequence[Segment]]] | None = None,
) -> RunLog:
    """Return the log after a base; `listed` has the segments of the run, if they were listed already."""
    if listed is None:
        listed = segments_of(store, f"{LOG_FOLDER}{base.log}/")
    manifest = decode_manifest(store.get(base.key, MANIFEST_BYTES_MAX), f"{store.url}/{base.key}")
    below = stored.log_end(base)
    counted = {
        rank: [each for each in _newer(segments, base.step) if below is None or each.first < below]
        for rank, segments in listed.get(base.log, {}).items()
    }
    steps: tuple[int, ...] | None = None
    for rank in range(manifest.world_size):
        steps = _steps_of(store, counted.get(rank, ()), base.step, below, steps)
        if not steps:
            break  # No other rank can reach further.
    after = tuple(segment for rank in sorted(counted) for segment in counted[rank])
    return RunLog(base.log, base.step, steps or (), after, store)


def _newer(listed: Sequence[Segment], after: int) -> Sequence[Segment]:
    """Return the segments of a rank that may hold records after a step."""
    # The segment before the first newer one may hold newer records too.
    older = sum(segment.first <= after for segment in listed)
    return listed[max(older - 1, 0) :]


def _steps_of(
    store: Store, listed: Iterable[Segment], base: int, below: int | None, others: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the steps that a rank has recorded after a base without a gap.

    Args:
        store: The root of the run.
        listed: The segments of the rank.
        base: The step of the base.
        below: The log counts below this step only; None: to its end.
        others: The steps that ranks before have recorded: no more count. None for the first rank.
    """
    if others is not None:
        firsts = {segment.first for segment in listed}
        if firsts.issuperset(others):
            return others  # Each of these segments holds one record, and no header has to be read.
        listed = [segment for segment in listed if segment.first <= others[-1]]
        below = others[-1] + 1

    def read(segment: Segment) -> tuple[Segment, Mapping[int, SealedRecord]]:
        with suppress(CorruptError, MissingError):
            return segment, records_in(store, segment)
        return segment, {}

    steps: list[int] = []
    for segment, records in ordered_parallel_map(read, listed):
        following = steps_reached(records, steps[-1] if steps else base, below)
        if not following and segment.first > base:
            break
        steps += following
    return tuple(steps)


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
    found: dict[int, SealedRecord] = {}
    for segment in _newer(segments_of(store, log_folder(log, rank)).get(log, {}).get(rank, ()), after):
        try:
            records = records_in(store, segment)
        except (CorruptError, MissingError) as error:  # A collection may have removed the segment since the list.
            logger.warning("%s: the log ends before this segment: %s", store.url, error)
            continue
        found.update((step, record) for step, record in records.items() if step > after)
    return found


def records_in(store: Store, segment: Segment) -> dict[int, SealedRecord]:
    """Return the records of a segment by step. Header and records are proven, the tensors are not read.

    Raises:
        TornSegment: The segment ends early.
        CorruptError: The segment is damaged.
        MissingError: The segment is gone.
    """
    key, size, where = segment.key, segment.bytes, f"{store.url}/{segment.key}"
    head = _read(store, key, 0, min(size, _FIRST_READ_BYTES))
    header_bytes = struct.unpack("<Q", head[:8])[0] + 8 if len(head) >= 8 else 0
    if not 8 < header_bytes <= min(size, HEADER_BYTES_MAX):
        # The header is written last.
        kind = TornSegment if header_bytes <= HEADER_BYTES_MAX else CorruptError
        raise kind(f"{where}: a header of {header_bytes} bytes in {size}; expected a segment. Read another copy")
    if header_bytes > len(head):
        head += _read(store, key, len(head), header_bytes)
    pieces = pieces_in_segment(head[:header_bytes], key, segment.log, segment.rank)
    records: dict[int, tuple[Record, int]] = {}
    by_step: dict[int, dict[str, list[Piece]]] = {}
    for piece in pieces:
        step_text, _, rest = piece.tensor.fqn.partition("/")
        if not step_text.isdecimal() or not (rest == RECORD_ENTRY or int(step_text) in records):
            raise CorruptError(f"{where}: holds {piece.tensor.fqn[:80]!r}; expected the entry of a record before")
        step = int(step_text)
        if piece.offset + piece.stored_bytes > size:
            raise TornSegment(f"{where}: ends at {size}; expected {piece.offset + piece.stored_bytes}")
        if rest == RECORD_ENTRY:
            start, stop = piece.offset, piece.offset + piece.stored_bytes
            data = head[start:stop] if stop <= len(head) else _read(store, key, start, stop)
            _require_digests(piece, data, where)
            records[step] = decode_record(data, where)
            by_step[step] = {}
            continue
        name = rest.partition("/")[2]
        # Under its name in the record: a read of another rank finds the pieces of all ranks by it.
        named = replace(piece, tensor=replace(piece.tensor, fqn=name))
        by_step[step].setdefault(name, []).append(named)
    return {step: SealedRecord(record, previous, by_step[step]) for step, (record, previous) in records.items()}


def _require_digests(piece: Piece, data: bytes, where: str) -> None:
    for number in range(chunk_count(piece.bytes, piece.chunk_bytes)):
        start, stop = chunk_range(piece.bytes, piece.chunk_bytes, number)
        if digest_of(data[start:stop]) != piece.digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]:
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
