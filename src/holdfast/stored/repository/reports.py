"""Reports beside a checkpoint: the work of each rank during the save, the drain, and the last load of each reader.

A file holds the report of a rank, and with it those of other ranks of its node.
Reports are for people. No reader of a checkpoint needs them, and no code decides anything by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from holdfast.base.ports.readable import Readable
from holdfast.base.ports.store import Store
from holdfast.base.types.coding import KindCoding
from holdfast.base.types.events import Operation, Phase, RankReport, Verb
from holdfast.core.format.sealed_json import (
    Count,
    RankNumber,
    StepNumber,
    Text,
    WorldSize,
    decode_sealed,
    header,
    sealed,
)
from holdfast.errors import CheckpointError, CorruptError

REPORTS_FOLDER = "reports/"
"""Folder of the reports, inside the folder of the checkpoint."""

_REPORT = re.compile(r"(save|load|drain)-([0-9a-f]{16})-r(\d{5})\.json", re.ASCII)
_REPORT_BYTES_MAX = 1 << 20
_PHASES_MAX = 10_000
_CODINGS_MAX = 1000


def put_reports(store: Store, folder: str, reports: Sequence[RankReport]) -> None:
    """Put reports of some ranks on one operation beside its checkpoint, in the file of the first.

    Raises:
        CheckpointError: The file could not be written.
    """
    operation = reports[0].operation
    name = f"{operation.verb}-{reports[0].id}-r{operation.rank:05d}.json"
    # Not durable: a power cut may lose a report, and no save should wait for a disk because of it.
    store.put(f"{folder}{REPORTS_FOLDER}{name}", encode_reports(reports), durable=False)


def encode_reports(reports: Sequence[RankReport]) -> bytes:
    """Return the bytes of a file of reports; the first names the file."""
    first, *others = [_fields(report) for report in reports]
    return sealed({**header("report"), **first, **({"others": others} if others else {})})


def _fields(report: RankReport) -> dict[str, object]:
    operation = report.operation
    return {
        "verb": operation.verb,
        "id": report.id,
        "step": operation.step,
        "rank": operation.rank,
        "world_size": operation.world_size,
        "host": report.host,
        "pid": report.pid,
        "began": datetime.fromtimestamp(report.began_unix_seconds, UTC).isoformat(timespec="milliseconds"),
        "began_unix_seconds": report.began_unix_seconds,
        "seconds": report.seconds,
        "bytes": report.bytes,
        "bytes_per_second": report.bytes_per_second,
        "facts": dict(report.facts),
        "phases": [[phase.name, phase.start_seconds, phase.seconds] for phase in report.phases],
        **({"codings": [asdict(coding) for coding in report.codings]} if report.codings else {}),
    }


def reports_in(store: Readable, folder: str, begins: str = "") -> Iterator[tuple[str, RankReport | CheckpointError]]:
    """Yield key and report of every report beside a checkpoint, by key; for an unreadable file, key and error.

    Args:
        store: The store of the checkpoint.
        folder: Its folder in the store: empty, or ending in a slash.
        begins: Only files whose names begin like this, such as `save-` and an attempt.
    Raises:
        CheckpointError: The folder cannot be listed.
    """
    prefix = folder + REPORTS_FOLDER
    for key in sorted(entry.key for entry in store.list(prefix) if entry.key.startswith(prefix + begins)):
        match = _REPORT.fullmatch(key.removeprefix(prefix))
        if match is None:
            continue
        where = f"{store.url}/{key}"
        try:
            reports = decode_reports(store.get(key, _REPORT_BYTES_MAX), where, f"{store.url}/{folder}".rstrip("/"))
            identity = (reports[0].operation.verb, reports[0].id, reports[0].operation.rank)
            if identity != (match[1], match[2], int(match[3])):
                raise CorruptError(f"{where}: is report {identity}; expected the report in its name. It was renamed")
        except CheckpointError as error:
            yield key, error
        else:
            yield from ((key, report) for report in reports)


_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
_Rate = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]


class _CodingDocument(msgspec.Struct):
    kind: Text
    codec: Text
    raw_bytes: Count
    stored_bytes: Count
    found_seconds: _Seconds
    why: Text
    ratio: _Rate | None = None
    encode_bytes_per_second: _Rate | None = None
    store_bytes_per_second: _Rate | None = None
    predicted_seconds: _Seconds | None = None


class _ReportDocument(msgspec.Struct):
    verb: Verb
    id: Text
    rank: RankNumber
    world_size: WorldSize
    host: Text
    pid: Count
    began_unix_seconds: _Seconds
    seconds: _Seconds
    bytes: Count
    facts: dict[Text, bool | int | float | Text]
    phases: Annotated[list[tuple[Text, _Seconds, _Seconds]], msgspec.Meta(max_length=_PHASES_MAX)]
    step: StepNumber | None = None
    codings: Annotated[list[_CodingDocument], msgspec.Meta(max_length=_CODINGS_MAX)] = []


class _FileDocument(_ReportDocument):
    others: list[_ReportDocument] = []


def decode_reports(data: bytes, where: str, url: str) -> tuple[RankReport, ...]:
    """Return the reports that a file holds, at least one.

    Args:
        data: The text.
        where: The file, for messages.
        url: URL of the checkpoint.
    Raises:
        CorruptError: The text is damaged, or a field is impossible.
        InvalidError: It is of a format that this version does not read.
    """
    document, _ = decode_sealed(data, "report", _FileDocument, where)
    return tuple(_report(each, url) for each in (document, *document.others))


def _report(document: _ReportDocument, url: str) -> RankReport:
    return RankReport(
        operation=Operation(document.verb, document.step, url, document.rank, document.world_size),
        id=document.id,
        host=document.host,
        pid=document.pid,
        began_unix_seconds=document.began_unix_seconds,
        seconds=document.seconds,
        phases=tuple(Phase(*phase) for phase in document.phases),
        bytes=document.bytes,
        facts=document.facts,
        codings=tuple(KindCoding(**msgspec.structs.asdict(coding)) for coding in document.codings),
    )
