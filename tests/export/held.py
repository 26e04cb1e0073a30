"""The command line, of which an export stops at a known point: once the first of its windows are written down.

Run as a module it takes the arguments of `holdfast`. Each process records one group of windows and then holds: the
command itself until its standard input ends, a worker for good. So whatever is done to the process then
happens to an export that has begun and cannot have finished, however fast or busy the machine is.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast import cli
from holdfast._face import export_wiring, offline_api
from holdfast.backends.stores.local_place import LocalPlace
from holdfast.base.clock import SystemClock
from holdfast.base.types.export import DoneWindow

WORKER = "tests.export.held:worker"
"""What a worker that holds is started with, in the place of `export_wiring.WORKER_ENTRY`."""


class Fast(SystemClock):
    """A clock by which what was written is due to be made durable as soon as it is."""

    def monotonic_seconds(self) -> float:
        return super().monotonic_seconds() * 1000


def _hold_with(hold: Callable[[], object]) -> None:
    class HeldPlace(LocalPlace):
        """A place that holds the process that records windows, once the record is durable."""

        def record(self, journal: str, windows: Sequence[DoneWindow]) -> None:
            super().record(journal, windows)
            hold()

    export_wiring.LocalPlace = HeldPlace  # type: ignore[misc]
    export_wiring.SystemClock = offline_api.SystemClock = Fast  # type: ignore[misc]


def worker() -> int:
    """Carry out the share of an export that standard input tells of, and hold."""
    _hold_with(threading.Event().wait)
    return export_wiring.export_worker()


def written_down(work: Path) -> list[int]:
    """Return the bytes that each journal of unfinished work tells of."""
    found = []
    for path in sorted(work.glob("journal-*")):
        lines = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n" != line]
        windows = [done["window"] for line in lines for done in json.loads(line)]
        found.append(sum(window["stop"] - window["start"] for window in windows))
    return found


def wait_until(happened: Callable[[], bool]) -> None:
    """Return once something has happened."""
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def children(parent: int) -> set[int]:
    """Return the processes that a process has started and not yet heard the end of."""
    listed = Path(f"/proc/{parent}/task").glob("*/children")
    return {int(each) for path in listed for each in path.read_text().split()}


def is_running(process: int) -> bool:
    """Return whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


if __name__ == "__main__":
    export_wiring.WORKER_ENTRY = WORKER
    _hold_with(lambda: os.read(0, 1))
    sys.argv[0] = "holdfast"
    cli.main()
