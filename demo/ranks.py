"""Starts the ranks of a run as processes of their own, waits for them, and kills them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PHASE_SECONDS_MAX = 240.0
"""Longest a run of the demo may last; ours last seconds, so beyond it something hangs."""


class RunFailed(Exception):
    """A run ended otherwise than it should."""


class Ranks:
    """The processes of one run; leaving the context ends whatever still lives.

    Args:
        name: Of the run; names its log files.
        logs: Folder for what ranks write to stderr.
        count: Ranks; None for one plain process without torch.distributed.
        arguments: For `demo.rank`.
    """

    def __init__(self, name: str, *, logs: Path, count: int | None, arguments: list[str]) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._logs = [logs / f"{name}-rank{rank}.log" for rank in range(count or 1)]
        self._processes: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        try:
            for rank, log in enumerate(self._logs):
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
                # c10d looks up names at every connection: a lost packet must not stall the ranks for seconds.
                environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
                for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                    environment.pop(key, None)
                if count is not None:
                    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
                    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                with log.open("wb") as errors:
                    # A session of its own: Ctrl-C reaches the parent alone, which then ends the ranks.
                    process = subprocess.Popen(
                        [sys.executable, "-m", "demo.rank", *arguments],
                        env=environment,
                        stderr=errors,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def running(self) -> bool:
        """Return whether every rank still runs.

        Raises:
            RunFailed: One ended with an error.
        """
        for rank, process in enumerate(self._processes):
            if process.poll() not in (None, 0):
                raise RunFailed(
                    f"{self._name}: rank {rank} ended with {process.returncode}; the end of {self._logs[rank]}:\n"
                    + "\n".join(self._logs[rank].read_text(errors="replace").splitlines()[-25:])
                )
        return all(process.poll() is None for process in self._processes)

    def wait(self) -> None:
        """Return once every rank has ended well.

        Raises:
            RunFailed: One ended with an error, or the run takes too long.
        """
        deadline = time.monotonic() + PHASE_SECONDS_MAX
        while self.running() or any(process.poll() is None for process in self._processes):
            if time.monotonic() > deadline:
                raise RunFailed(f"{self._name}: still running after {PHASE_SECONDS_MAX:.0f} s; see {self._logs[0]}")
            time.sleep(0.05)
        self.running()

    def kill(self) -> None:
        """Send SIGKILL to every rank at once and wait until they are gone."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
