"""Processes that begin with torch imported, each forked from one that does nothing but import.

Importing what a rank needs of torch takes seconds, a fork milliseconds. `FORKED_IMPORTS` names more to import. Nothing
of Holdfast is imported before the fork. The first ranks of all worlds come of one origin, the second ranks of another,
and so on: ranks of one world hash alike no more than real ones do.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

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
KILLED_SECONDS = 60.0
"""How long a killed fork may take to end. The end of a fork whose origin is gone is never told."""
FIRST_WAIT_SECONDS = 60.0
"""How long an origin waits for the process that has started it, which may be gone."""


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
    """A process that has imported torch and forks on demand, for every process of this run of the suite."""

    def __init__(self, number: int) -> None:
        self._stream = _connected(_folder() / str(number)).makefile("rw")

    def fork(self, work: Work) -> Forked:
        self._stream.write(json.dumps(asdict(work)) + "\n")
        self._stream.flush()
        pid = self._stream.readline()
        assert pid, "the origin of forks ended"
        return Forked(int(pid), Path(work.status))


_ORIGINS: list[Origin] = []
"""By rank."""


def start_ranks(works: Sequence[Work]) -> list[Forked]:
    """Start what each rank of a world does."""
    while len(_ORIGINS) < len(works):
        _ORIGINS.append(Origin(len(_ORIGINS)))
    return [origin.fork(work) for origin, work in zip(_ORIGINS, works, strict=False)]


def _folder() -> Path:
    """Return where the sockets of origins lie. Workers of pytest-xdist share them, as they share the files."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process-{os.getpid()}")
    imports = zlib.crc32(os.environ.get("FORKED_IMPORTS", "").encode())
    return Path(tempfile.gettempdir(), f"forks-{run[:16]}-{imports:08x}")


def _connected(place: Path) -> socket.socket:
    """Return a connection to an origin, which is started if there is none."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(place))
        except FileNotFoundError:
            connection.close()
            _start_origin(place)
        except ConnectionRefusedError:  # Somebody has killed it.
            connection.close()
            place.unlink(missing_ok=True)
        else:
            return connection


def _start_origin(place: Path) -> None:
    """Start an origin, unless another process is quicker. Its socket takes connections as soon as it can be seen."""
    hidden = place.with_name(f"{place.name}.{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as listening, suppress(FileExistsError):
        place.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # The last user of another origin has just removed the folder.
            listening.bind(str(hidden))
            try:
                listening.listen()
                os.link(hidden, place)
            finally:
                hidden.unlink(missing_ok=True)
            listening.set_inheritable(True)
            # Not a child to wait for: others may use it for longer.
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "tests.support.forked_processes", str(listening.fileno()), str(place)],
                environment(),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                ],
                setsid=True,
            )


def _serve(listening: socket.socket, place: Path) -> Work | None:
    """Fork for every line of work; return it in the process that is to do it, and None when nobody is connected."""
    os.chdir(REPOSITORY)
    for name in (*IMPORTED, *os.environ.get("FORKED_IMPORTS", "").split()):
        importlib.import_module(name)
    gc.collect()
    # What is here now is garbage in no fork: looking at it would copy its pages.
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of the threads that were there"
    connections = _Connections(listening, place)
    while (asked := connections.next_line()) is not None:
        line, stream = asked
        work = Work(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            connections.close()
            return work
        connections.await_end(pid, Path(work.status))
        with suppress(ConnectionError):  # The process that has asked may be gone.
            stream.write(f"{pid}\n")
            stream.flush()
    return None


class _Connections:
    """The processes that ask an origin for forks."""

    def __init__(self, listening: socket.socket, place: Path) -> None:
        self._listening, self._place = listening, place
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._streams: dict[socket.socket, TextIO] = {}
        self._forks: dict[int, tuple[int, Path]] = {}
        self._can_be_seen = True

    def next_line(self) -> tuple[str, TextIO] | None:
        """Return the next work and who waits for its number; None once nobody is left, or ever came."""
        while True:
            events = self._selector.select(None if self._streams else FIRST_WAIT_SECONDS)
            for key, _ in events:
                if key.fileobj is self._listening:
                    self._accept()
                    continue
                connection = key.fileobj
                if isinstance(connection, int):
                    self._reap(connection)
                    continue
                assert isinstance(connection, socket.socket)
                # Who asks waits for the answer: no second line is in the buffer.
                with suppress(ConnectionError):
                    line = self._streams[connection].readline()
                    if line.endswith("\n"):
                        return line, self._streams[connection]
                self._selector.unregister(connection)
                with suppress(ConnectionError):  # An answer that was never sent.
                    self._streams.pop(connection).close()
                connection.close()
            if not self._streams and not self._is_asked():
                return None

    def await_end(self, pid: int, status: Path) -> None:
        """Write how a fork ended, once it has.

        In its turn, not in a handler of SIGCHLD: of two forks that ended at one time, the handler for the second
        interrupted the handler for the first, found no child left, and ended the origin. A world then waited for ever.
        """
        fork = os.pidfd_open(pid)
        self._forks[fork] = (pid, status)
        self._selector.register(fork, selectors.EVENT_READ)

    def close(self) -> None:
        """Close all: a process with a copy would answer in place of the origin, or keep others waiting."""
        self._selector.close()
        for fork in self._forks:
            os.close(fork)
        for connection, stream in self._streams.items():
            stream.close()
            connection.close()
        self._listening.close()

    def _reap(self, fork: int) -> None:
        pid, status = self._forks.pop(fork)
        self._selector.unregister(fork)
        os.close(fork)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        # The folder may be gone, with the test that has asked.
        with suppress(FileNotFoundError):
            write_whole(status, str(ended))

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        self._streams[connection] = connection.makefile("rw")
        self._selector.register(connection, selectors.EVENT_READ)

    def _is_asked(self) -> bool:
        """Take the socket away, so that nobody connects any more, and return whether somebody just has."""
        if self._can_be_seen:
            self._can_be_seen = False
            self._place.unlink(missing_ok=True)
            with suppress(OSError):  # Other origins are there.
                self._place.parent.rmdir()
        self._listening.setblocking(False)
        try:
            self._accept()
        except BlockingIOError:
            return False
        return True


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


def await_within(seconds: float, is_so: Callable[[], bool], *, said: Callable[[], str] = str) -> None:
    """Wait until something is so.

    Args:
        seconds: Longest wait.
        is_so: Asked again and again.
        said: Returns text for the failure.
    """
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"it did not come\n{said()}"
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    wanted = _serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
    if wanted is not None:
        _do(wanted)
