"""Two ranks of a script, started as a launcher starts them, so that the bench can kill them and start them again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

RANKS = 2
_SECONDS_MAX = 300.0


class World:
    """The ranks of one job. Their output goes to files."""

    def __init__(
        self, module: str, arguments: list[str], scratch: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start the ranks: `python -m MODULE ARGUMENTS`, with further environment variables."""
        scratch.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._outputs = [scratch / f"output.{rank}" for rank in range(RANKS)]
        self._ranks = []
        for rank, output in enumerate(self._outputs):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
            sizes = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
            with output.open("w") as file:
                command = [sys.executable, "-m", module, *arguments]
                env = {**os.environ, **numbers, **sizes, **(variables or {})}
                self._ranks.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))

    def __enter__(self) -> Self:
        """Return the world."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the ranks that still run."""
        self.kill()

    def kill(self) -> None:
        """Kill all ranks at once, as the end of a node does."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()

    def join(self) -> None:
        """Wait until all ranks have ended well."""
        self._await(lambda: all(rank.poll() == 0 for rank in self._ranks), may_end=True)

    def await_until(self, reached: Callable[[], bool]) -> None:
        """Wait until the ranks have reached something.

        Raises:
            RuntimeError: A rank ended before, or it takes too long.
        """
        self._await(reached, may_end=False)

    def _await(self, reached: Callable[[], bool], *, may_end: bool) -> None:
        deadline = time.monotonic() + _SECONDS_MAX
        while not reached():
            ended = [rank.poll() for rank in self._ranks]
            is_wrong = any(ended) or not (may_end or all(code is None for code in ended))
            if is_wrong or time.monotonic() > deadline:
                said = "\n".join(output.read_text()[-2000:] for output in self._outputs)
                raise RuntimeError(f"ranks ended with {ended}, or take longer than {_SECONDS_MAX:.0f} s:\n{said}")
            time.sleep(0.005)
