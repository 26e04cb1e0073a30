"""Reports beside a checkpoint: what each rank did when it was saved, and the last time each reader loaded it.

They are for people. No reader of a checkpoint needs them, and nothing is decided by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Literal

from holdfast.errors import CheckpointError, CorruptError
from holdfast.format.names import STEP_MAX, WORLD_SIZE_MAX
from holdfast.format.sealed_json import check_format, sealed, unsealed
from holdfast.format.values import values
from holdfast.ports.store import Readable, Store
from holdfast.types.events import Fact, Operation, Phase, RankReport, Verb
from holdfast.types.manifest import FORMAT_MAJOR

FORMAT_MINOR_REPORTS = 2
"""Minor version that brought reports."""

REPORTS_FOLDER = "reports/"
"""Folder of the reports, inside that of the checkpoint."""

_REPORT = re.compile(r"(save|load)-([0-9a-f]{16})-r(\d{5})\.json", re.ASCII)
_REPORT_BYTES_MAX = 1 << 20
_PHASES_MAX = 10_000


def leave_report(store: Store, folder: str, report: RankReport) -> None:
    """Put a report beside a checkpoint. It is not made durable: a power cut may take it, and no save waits for it.

    Raises:
        CheckpointError: It could not be written.
    """
    operation = report.operation
    name = f"{operation.verb}-{report.id}-r{operation.rank:05d}.json"
    store.put(f"{folder}{REPORTS_FOLDER}{name}", encode_report(report), durable=False)


def encode_report(report: RankReport) -> bytes:
    """Return the bytes of a report."""
    operation = report.operation
    return sealed(
        {
            "holdfast": {"format": [FORMAT_MAJOR, FORMAT_MINOR_REPORTS], "kind": "report"},
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
        }
    )


def reports_in(store: Readable, folder: str) -> Iterator[tuple[str, RankReport | CheckpointError]]:
    """Yield every report beside a checkpoint by its key, sorted; of one that cannot be read what to say of it.

    Args:
        store: Where the checkpoint lies.
        folder: Its folder there: empty, or ending in a slash.
    Raises:
        CheckpointError: The folder cannot be listed.
    """
    prefix = folder + REPORTS_FOLDER
    for key in sorted(entry.key for entry in store.list(prefix)):
        match = _REPORT.fullmatch(key.removeprefix(prefix))
        if match is None:
            continue
        where = f"{store.url}/{key}"
        try:
            report = decode_report(store.get(key, _REPORT_BYTES_MAX), where, f"{store.url}/{folder}".rstrip("/"))
            said = (report.operation.verb, report.id, report.operation.rank)
            if said != (match[1], match[2], int(match[3])):
                raise CorruptError(f"{where}: is the report {said}; expected what its name says. It was renamed")
        except CheckpointError as error:
            yield key, error
        else:
            yield key, report


def decode_report(data: bytes, where: str, url: str) -> RankReport:
    """Return the report that a text holds.

    Args:
        data: The text.
        where: Where it was read, for messages.
        url: Where the checkpoint lies.
    Raises:
        CorruptError: It is damaged, or says something impossible.
        InvalidError: It is of a format that this version does not read.
    """
    document, _ = unsealed(data, where)
    check_format(document, "report", where)
    told = _Told(document, where)
    step, rank = document.get("step"), told.whole("rank", WORLD_SIZE_MAX - 1)
    return RankReport(
        operation=Operation(
            verb=told.verb(),
            step=None if step is None else told.whole("step", STEP_MAX),
            url=url,
            rank=rank,
            world_size=told.whole("world_size", WORLD_SIZE_MAX),
        ),
        id=told.text("id"),
        host=told.text("host"),
        pid=told.whole("pid", 1 << 62),
        began_unix_seconds=told.number("began_unix_seconds"),
        seconds=told.number("seconds"),
        phases=tuple(told.phases()),
        bytes=told.whole("bytes", 1 << 62),
        facts=told.facts(),
    )


class _Told:
    """Fields of a report, each taken only if it is what it must be."""

    def __init__(self, document: Mapping[str, object], where: str) -> None:
        self._document, self._where = document, where

    def verb(self) -> Verb:
        found = self._document.get("verb")
        verbs: tuple[Literal["save"], Literal["load"]] = ("save", "load")
        for verb in verbs:
            if found == verb:
                return verb
        raise self._wrong("verb", found, "save or load")

    def text(self, name: str) -> str:
        found = self._document.get(name)
        if not isinstance(found, str) or not values.is_json_scalar(found):
            raise self._wrong(name, found, "text")
        return found

    def whole(self, name: str, largest: int) -> int:
        found = self._document.get(name)
        if type(found) is not int or not 0 <= found <= largest:
            raise self._wrong(name, found, "a whole number")
        return found

    def number(self, name: str) -> float:
        found = self._document.get(name)
        if not _is_seconds(found):
            raise self._wrong(name, found, "a number of seconds")
        assert isinstance(found, int | float)
        return float(found)

    def phases(self) -> Iterator[Phase]:
        found = self._document.get("phases")
        if not isinstance(found, list) or len(found) > _PHASES_MAX:
            raise self._wrong("phases", found, f"a list of at most {_PHASES_MAX}")
        for each in found:
            if not isinstance(each, list) or len(each) != 3 or not isinstance(each[0], str):
                raise self._wrong("phases", each, "[name, start, seconds]")
            if not values.is_json_scalar(each[0]) or not all(map(_is_seconds, each[1:])):
                raise self._wrong("phases", each, "[name, start, seconds]")
            yield Phase(each[0], float(each[1]), float(each[2]))

    def facts(self) -> dict[str, Fact]:
        found = self._document.get("facts")
        if not isinstance(found, dict):
            raise self._wrong("facts", found, "an object")
        facts: dict[str, Fact] = {}
        for name, fact in found.items():
            if not values.is_json_scalar(name) or fact is None or not values.is_json_scalar(fact):
                raise self._wrong("facts", {name: fact}, "numbers, texts and truths by name")
            assert isinstance(fact, int | float | str | bool), fact
            facts[name] = fact
        return facts

    def _wrong(self, name: str, found: object, expected: str) -> CorruptError:
        return CorruptError(f"{self._where}: {name} is {str(found)[:80]!r}; expected {expected}")


def _is_seconds(found: object) -> bool:
    if not isinstance(found, int | float) or isinstance(found, bool):
        return False
    return 0 <= found < 1e12
