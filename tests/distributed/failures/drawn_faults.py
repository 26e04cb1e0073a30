"""Faults of one training, drawn from a seed, and what injects them on a rank.

Every rank draws the same faults. A fault is armed for one save and met by whichever thread makes its operation.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from holdfast.base.clock import SystemClock
from holdfast.errors import UnavailableError
from tests.distributed.failures.fault_cases import connections_to
from tests.doubles.faults import FaultPoint, Faults

_Result = TypeVar("_Result")

BOTH = -1
"""In place of a rank: the fault is armed on both."""

STORE = ("put", "put_if_absent", "upload", "upload.write", "upload.complete", "upload.abort", "list", "get", "delete")
SYSTEM = ("open", "pwrite", "preadv", "fsync", "fallocate", "rename", "rename_noreplace", "unlink", "mkdir", "listdir")
KEYS = ("set", "get_many", "present", "add", "compare_set", "wait", "delete")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EACCES)

KINDS = (
    "store error",
    "system error",
    "keys error",
    "keys timeout",
    "connections break",
    "store delay",
    "keys delay",
    "late rank",
    "stopped",
    "exception",
    "bad state",
    "clock step",
)
"""Each set of so many faults holds every kind once, in a drawn order."""

GENTLE = ("connections break", "store delay", "keys delay", "late rank", "stopped", "clock step")
"""Kinds of faults that a save survives, unless they last longer than the ranks wait for each other."""

EXCEPTIONS = ("RuntimeError", "MemoryError", "OSError", "KeyError")
BAD_STATES = ("unknown type", "replicas differ", "metrics", "other step", "step again", "meta tensor", "other shape")


@dataclass(frozen=True, slots=True)
class DrawnFault:
    """One fault of a training."""

    kind: str
    rank: int
    names: tuple[str, ...]
    """Names of the operations that count."""
    at: int
    """Number of the operation that meets it, counted from 1."""
    is_lasting: bool
    """Whether every later operation of the save meets it too."""
    after: bool
    """Whether the operation is made first, so that only its reply is lost."""
    seconds: float
    """How long a delay takes, or how far a clock steps."""
    what: str
    """Which exception or bad state; the errno of a system error."""
    is_awaited: bool
    """Whether the loop waits for the end of the save before it goes on."""

    @property
    def is_waited_for(self) -> bool:
        """Whether its save ends before the loop goes on: that of a stop always, or the next fault stops nothing."""
        return self.is_awaited or self.kind == "stopped"

    def is_gentle(self, limit_seconds: float) -> bool:
        """Return whether a save should survive the fault, given how long the ranks wait for each other."""
        return self.kind in GENTLE and (self.kind == "clock step" or self.seconds < limit_seconds)

    @property
    def held_seconds(self) -> float:
        """How long the fault itself may hold a training thread: a late rank holds the other, too."""
        return self.seconds if self.kind in ("store delay", "keys delay", "late rank", "stopped") else 0.0

    def is_on(self, rank: int) -> bool:
        return self.rank in (BOTH, rank)


def draw(seed: int, count: int) -> list[DrawnFault]:
    """Return the faults of a training, the same for the same seed."""
    chance = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += chance.sample(KINDS, len(KINDS))
    return [_drawn(chance, kind) for kind in kinds[:count]]


def _drawn(chance: random.Random, kind: str) -> DrawnFault:
    names: Sequence[str] = {"store": STORE, "system": SYSTEM, "keys": KEYS}.get(kind.split()[0], (*STORE, *KEYS))
    if kind == "connections break":
        names = KEYS
    is_any = chance.random() < 0.5
    what = {
        "system error": str(chance.choice(ERRORS)),
        "exception": chance.choice(EXCEPTIONS),
        "bad state": chance.choice(BAD_STATES),
    }.get(kind, "")
    seconds = chance.choice((0.05, 0.2, 0.5)) if chance.random() < 0.85 else 6.0
    if kind == "clock step":
        seconds = chance.choice((-1e9, -86_400.0, -1.0, 1.0, 3600.0, 1e8))
    return DrawnFault(
        kind=kind,
        rank=chance.choice((0, 1, 0, 1, BOTH)) if kind != "stopped" else chance.choice((0, 1)),
        names=tuple(names) if is_any else (chance.choice(names),),
        at=chance.randint(1, 12) if is_any else chance.randint(1, 2),
        is_lasting=kind.endswith("error") and chance.random() < 0.15,
        after=chance.random() < 0.3,
        seconds=seconds,
        what=what,
        is_awaited=chance.random() < 0.7,
    )


class SteppingClock(SystemClock):
    """The machine's time; its wall clock can be set."""

    def __init__(self) -> None:
        self.offset_seconds = 0.0

    def unix_seconds(self) -> float:
        return super().unix_seconds() + self.offset_seconds


@dataclass
class _Armed:
    fault: DrawnFault
    act: Callable[[FaultPoint], None]
    counted: int = 0
    met: int = 0


class Injector(Faults):
    """Stands before one layer of a rank; several faults may be armed at a time. Operations of any thread count."""

    def __init__(self) -> None:
        super().__init__()
        self._armed: list[_Armed] = []
        self._armed_lock = threading.Lock()

    def arm(self, fault: DrawnFault, act: Callable[[FaultPoint], None]) -> _Armed:
        armed = _Armed(fault, act)
        with self._armed_lock:
            self._armed.append(armed)
        return armed

    def disarm(self, armed: _Armed) -> None:
        with self._armed_lock, suppress(ValueError):
            self._armed.remove(armed)

    def around(
        self, name: str, subject: str, call: Callable[[], _Result], *, always_done: bool = False, kind: str = ""
    ) -> _Result:
        operation = FaultPoint(name, subject)
        due = self._due_now(name)
        for each in due:
            if not each.fault.after and not always_done:
                each.act(operation)
        result = call()
        for each in due:
            if each.fault.after or always_done:
                each.act(operation)
        return result

    def _due_now(self, name: str) -> list[_Armed]:
        due = []
        with self._armed_lock:
            for each in self._armed:
                if name not in each.fault.names:
                    continue
                each.counted += 1
                if each.counted == each.fault.at or (each.fault.is_lasting and each.counted > each.fault.at):
                    each.met += 1
                    due.append(each)
        return due


class RankFaults:
    """Arms faults on one rank: in its store, its system calls, its key-value store, its clock and its process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.store, self.system, self.keys, self.clock = Injector(), Injector(), Injector(), SteppingClock()
        server = dist.distributed_c10d._get_default_store()._underlying_non_prefix_store  # type: ignore[attr-defined]
        self._port = server.port
        self._kept = set(connections_to(server.port))
        """The connections of the training itself."""
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        self._other_pid = int(pids[1 - rank])
        self._delays: list[float] = []

    @property
    def is_delaying(self) -> bool:
        """Whether an operation of this rank waits for the end of its delay."""
        return bool(self._delays)

    def arm(self, fault: DrawnFault) -> tuple[Callable[[], int], Callable[[], None]]:
        """Arm a fault; return what tells how often it was met, and what disarms it."""
        layers: dict[str, tuple[Injector, Callable[[FaultPoint], None]]] = {
            "store error": (self.store, _unavailable),
            "system error": (self.system, lambda _: _raise_os_error(int(fault.what))),
            "keys error": (self.keys, _unavailable),
            "keys timeout": (self.keys, _time_out),
            "connections break": (self.keys, lambda _: self._break_connections()),
            "store delay": (self.store, lambda _: self._delay(fault.seconds)),
            "keys delay": (self.keys, lambda _: self._delay(fault.seconds)),
        }
        if fault.kind == "stopped":
            return self._stop_other(fault)
        if not fault.is_on(self._rank):
            return (lambda: 0), (lambda: None)
        if fault.kind == "clock step":
            self.clock.offset_seconds += fault.seconds
            return (lambda: 1), (lambda: None)
        if fault.kind not in layers:
            return (lambda: 1), (lambda: None)  # In the state, or in the call itself.
        injector, act = layers[fault.kind]
        armed = injector.arm(fault, act)
        return (lambda: armed.met), (lambda: injector.disarm(armed))

    def _delay(self, seconds: float) -> None:
        self._delays.append(seconds)
        time.sleep(seconds)
        self._delays.pop()

    def _stop_other(self, fault: DrawnFault) -> tuple[Callable[[], int], Callable[[], None]]:
        """Have the other rank stopped, at a moment of this rank's own save."""
        if fault.is_on(self._rank):
            return (lambda: 0), (lambda: None)
        stopping: list[threading.Thread] = []

        def stop() -> None:
            os.kill(self._other_pid, signal.SIGSTOP)
            time.sleep(fault.seconds)
            os.kill(self._other_pid, signal.SIGCONT)

        def act(_: FaultPoint) -> None:
            stopping.append(threading.Thread(target=stop))
            stopping[-1].start()

        armed = self.keys.arm(fault, act)
        store_armed = self.store.arm(fault, act)

        def disarm() -> None:
            self.keys.disarm(armed)
            self.store.disarm(store_armed)
            for thread in stopping:
                thread.join()

        return (lambda: armed.met + store_armed.met), disarm

    def _break_connections(self) -> None:
        for descriptor in connections_to(self._port):
            if descriptor not in self._kept:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def _unavailable(operation: FaultPoint) -> None:
    raise UnavailableError(f"a fault was injected at {operation.name} of {operation.subject!r}")


def _time_out(operation: FaultPoint) -> None:
    raise TimeoutError(f"a fault was injected at {operation.name} of {operation.subject!r}")


def _raise_os_error(code: int) -> None:
    raise OSError(code, os.strerror(code))
