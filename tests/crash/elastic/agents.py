"""Agents of torchrun on this machine, one a rank, that are killed and started again while they train one job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from tests.support.forked_processes import REPOSITORY, environment

EXAMPLE = REPOSITORY / "examples" / "elastic.py"
CONF = "is_host=0,last_call_timeout=5,keep_alive_interval=2"


class Agents:
    """A job whose agents come and go; leaving the context kills all that lives.

    Args:
        scratch: Folder for the run, the lines of trained steps, and the logs.
        most: Most agents at once.
        options: Options of the example.
    """

    def __init__(self, scratch: Path, most: int, options: list[str]) -> None:
        self.scratch, self.root, self.trained = scratch, scratch / "run", scratch / "trained"
        self.trained.mkdir(parents=True)
        self._most, self._options, self._started = most, options, 0
        # No agent hosts it, so that any of them may be lost.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        """Agents by number."""

    def start(self) -> int:
        """Start an agent; return its number."""
        number, self._started = self._started, self._started + 1
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{self._most}", "--nproc-per-node=1"]
        command += ["--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._store.port}"]
        command += [f"--rdzv-conf={CONF}", "--rdzv-id=elastic", "--monitor-interval=0.5"]
        command += [str(EXAMPLE), str(self.root), "--trained", str(self.trained), *self._options]
        variables = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with self._log(number).open("wb") as log:
            self.running[number] = subprocess.Popen(
                command, cwd=REPOSITORY, env=variables, stdout=log, stderr=subprocess.STDOUT
            )
        return number

    def worker(self, number: int) -> int:
        """Return the process of an agent's rank."""
        agent = self.running[number].pid
        while not (children := Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
            time.sleep(0.05)
        return int(children[0])

    def lose_node(self, number: int) -> None:
        """Kill an agent and its rank, as the loss of a machine does."""
        self.kill_worker(number)
        self.lose_agent(number)

    def lose_agent(self, number: int) -> None:
        """Kill an agent alone; its rank goes on for a while."""
        agent = self.running.pop(number)
        agent.kill()
        agent.wait()

    def kill_worker(self, number: int) -> None:
        """Kill a rank; its agent starts another one."""
        os.kill(self.worker(number), signal.SIGKILL)

    def log(self) -> str:
        """Return what all agents and ranks have printed."""
        return "".join(self._log(number).read_text(errors="replace") for number in range(self._started))

    def _log(self, number: int) -> Path:
        return self.scratch / f"agent-{number}.log"

    def __enter__(self) -> Agents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Each rank is in a session of its own.
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if str(self.root).encode() in command.read_bytes().split(b"\0"):
                    os.kill(int(command.parent.name), signal.SIGKILL)
        for agent in self.running.values():
            agent.wait()
