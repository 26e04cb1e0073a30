"""Folders of nodes of peers in a tmpfs of this host, and the processes of their agents."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.forked_processes import await_within

_END_SECONDS = 60.0


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and that its parent has not seen yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(*pids: int) -> None:
    """Kill processes, and await their end."""
    assert all(pid > 1 for pid in pids), f"{pids}: -1 would kill every process of the machine"
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await_within(_END_SECONDS, lambda: not any(map(is_alive, pids)))


@contextmanager
def node_memory() -> Iterator[Path]:
    """A folder in a tmpfs for the folders of nodes; at its end no agent of them is left, whatever has failed."""
    with tempfile.TemporaryDirectory(prefix="peers-", dir="/dev/shm", ignore_cleanup_errors=True) as name:
        try:
            yield Path(name)
        finally:
            while agents := agents_naming(f"{name}/"):
                kill(*agents)


def agents_naming(text: str) -> list[int]:
    """Return the processes whose command has a text, as the folder of a node: also an agent that has just been started.

    A number in a file may be that of another process by now.
    """
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text.encode() in (each / "cmdline").read_bytes() and is_alive(int(each.name)):
                found.append(int(each.name))
    return found
