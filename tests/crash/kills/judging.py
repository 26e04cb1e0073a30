"""Judging what processes left that were killed, each content once.

Most operations of a save, a load or a repair read. Two processes that died between the same two changes leave the
same files with the same bytes, under names drawn at random. Whoever comes next does the same with both of them, so
that the second judgement would show nothing that the first did not.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

Fate = TypeVar("Fate")

EVERY = bool(os.environ.get("JUDGE_EVERY"))
"""Whether every content is judged, known or not: `make campaign` does so."""

_VARYING = re.compile(
    rb"(?P<drawn>[0-9a-f]{16,}|(?<=\xa6digest\xc4\x10)[\x00-\xff]{16})"
    rb"|(?<=\.tmp-)[0-9a-f]+"
    rb"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00"
    rb'|(?<="pid": )\d+|(?<="started": )\d+|(?<="created": )"\d+"|(?<="monotonic_seconds": )[\d.e+]+'
)
"""What differs between two runs that do the same: names drawn at random, digests of them, times and processes."""

_REPORT = re.compile(r"(^|/)reports/[^/]+$")
"""Files of durations, which no reader needs: that they are there is all that counts."""


def content_of(root: Path) -> bytes:
    """Return a digest of the files and folders of a root, equal for two runs that did the same.

    Drawn names are numbered in the order of their appearance, so that who names whom still counts.
    """
    drawn: dict[bytes, bytes] = {}

    def alike(data: bytes) -> bytes:
        places, rest = _varying_in(data)
        written = []
        for before, name in places:
            written += [before, b"~" if name is None else drawn.setdefault(name, b"~%d~" % len(drawn))]
        return b"".join([*written, rest])

    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        status, name = path.lstat(), path.relative_to(root).as_posix()
        data = b""
        if path.is_file() and _REPORT.search(name) is None:
            data = alike(path.read_bytes())
            if path.suffix == ".beat":
                # How often a holder has said that it lives follows the clock. That it has let go is a word.
                data = re.sub(rb"[0-9]+", b"~", data)
        links = status.st_nlink if path.is_file() else 0
        said = b"%b|%o|%d|%d|" % (alike(name.encode()), status.st_mode, links, len(data))
        digest.update(said + data + b"\n")
    return digest.digest()


@lru_cache(maxsize=512)
def _varying_in(data: bytes) -> tuple[list[tuple[bytes, bytes | None]], bytes]:
    """Return what stands before each place that varies, with the name drawn there, if one is; and what is left.

    Most files of a root are those of the root before, byte for byte, and the search takes longer than reading them.
    """
    places: list[tuple[bytes, bytes | None]] = []
    end = 0
    for found in _VARYING.finditer(data):
        places.append((data[end : found.start()], found["drawn"]))
        end = found.end()
    return places, data[end:]


class Judged(Generic[Fate]):
    """What judges said of the contents so far."""

    def __init__(self) -> None:
        self._fates: dict[Hashable, Fate] = {}
        self.deaths = 0
        """How many were asked about."""

    @property
    def contents(self) -> int:
        """How many differed."""
        return len(self._fates)

    def fate(self, root: Path, ending: Hashable, judge: Callable[[], Fate]) -> Fate:
        """Return what a judge says of a root and of how the process ended, or what it said of such ones before."""
        self.deaths += 1
        known = (content_of(root) if root.exists() else None, ending)
        if EVERY or known not in self._fates:
            self._fates[known] = judge()
        return self._fates[known]
