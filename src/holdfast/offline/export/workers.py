"""Several processes that carry out one export beside each other: told their shares, heard, and ended together."""

from __future__ import annotations

import json
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
from holdfast.offline.export.export import Export, ExportShare, Told

Start = Callable[[], "subprocess.Popen[str]"]
"""Starts a process that calls `worker_main` with the first line of its standard input, and says what that says."""


def run_workers(start: Start, request: dict[str, object], shares: Sequence[ExportShare], told: Told) -> None:
    """Have every share carried out by a process of its own, and return once all are.

    Args:
        start: Starts one process.
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
            worker = start()
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


def worker_main(line: str, export_of: Callable[[dict[str, Any]], Export]) -> int:
    """Carry out the share that a line asks for, and say how it goes; return an exit status.

    Ends the process at once when standard input does: whoever asked is gone.
    """
    threading.Thread(target=_end_with_input, daemon=True).start()
    request = json.loads(line)
    share = request.pop("share")
    share["done"] = tuple(tuple(each) for each in share["done"])
    lock = threading.Lock()

    def say(**what: object) -> None:
        with lock:
            sys.stdout.write(json.dumps(what) + "\n")
            sys.stdout.flush()

    try:
        export_of(request).execute(ExportShare(**share), lambda written, read: say(written=written, read=read))
    except Exception as error:  # noqa: BLE001 - whoever asked raises it
        say(error=error_text(error))
        return 1
    return 0


def _end_with_input() -> None:
    # Past Python's own buffer, which the interpreter could not lock at its end.
    while os.read(0, 4096):
        pass
    os._exit(1)
