"""Reads lines that `observers.jsonl` has written: which saves, loads and drains are under way, and which failed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Literal

import msgspec

from holdfast.base.types.events import Verb
from holdfast.core.format.sealed_json import RankNumber, StepNumber, WorldSize
from holdfast.errors import MissingError, UnavailableError

_LINE_BYTES_MAX = 1 << 24
_FAILURES_KEPT, _DAMAGED_KEPT = 1000, 20
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class EventLine(msgspec.Struct):
    """One line: the begin or end of a save, load or drain on one rank, or another event."""

    time: datetime
    event: Literal["began", "decided", "ended", "failed", "interrupted", "redone", "skipped"]
    rank: RankNumber
    verb: Verb | Literal["log"]
    step: StepNumber | None = None
    world_size: WorldSize = 1
    host: _Text = ""
    error: _Text = ""
    message: _Text = ""


class EventLines:
    """The lines of some files, each read once. Damaged lines are left out, and shown as damaged."""

    def __init__(self, paths: Iterable[str] = ()) -> None:
        """Read nothing yet.

        Args:
            paths: The files.
        Raises:
            MissingError: A file does not exist.
        """
        self._ends = {os.path.expanduser(path): (0, 0) for path in paths}
        self.paths = tuple(self._ends)
        """The files."""
        for path in self.paths:
            if not os.path.isfile(path):
                raise MissingError(f"{path}: no file of events; expected lines of holdfast.observers.jsonl")
        self.open: dict[tuple[str, int | None], dict[int, EventLine]] = {}
        """The begins of tries that have not ended, by verb and step, and by rank."""
        self.hosts: dict[int, str] = {}
        """The machine of each rank, as the last line with one names it."""
        self.failed: list[EventLine] = []
        """The last tries that failed."""
        self.damaged: list[str] = []
        """The first damaged lines: file, number and reason."""

    def refresh(self) -> None:
        """Read the lines that were appended since the last call.

        Raises:
            UnavailableError: A file cannot be read.
        """
        for path, (end, number) in self._ends.items():
            try:
                with open(path, "rb") as file:
                    if os.fstat(file.fileno()).st_size < end:
                        end = number = 0  # A log rotation has put a new file here.
                    file.seek(end)
                    # The last line may be half written: the next call reads the line.
                    while (line := file.readline(_LINE_BYTES_MAX)).endswith(b"\n") or len(line) == _LINE_BYTES_MAX:
                        end, number = end + len(line), number + 1
                        self._take(line, f"{path}: line {number:,}")
            except OSError as error:
                raise UnavailableError(f"{path}: {error}; expected a file of events that can be read") from error
            self._ends[path] = end, number

    def _take(self, data: bytes, where: str) -> None:
        try:
            line = msgspec.json.decode(data, type=EventLine)
            line.time.timestamp()
        except (ValueError, OverflowError, RecursionError) as error:
            if len(self.damaged) < _DAMAGED_KEPT:
                self.damaged.append(f"{where} is damaged: {str(error)[:200]}; expected a line of observers.jsonl")
            return
        if line.host:
            self.hosts[line.rank] = line.host
        if line.event == "began":
            self.open.setdefault((line.verb, line.step), {})[line.rank] = line
        elif line.event in ("ended", "failed"):
            # A rank ends its saves in order: a try of an earlier step was killed, and has no end.
            for key, began in [*self.open.items()]:
                if key == (line.verb, line.step) or (key[0] == line.verb and (key[1] or 0) < (line.step or 0)):
                    began.pop(line.rank, None)
                    if not began:
                        del self.open[key]
        if line.event == "failed":
            self.failed = [*self.failed, line][-_FAILURES_KEPT:]
