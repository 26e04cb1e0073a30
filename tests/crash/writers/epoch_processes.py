"""Processes that write to one root, as real as jobs: each a Python of its own, told what to do line by line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


class Writer:
    """One process of `tests.crash.writers.epoch_worker`."""

    def __init__(self, lease_seconds: float, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.writers.epoch_worker", str(lease_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"process {self.pid} ended: {self._process.wait()}"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_until_stopped(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while (state := Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
            assert time.monotonic() < end, f"process {self.pid} did not stop: {state}"
            time.sleep(0.01)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def writers(count: int, lease_seconds: float, environment: Mapping[str, str] | None = None) -> Iterator[list[Writer]]:
    """Start processes; none that is in the list is left when the block ends."""
    started = [Writer(lease_seconds, environment) for _ in range(count)]
    try:
        for each in started:
            each.ready()
        yield started
    finally:
        for each in started:
            each.end()
