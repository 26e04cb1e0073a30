"""Processes that begin with torch imported, each forked from one that does nothing but import.

Importing what a rank needs of torch takes seconds, a fork milliseconds. `FORKED_IMPORTS` names more to import. Nothing
of Holdfast is imported before the fork. The first ranks of all worlds come of one origin, the second ranks of another,
and so on: ranks of one world hash alike no more than real ones do.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

REPOSITORY = Path(__file__).resolve().parents[2]
IMPORTED = (
    "torch",
    # What making an optimizer imports.
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
POLL_SECONDS = 0.005


def write_whole(path: Path, text: str) -> None:
    """Write a small file that appears whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child: one thread, loopback only, our sources first."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    paths = [str(REPOSITORY), str(REPOSITORY / "src"), *filter(None, [kept.get("PYTHONPATH")])]
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
    return {**kept, **fixed, "PYTHONFAULTHANDLER": "1", **more}


@dataclass(frozen=True, slots=True)
class Work:
    """What a process does from its fork to its end."""

    function: str
    """`module:function`."""

    arguments: list[str]

    log: str
    """File that takes what it prints."""

    status: str
    """File that takes its exit status and appears once it has ended; negative is the signal that killed it."""

    environment: dict[str, str]
    """All of it."""

    @staticmethod
    def of_rank(rank: int, scratch: Path, function: str, *arguments: object, **variables: str) -> Work:
        """Return the work of a rank whose files lie in a folder of its world, with the usual environment and more."""
        log, status = (str(scratch / f"{name}.{rank}") for name in ("log", "status"))
        return Work(function, [str(each) for each in arguments], log, status, environment(**variables))


class Forked:
    """A process by its number and its exit status; what the tests need of `subprocess.Popen`."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(FileNotFoundError):
                self.returncode = int(self._status.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Origin:
    """A process that has imported torch and forks on demand; it ends with the one that started it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.forked"],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._process.communicate)

    def fork(self, work: Work) -> Forked:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(work)) + "\n")
        self._process.stdin.flush()
        pid = self._process.stdout.readline()
        assert pid, f"the origin of forks ended: {self._process.wait()}"
        return Forked(int(pid), Path(work.status))


_ORIGINS: list[Origin] = []
"""By rank."""


def start_ranks(works: Sequence[Work]) -> list[Forked]:
    """Start what each rank of a world does."""
    while len(_ORIGINS) < len(works):
        _ORIGINS.append(Origin())
    return [origin.fork(work) for origin, work in zip(_ORIGINS, works, strict=False)]


def _serve() -> Work | None:
    """Fork for every line of work; return it in the process that is to do it, and None at the end."""
    for name in (*IMPORTED, *os.environ.get("FORKED_IMPORTS", "").split()):
        importlib.import_module(name)
    gc.collect()
    # What is here now is garbage in no fork: looking at it would copy its pages.
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of the threads that were there"
    statuses: dict[int, Path] = {}

    def reap(number: int, frame: FrameType | None) -> None:
        while statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            # Its world may be over and gone: nobody asks any more.
            with suppress(FileNotFoundError):
                write_whole(statuses.pop(pid), str(os.waitstatus_to_exitcode(status)))

    signal.signal(signal.SIGCHLD, reap)
    while line := sys.stdin.readline():
        work = Work(**json.loads(line))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            return work
        statuses[pid] = Path(work.status)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        print(pid, flush=True)
    return None


def _do(work: Work) -> None:
    """Become the process that the work is for: a session of its own, its own standard streams and environment."""
    os.setsid()
    log = os.open(work.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, standard)
    os.close(log)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(work.environment)
    module, _, name = work.function.partition(":")
    getattr(importlib.import_module(module), name)(*work.arguments)


if __name__ == "__main__":
    wanted = _serve()
    if wanted is not None:
        _do(wanted)
