"""Plain values of an export: the resources of one call, its report, and the part of each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.settings import MIB

OnWindow = Callable[[int, int], None]
"""Called for each window with the bytes written, and the bytes read for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Resources of an export."""

    memory_bytes: int
    """Memory for bytes in flight, of all workers together."""

    workers: int
    """Processes."""

    window_bytes_max: int = 128 * MIB
    """Bytes of one window, at most, a whole number of pages. Larger ones take too long to fill and to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export did."""

    url: str
    """Its destination."""

    format: str
    """Name of the format."""

    files: Mapping[str, int]
    """Bytes of every file, by its name in the destination; the name is empty if the destination is one file."""

    resumed_bytes: int
    """Bytes that an earlier call had written."""

    read_bytes: int
    """Bytes that this call read from the checkpoint."""

    seconds: float
    """Duration of the call."""

    begun_anew: bool
    """Whether unfinished work was discarded: its source or options were different, or its files were gone."""

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportShare:
    """One worker's part of an export; plain values, for another process."""

    number: int
    """Number of the worker."""

    count: int
    """Count of workers."""

    window_bytes: int
    """Bytes of a window, at most; the same for all workers."""

    memory_bytes: int
    """This worker's part of the memory budget."""

    done: tuple[tuple[int, int, int], ...]
    """Ranges that were durable before any worker started: file number, start, stop."""

    journal: str
    """Where the worker records durable windows."""

    fingerprint: str
    """Fingerprint of the export."""


WorkerPool = Callable[[Sequence[ExportShare], OnWindow], None]
"""Executes every share, each in a process of its own."""
