"""Records of timelines that no manifest may state: one that a load began at once, or one whose last step was removed.

A record makes a timeline count as if a manifest stated it. So the steps that it leaves are superseded from its put on,
whether they are still stored or not. It also names the steps that a load discarded: a collection removes them, also the
collection of a later process. Only the holder of the newest epoch puts and deletes records.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field, replace

import msgspec

from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Fence
from holdfast.base.types.manifest import FORMAT_MINOR_TIMELINES
from holdfast.base.types.timeline import Timeline
from holdfast.core.format.sealed_json import Digest, EpochNumber, StepNumber, decode_sealed, header, sealed
from holdfast.core.format.timeline import TimelineDocument, decode_timeline, encode_timeline, timeline_in_damaged
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.settings import MIB
from holdfast.stored.repository.publish import publish

logger = logging.getLogger(__name__)

TIMELINES_FOLDER = "timelines/"
"""Folder of the records, under the root of a run."""

_KEY = re.compile(r"timelines/[0-9a-f]{16}\.json", re.ASCII)
_KIND = "timeline"
_BYTES_MAX = 256 * MIB


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """A timeline that counts as if a manifest stated it."""

    timeline: Timeline
    """The timeline."""

    epoch: int
    """Epoch of the writer; a later writer that accepts the record replaces it by one of its own epoch."""

    discarded: frozenset[tuple[int, str]] = frozenset()
    """Step and digest of the manifests that a collection removes. None of them is of the chain of the timeline."""

    stored: bytes = field(default=b"", compare=False, repr=False)
    """The record as it was read."""

    @property
    def key(self) -> str:
        """Key of the record. The id of a timeline is random, so no two writers use one key."""
        return f"{TIMELINES_FOLDER}{self.timeline.id}.json"


class _RecordDocument(msgspec.Struct):
    epoch: EpochNumber
    timeline: TimelineDocument
    discarded: list[tuple[StepNumber, Digest]]


def put_record(store: Store, record: TimelineRecord) -> None:
    """Put a record, unless it is there already. The list of the epoch is one with timelines by now.

    Raises:
        ConflictError: Another record of this timeline is there.
        UnavailableError: The store failed; whether the record is there is unknown.
    """
    publish(store, record.key, _encode(record))


def ensure_record(store: Store, record: TimelineRecord) -> None:
    """Put a record, unless the timeline has one."""
    if record.key not in record_keys(store):
        put_record(store, record)


def timeline_records(store: Store, fence: Fence) -> list[TimelineRecord]:
    """Return the records that count.

    The text of a damaged one may still state its timeline, as that of a damaged manifest: it then discards nothing.

    Raises:
        InvalidError: A record is of a newer format.
    """
    if not fence.has_timelines:
        return []
    records = (_read(store, key, fence) for key in record_keys(store))
    return [record for record in records if record is not None and record.epoch >= fence.epoch]


def adopt_records(store: Store, former_fence: Fence, epoch: int) -> None:
    """Have the records that count by the former fence count in a new epoch too. Call it before that has its list.

    Raises:
        UnavailableError: Storage failed.
    """
    _change(store, former_fence, lambda record: replace(record, epoch=max(epoch, record.epoch)))


def take_back(store: Store, fence: Fence, names: Set[tuple[int, str]]) -> None:
    """Have no record discard some manifests any more: training goes on from them. Their timelines count as before.

    Args:
        store: The root of the run.
        fence: Which records count.
        names: Step and digest of the manifests.
    Raises:
        UnavailableError: Storage failed.
    """
    _change(store, fence, lambda record: replace(record, discarded=record.discarded - names))


def _change(store: Store, fence: Fence, changed: Callable[[TimelineRecord], TimelineRecord]) -> None:
    """Replace each record that counts by a changed one, and none that another writer has replaced since the look.

    A writer that was stopped here for longer than its lease would set back what the next one has adopted.
    """
    for record in timeline_records(store, fence):
        current: TimelineRecord | None = record
        while current is not None and (new := changed(current)) != current:
            try:
                store.replace(record.key, _encode(new), current.stored)
                break
            except ConflictError:
                current = _read(store, record.key, fence)


def record_keys(store: Store) -> list[str]:
    """Return the keys of all records, readable or not."""
    return sorted(entry.key for entry in store.list(TIMELINES_FOLDER) if _KEY.fullmatch(entry.key))


def ended_records(
    records: Collection[TimelineRecord],
    stored: Mapping[tuple[int, str], int],
    gone: Collection[tuple[int, str]],
    going: Collection[tuple[int, str]],
) -> list[str]:
    """Return the keys of the records that nobody needs: their steps are gone, and a manifest states as new a timeline.

    Args:
        records: The records that count.
        stored: Number of the timeline of each manifest that counts, by step and digest.
        gone: Step and digest of those that were removed since.
        going: Step and digest of those that are to be removed. None of them proves a timeline.
    """
    newest = max((number for name, number in stored.items() if name not in gone and name not in going), default=0)
    return [
        record.key
        for record in records
        if record.timeline.number <= newest
        and not any(name in stored and name not in gone for name in record.discarded)
    ]


def _encode(record: TimelineRecord) -> bytes:
    return sealed(
        {
            **header(_KIND, FORMAT_MINOR_TIMELINES),
            "epoch": record.epoch,
            "timeline": encode_timeline(record.timeline),
            "discarded": [[step, digest] for step, digest in sorted(record.discarded)],
        }
    )


def _read(store: Store, key: str, fence: Fence) -> TimelineRecord | None:
    where = f"{store.url}/{key}"
    try:
        data = store.get(key, _BYTES_MAX)
    except MissingError:
        return None  # The holder removed it after it was listed: a manifest states as new a timeline.
    except (CorruptError, InvalidError) as error:
        logger.warning("%s: skipped, it is no record: %s", where, error)
        return None
    try:
        document, _ = decode_sealed(data, _KIND, _RecordDocument, where)
    except CorruptError as error:
        timeline = timeline_in_damaged(data)
        what = "steps that it discarded count again" if timeline is None else "its timeline counts"
        logger.warning("%s; %s", error, what)
        return None if timeline is None else TimelineRecord(timeline, fence.epoch, stored=data)
    record = TimelineRecord(decode_timeline(document.timeline), document.epoch, frozenset(document.discarded), data)
    return record if record.key == key else None
