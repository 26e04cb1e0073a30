"""Several processes that carry out one export beside each other: told their shares, heard, and ended together."""

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

from holdfast.coordination.job import error_from, error_text
from holdfast.errors import UnavailableError
from holdfast.offline.export.export import Export, ExportShare, Told, WorkerPool
from holdfast.settings import Settings
from holdfast.types.export import ExportOptions

_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {0}; sys.exit({0}.{1}())"


def worker_pool(
    entry: str, source: str, destination: str, to: str, options: ExportOptions, settings: Settings
) -> WorkerPool:
    """Return what carries out the shares of an export in one process each.

    Args:
        entry: Function that each process calls, as "package.module:function". It passes the first line of its standard
            input to `worker_main`, and its result to `sys.exit`.
        source, destination: Absolute paths.
        to, options, settings: As for this process's own plan of the export.
    """
    request: dict[str, object] = {
        "source": source,
        "destination": destination,
        "to": to,
        "options": asdict(options),
        "settings": asdict(settings),
    }
    return lambda shares, told: run_workers(entry, request, shares, told)


def start_worker(entry: str) -> subprocess.Popen[str]:
    """Start a process that calls `entry` and imports from where this process does."""
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN.format(*entry.split(":")), json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C in the terminal does not reach it: it ends with its standard input, once this process has.
        start_new_session=True,
    )


def run_workers(entry: str, request: dict[str, object], shares: Sequence[ExportShare], told: Told) -> None:
    """Have every share carried out by a process of its own, and return once all are.

    Args:
        entry: As `worker_pool`.
        request: What `worker_main` is given beside the share, in plain values.
        shares: One for each process.
        told: Told of what all of them do.
    Raises:
        CheckpointError: One failed; the others have ended too.
    """
    workers: list[subprocess.Popen[str]] = []
    listeners: list[threading.Thread] = []
    heard: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
    try:
        for share in shares:
            worker = start_worker(entry)
            workers.append(worker)
            assert worker.stdin is not None
            with suppress(BrokenPipeError):  # It has ended; how, is heard below.
                worker.stdin.write(json.dumps({**request, "share": asdict(share)}) + "\n")
                worker.stdin.flush()
            listeners.append(threading.Thread(target=_listen, args=(worker, share.number, heard), daemon=True))
            listeners[-1].start()
        working = len(shares)
        while working:
            number, line = heard.get()
            said: dict[str, Any] = _said(number, line) if line is not None else {"end": workers[number].wait()}
            if "error" in said:
                raise error_from(said["error"], f"worker {number}: ")
            if "written" in said:
                told(said["written"], said["read"])
            elif said["end"] == 0:
                working -= 1
            else:
                raise UnavailableError(
                    f"worker {number} ended with status {said['end']}; what was written is kept. Look at the machine's "
                    "memory, then run the same command again: it goes on"
                )
    finally:
        for worker in workers:
            assert worker.stdin is not None
            with suppress(BrokenPipeError):
                worker.stdin.close()  # It ends when that does.
        for listener in listeners:
            listener.join()
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.close()
            worker.wait()


def _said(number: int, line: str) -> dict[str, Any]:
    """Return what a worker says in a line.

    Raises:
        UnavailableError: It is not a worker's.
    """
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if isinstance(said, dict) and ("error" in said or {"written", "read"} <= said.keys()):
        return said
    raise UnavailableError(
        f"worker {number} said {line.strip()[:200]!r}; expected what a worker says: something in this Python prints "
        "when it starts. What was written is kept. Stop that, then run the same command again: it goes on"
    )


def _listen(worker: subprocess.Popen[str], number: int, heard: queue.SimpleQueue[tuple[int, str | None]]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        heard.put((number, line))
    heard.put((number, None))


def worker_main(line: str, export_of: Callable[[str, str, str, ExportOptions, Settings], Export]) -> int:
    """Carry out the share that a line describes, and report progress on standard output; return an exit status.

    Ends the process at once when standard input ends: the process that started it is gone.

    Args:
        line: JSON, as `run_workers` writes it.
        export_of: Returns the export for the arguments of `worker_pool` after `entry`.
    """
    logging.getLogger("holdfast").setLevel(logging.ERROR)  # The process that started this one logs warnings once.
    threading.Thread(target=_end_with_input, daemon=True).start()
    request = json.loads(line)
    share, options, settings = (request.pop(name) for name in ("share", "options", "settings"))
    share["done"] = tuple(tuple(each) for each in share["done"])
    lock = threading.Lock()

    def say(**what: object) -> None:
        with lock:
            sys.stdout.write(json.dumps(what) + "\n")
            sys.stdout.flush()

    try:
        # JSON has lists where settings have tuples.
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
        }
        export = export_of(
            request["source"], request["destination"], request["to"], ExportOptions(**options), Settings(**values)
        )
        export.execute(ExportShare(**share), lambda written, read: say(written=written, read=read))
    except Exception as error:  # noqa: BLE001 - whoever asked raises it
        say(error=error_text(error))
        return 1
    return 0


def _end_with_input() -> None:
    # Past Python's own buffer, which the interpreter could not lock at its end.
    while os.read(0, 4096):
        pass
    os._exit(1)
