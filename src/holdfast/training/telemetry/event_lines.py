"""Reads lines that `observers.jsonl` has written: which saves, loads and drains are under way, and which failed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from holdfast.base.types.events import Verb
from holdfast.core.format.sealed_json import RankNumber, StepNumber, WorldSize
from holdfast.errors import MissingError

_LINE_BYTES_MAX = 1 << 24
_FAILURES_KEPT, _DAMAGED_KEPT = 1000, 20
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class EventLine(msgspec.Struct):
    """One line: the begin or end of a save, load or drain on one rank, or another event."""

    time: datetime
    event: _Text
    rank: RankNumber
    verb: Verb | Literal["log"]
    step: StepNumber | None = None
    world_size: WorldSize = 1
    host: _Text = ""
    url: _Text = ""
    error: _Text = ""
    message: _Text = ""
    file: _Text = ""


class EventLines:
    """The lines of some files on one run, each read once. Damaged lines are left out, and shown as damaged."""

    def __init__(self, paths: Iterable[str], places: Iterable[str]) -> None:
        """Read nothing yet.

        Args:
            paths: The files.
            places: URLs of the root and the near tier of the run: lines on other runs are left out.
        Raises:
            MissingError: A file does not exist.
        """
        self._prefixes = tuple(f"{_path_of(each)}/" for each in places)
        self._ends = {os.path.expanduser(path): ((0, 0), 0, 0) for path in paths}
        self.paths = tuple(self._ends)
        """The files."""
        for path in self.paths:
            if not os.path.isfile(path):
                raise MissingError(f"{path}: no file of events; expected lines of holdfast.observers.jsonl")
        self.open: dict[tuple[str, int | None], dict[int, EventLine]] = {}
        """The begins of tries that have not ended, by verb and step, and by rank."""
        self.hosts: dict[int, str] = {}
        """The machine of each rank, as the last line with one names it."""
        self.named: set[int] = set()
        """Ranks that any line names."""
        self.failed: list[EventLine] = []
        """The last tries that failed, each until its rank ends a later one."""
        self._damaged: list[str] = []
        self._unread: list[str] = []

    @property
    def damaged(self) -> list[str]:
        """The first damaged lines, by file, number and reason, and the files that could not be read last time."""
        return [*self._damaged, *self._unread]

    def refresh(self) -> None:
        """Read the lines that were appended since the last call."""
        self._unread = []
        for path, (identity, end, number) in self._ends.items():
            try:
                with open(path, "rb") as file:
                    status, seen = os.fstat(file.fileno()), identity
                    identity = status.st_dev, status.st_ino
                    if identity != seen or status.st_size < end:
                        # A log rotation has put a new file here, or emptied the file.
                        end = number = 0
                        self._damaged = [each for each in self._damaged if not each.startswith(f"{path}: line ")]
                    file.seek(end)
                    # The last line may be half written: the next call reads the line.
                    while (line := file.readline(_LINE_BYTES_MAX)).endswith(b"\n") or len(line) == _LINE_BYTES_MAX:
                        end, number = end + len(line), number + 1
                        self._take(line, path, number)
            except OSError as error:
                self._unread.append(f"{path}: {error}; expected a file of events that can be read")
            self._ends[path] = identity, end, number

    def _take(self, data: bytes, path: str, number: int) -> None:
        try:
            line = msgspec.json.decode(data, type=EventLine)
            line.time.timestamp()
        except (ValueError, OverflowError, RecursionError) as error:
            if len(self._damaged) < _DAMAGED_KEPT:
                where, why = f"{path}: line {number:,}", str(error)[:200]
                self._damaged.append(f"{where} is damaged: {why}; expected a line of observers.jsonl")
            return
        if not self._is_of_run(line.url):
            return
        line.file = path
        self.named.add(line.rank)
        if line.host:
            self.hosts[line.rank] = line.host
        if line.event in ("began", "ended", "failed"):
            for key in [*self.open]:
                self._close(key, line)
        if line.event == "began":
            self.open.setdefault((line.verb, line.step), {})[line.rank] = line
        elif line.event == "ended":
            # The order in one file needs no clock.
            tried = line.verb, line.rank, line.file
            self.failed = [each for each in self.failed if (each.verb, each.rank, each.file) != tried]
        elif line.event == "failed":
            self.failed = [*self.failed, line][-_FAILURES_KEPT:]

    def _close(self, key: tuple[str, int | None], line: EventLine) -> None:
        """Drop the begins of one verb and step that a later line tells to be over: most were killed, without an end."""
        verb, step, began = *key, line.event == "began"
        left = self.open[key]
        if verb == line.verb and line.world_size < next(iter(left.values())).world_size:
            left = {rank: each for rank, each in left.items() if rank < line.world_size}
        # A rank ends its saves in order, begins a lower step after going back, and loads while it does nothing else.
        is_earlier = (step or 0) < (line.step or 0)
        is_over = verb == line.verb and (step == line.step or is_earlier != began)
        if is_over or (verb == "load" and began and line.verb != "drain"):
            left.pop(line.rank, None)
        self.open[key] = left
        if not left:
            del self.open[key]

    def _is_of_run(self, url: str) -> bool:
        return not url or f"{_path_of(url)}/".startswith(self._prefixes)


@lru_cache
def _path_of(url: str) -> str:
    # A store of a user may give a folder a scheme of its own.
    return os.path.realpath(url.rpartition("://")[2])
