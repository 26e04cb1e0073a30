"""A process of a server: on loopback, ended with the process that began it, killed and started again at will."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SECONDS_MAX = 120
"""How long a server may take until it answers: far above what a slow machine needs."""

_RUN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.getppid() == int(sys.argv[1]) or sys.exit("the process that began this server has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""The kernel kills the server when the thread that began it ends, however that ends."""

_STARTER = ThreadPoolExecutor(1, "starts-servers")
"""The thread that begins all servers of this process: it lives as long as the process does."""


class ServerProcess:
    """One program of a server."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        log: Path,
        answers: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Remember what to run; nothing is started.

        Args:
            arguments: The program and its arguments. It must stay in the foreground.
            log: File that gets its output, behind what is there.
            answers: Returns whether it is ready.
            environment: Its variables beside those of this process.
        """
        self._arguments, self._log, self._answers = [str(each) for each in arguments], log, answers
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Number of the running process."""
        assert self._process is not None, "it runs"
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            AssertionError: It ended, or did not answer; the message has the end of its log.
        """
        self._process = _STARTER.submit(self._begin).result()
        limit = time.monotonic() + SECONDS_MAX
        while not self._answers():
            assert self._process.poll() is None, f"{self._arguments[0]} ended: {self._said()}"
            assert time.monotonic() < limit, f"{self._arguments[0]} does not answer: {self._said()}"
            time.sleep(0.05)

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _RUN, str(os.getpid()), *self._arguments],
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._log.parent,
                # Ctrl-C ends the tests, and they end the servers.
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill it by SIGKILL, if it runs, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def free_port() -> int:
    """Return a port of loopback that nobody uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    """Return whether a server accepts connections at a port of loopback."""
    with socket.socket() as client:
        client.settimeout(5)
        return client.connect_ex(("127.0.0.1", port)) == 0
