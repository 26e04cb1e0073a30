"""Identifies this process, and tells whether the process that holds a lease still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from holdfast.base.clock import Clock, utc_now_text
from holdfast.base.types.epoch import Holder

_NONCE_BYTES = 16


def this_process(clock: Clock, lease_seconds: float) -> Holder:
    """Return this process as the holder of a lease that it is about to take."""
    stat = _stat_of(os.getpid())
    return Holder(
        host=_host(),
        boot=_boot(),
        namespaces=_namespaces(),
        pid=os.getpid(),
        started=stat.started if stat is not None else 0,
        since=utc_now_text(clock),
        nonce=clock.random_bytes(_NONCE_BYTES).hex(),
        lease_seconds=lease_seconds,
    )


def is_this_process(holder: Holder) -> bool:
    """Return whether a holder is this very process."""
    stat = _stat_of(os.getpid())
    return can_be_seen(holder) and holder.pid == os.getpid() and stat is not None and stat.started == holder.started


def is_same_process(first: Holder, second: Holder) -> bool:
    """Return whether two holders are one process, whenever each was made."""
    return replace(first, since="", nonce="", lease_seconds=0.0) == replace(
        second, since="", nonce="", lease_seconds=0.0
    )


def is_gone(holder: Holder) -> bool:
    """Return whether the process of a holder has certainly exited: it would be visible from here, and is not."""
    if not can_be_seen(holder):
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # A process of another user: it exists.
    stat = _stat_of(holder.pid)
    return stat is not None and (stat.started != holder.started or stat.is_zombie)


class _Stat:
    """The fields of `/proc/PID/stat` that identify a process."""

    def __init__(self, text: str) -> None:
        # The name of the process, in parentheses, may contain spaces and parentheses: split after the last one.
        fields = text.rpartition(")")[2].split()
        self.started = int(fields[19])
        # The state is that of the first thread: it reads as zombie after it ended while other threads still run.
        self.is_zombie = fields[0] in "ZX" and int(fields[17]) <= 1


def _stat_of(pid: int) -> _Stat | None:
    try:
        return _Stat(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, IndexError):
        return None


def can_be_seen(holder: Holder) -> bool:
    """Return whether this process can find out if a holder still runs.

    It can if both are on one host, since one boot, in the same namespaces: then process ids mean the same to both.
    """
    is_here = bool(holder.boot) and (holder.boot, holder.namespaces) == (_boot(), _namespaces())
    # Compare the host name too: a cloned virtual machine keeps the boot id, but usually has another name.
    return is_here and holder.host == _host() and holder.pid > 0 and holder.started > 0


def _host() -> str:
    return socket.gethostname().encode("ascii", "replace").decode()


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _namespaces() -> str:
    """Return the pid and time namespaces. The time namespace shifts the start time that a process reports."""
    names = []
    for kind in ("pid", "time"):
        try:
            names.append(os.readlink(f"/proc/self/ns/{kind}"))
        except OSError:
            names.append(f"{kind}:unknown")
    return " ".join(names)
