"""An observer that writes saves and loads as lines of JSON to a file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime

from holdfast.base.types.events import (
    Began,
    Decided,
    DrainSkipped,
    Ended,
    Event,
    Failed,
    LogInterrupted,
    LogRedone,
    Operation,
    Phase,
    StepProtected,
)
from holdfast.errors import InvalidError

_NAMES = {
    DrainSkipped: ("drain", "skipped"),
    StepProtected: ("protect", "protected"),
    LogInterrupted: ("log", "interrupted"),
    LogRedone: ("log", "redone"),
}
"""Verb and name of the line of an event."""


class JsonLines:
    """Appends one line when a save or load begins, and one when it ends.

    Each line is one `write` to a file that is opened for this line, in append mode. So the ranks of one host may share
    a file, and a log rotation may move it away.
    """

    def __init__(self, path: object) -> None:
        """Check the path; the first line creates the file.

        Args:
            path: The file. `{rank}` in it is replaced by the rank.
        Raises:
            InvalidError: It is no path, or its folder does not exist.
        """
        if not isinstance(path, str | os.PathLike):
            raise InvalidError(f"jsonl: path is {type(path).__name__}; expected a file as str or Path")
        self._path = os.path.abspath(os.fspath(path))
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            raise InvalidError(f"jsonl: {self._path}: there is no folder {folder}; expected one. Create it first")

    def on_event(self, event: Event) -> None:
        """Write a line for a begin, an end, decisions on codecs, an interruption or a redo; ignore other events."""
        fields: dict[str, object]
        if isinstance(event, Began):
            self._write(event.operation, "began", event.unix_seconds, {})
        elif isinstance(event, Decided):
            decisions = {kind: asdict(decision) for kind, decision in event.decisions.items()}
            fields = {"predicted_seconds": event.predicted_seconds, "decisions": decisions}
            self._write(event.operation, "decided", event.unix_seconds, fields)
        elif isinstance(event, Ended):
            report = event.report
            fields = {
                "id": report.id,
                "host": report.host,
                "pid": report.pid,
                "seconds": round(report.seconds, 6),
                "bytes": report.bytes,
                "bytes_per_second": round(report.bytes_per_second),
                **report.facts,
                "phases": _seconds_of(report.phases),
            }
            if report.codings:
                fields["codings"] = [asdict(coding) for coding in report.codings]
            self._write(report.operation, "ended", report.began_unix_seconds + report.seconds, fields)
        elif isinstance(event, Failed):
            fields = {
                "error": event.error,
                "message": event.message,
                "seconds": round(event.seconds, 6),
                "phases": _seconds_of(event.phases),
            }
            self._write(event.operation, "failed", event.began_unix_seconds + event.seconds, fields)
        elif isinstance(event, DrainSkipped | StepProtected | LogInterrupted | LogRedone):
            verb, name = _NAMES[type(event)]
            fields = {"verb": verb, **asdict(event)}
            del fields["unix_seconds"]
            self._append(event.rank, name, event.unix_seconds, fields)

    def _write(self, operation: Operation, name: str, unix_seconds: float, fields: dict[str, object]) -> None:
        of_operation = {
            "verb": operation.verb,
            "step": operation.step,
            "rank": operation.rank,
            "world_size": operation.world_size,
            "url": operation.url,
        }
        self._append(operation.rank, name, unix_seconds, {**of_operation, **fields})

    def _append(self, rank: int, name: str, unix_seconds: float, fields: dict[str, object]) -> None:
        time = datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": name, **fields}, allow_nan=False).encode() + b"\n"
        path = self._path.replace("{rank}", str(rank))
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(file, line)
        finally:
            os.close(file)
        if written < len(line):
            raise OSError(
                f"{path}: {written} of {len(line)} bytes of a line were written; expected all. Free some space"
            )


def _seconds_of(phases: tuple[Phase, ...]) -> dict[str, float]:
    """Return the total seconds of each phase, by name."""
    seconds: dict[str, float] = {}
    for phase in phases:
        seconds[phase.name] = round(seconds.get(phase.name, 0.0) + phase.seconds, 6)
    return seconds
