"""Runs one export in several processes: sends each its share, collects progress, and ends all together."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from holdfast.base.types.export import ExportOptions
from holdfast.core.engine.child_python import command_of, settings_in
from holdfast.errors import UnavailableError
from holdfast.offline.export.export import Export
from holdfast.offline.export.request import ExportShare, OnWindow, WorkerPool
from holdfast.settings import Settings
from holdfast.training.coordination.job import error_from, error_text


def worker_pool(
    entry: str, source: str, destination: str, to: str, options: ExportOptions, settings: Settings
) -> WorkerPool:
    """Return a pool that executes the shares of an export in one process each.

    Args:
        entry: Function that each process calls, as "package.module:function". It passes the first line of its standard
            input to `worker_main`, and its result to `sys.exit`.
        source, destination: Absolute paths.
        to, options, settings: The same as in this process.
    """
    request: dict[str, object] = {
        "source": source,
        "destination": destination,
        "to": to,
        "options": asdict(options),
        "settings": asdict(settings),
    }
    return lambda shares, on_window: run_workers(entry, request, shares, on_window)


def start_worker(entry: str) -> subprocess.Popen[str]:
    """Start a process that calls `entry` and imports from where this process does."""
    return subprocess.Popen(
        command_of(entry),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C in the terminal must not reach the worker: it ends when its standard input does, after this process.
        start_new_session=True,
    )


def run_workers(entry: str, request: dict[str, object], shares: Sequence[ExportShare], on_window: OnWindow) -> None:
    """Execute every share in a process of its own; return once all have ended.

    Args:
        entry: As `worker_pool`.
        request: The arguments of `worker_main` beside the share, as plain values.
        shares: One for each process.
        on_window: Called for the windows of all workers.
    Raises:
        CheckpointError: A worker failed; the others have ended too.
    """
    workers: list[subprocess.Popen[str]] = []
    listeners: list[threading.Thread] = []
    lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
    try:
        for share in shares:
            worker = start_worker(entry)
            workers.append(worker)
            assert worker.stdin is not None
            with suppress(BrokenPipeError):  # The worker has ended; its exit status is read below.
                worker.stdin.write(json.dumps({**request, "share": asdict(share)}) + "\n")
                worker.stdin.flush()
            listeners.append(threading.Thread(target=_listen, args=(worker, share.number, lines), daemon=True))
            listeners[-1].start()
        working = len(shares)
        while working:
            number, line = lines.get()
            if line is not None:
                report = _decode_report(number, line)
                if "error" in report:
                    raise error_from(report["error"], f"worker {number}: ")
                on_window(report["written"], report["read"])
            elif (status := workers[number].wait()) == 0:
                working -= 1
            else:
                raise UnavailableError(
                    f"worker {number} ended with status {status}; durable windows are kept. Check the machine's "
                    "memory, then run the same command again: it continues"
                )
    finally:
        for worker in workers:
            assert worker.stdin is not None
            with suppress(BrokenPipeError):
                worker.stdin.close()  # The worker ends itself when its input ends.
        for listener in listeners:
            listener.join()
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.close()
            worker.wait()


def _decode_report(number: int, line: str) -> dict[str, Any]:
    """Return a worker's report: an error, or bytes written and read.

    Raises:
        UnavailableError: The line is no report.
    """
    try:
        report = json.loads(line)
    except ValueError:
        report = None
    if isinstance(report, dict) and ("error" in report or {"written", "read"} <= report.keys()):
        return report
    raise UnavailableError(
        f"worker {number} printed {line.strip()[:200]!r}; expected a worker's report: some module of this Python "
        "prints when it starts. Durable windows are kept. Silence that module, then run the same command again: it "
        "continues"
    )


def _listen(worker: subprocess.Popen[str], number: int, lines: queue.SimpleQueue[tuple[int, str | None]]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        lines.put((number, line))
    lines.put((number, None))


def worker_main(line: str, export_of: Callable[[str, str, str, ExportOptions, Settings], Export]) -> int:
    """Execute the share that a line describes, and report progress on standard output; return an exit status.

    When standard input ends, the process that started this one is gone, and this one ends at once.

    Args:
        line: JSON, as `run_workers` writes it.
        export_of: Returns the export for the arguments of `worker_pool` after `entry`.
    """
    logging.getLogger("holdfast").setLevel(logging.ERROR)  # The process that started this one logs warnings once.
    threading.Thread(target=_end_with_input, daemon=True).start()
    request = json.loads(line)
    share, options, settings = (request.pop(name) for name in ("share", "options", "settings"))
    share["done"] = tuple(tuple(range_done) for range_done in share["done"])

    def report(**fields: object) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    try:
        export = export_of(
            request["source"], request["destination"], request["to"], ExportOptions(**options), settings_in(settings)
        )
        export.execute(ExportShare(**share), lambda written, read: report(written=written, read=read))
    except Exception as error:  # noqa: BLE001 - the process that started this one raises it
        report(error=error_text(error))
        return 1
    return 0


def _end_with_input() -> None:
    # os.read bypasses sys.stdin, whose lock a daemon thread would hold when the interpreter shuts down.
    while os.read(0, 4096):
        pass
    os._exit(1)
