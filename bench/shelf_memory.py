"""The memory of a near tier in memory with lazy saves, and what an agent of a root in an object store takes.

`python -m bench.shelf_memory saves MIB` and `… agent SECONDS` measure in a process of their own; the second one needs a
server at `AWS_ENDPOINT_URL`, and its bucket.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import holdfast
from bench.memory import memory_mib
from bench.part import Round, Spread, spread_of
from holdfast import api
from holdfast.settings import Settings

MIB = 1 << 20
MEMORY = "/dev/shm"
SAVES = 6
"""The second save has two steps in fresh memory, the later ones take that of collected steps."""

STEP_SECONDS = 2.0
"""Between saves: the step before is collected meanwhile, as in training."""

SAMPLE_SECONDS = 0.02


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Return a folder in memory for the length of a block."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Peak:
    """The most memory that a process has of its own and in a folder together, above what there was at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._first, self.mib, self._is_over = self._now(), 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> float:
        """Return the MiB."""
        self._is_over.set()
        self._thread.join()
        return self.mib

    def _now(self) -> float:
        # Files that the process has open may have lost their name, and some lose it meanwhile.
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(self._folder) for name in names]
        blocks = {}
        for path in [*paths, *(f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))]:
            with suppress(FileNotFoundError):
                if os.path.realpath(path).startswith(self._folder):
                    blocks[os.stat(path).st_ino] = os.stat(path).st_blocks
        return memory_mib("RssAnon") + sum(blocks.values()) * 512 / MIB

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.mib = max(self.mib, self._now() - self._first)


def saves(mib: int) -> Round:
    """Save near several times with lazy staging; return the peak over the bytes of the state."""
    torch.set_num_threads(1)
    model = torch.nn.ParameterDict({str(n): torch.rand(MIB // 4, 16) for n in range(mib // 16)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    settings = Settings(staging="lazy", collect_grace_seconds=0.0, deduplicate=False)
    with tempfile.TemporaryDirectory() as root, memory_folder() as memory:
        near = holdfast.Tier(memory / "near", every=1 << 30, keep_last=1)
        run = holdfast.CheckpointManager(root, process_group=False, preemption=False, near=near, settings=settings)
        run.load(state)
        peak = Peak(memory)
        for step in range(1, SAVES + 1):
            handle = run.save(step, state, near_only=True)
            optimizer.step()
            report = handle.wait()
            assert report is not None and report.staging == "lazy", report
            time.sleep(STEP_SECONDS)
        found = peak.end()
        run.close(wait=False)
    return {"memory_vs_state": found / mib}


def agent(seconds: float) -> Round:
    """Return the memory of an agent that has read its root, in MiB, and the share of a core that it takes, in %."""
    state = {"weights": torch.rand(MIB)}
    from tests.servers.server import BUCKET  # A comparison of two checkouts copies no tests.

    with memory_folder() as memory:
        near = holdfast.Tier(memory / "near", every=1, agent=True)
        root = f"s3://{BUCKET}/agent-{time.time_ns()}"
        run = holdfast.CheckpointManager(root, every=1 << 30, process_group=False, preemption=False, near=near)
        run.load(state)
        run.save(1, state, near_only=True).wait()
        pid = _watching(str(memory / "near"))
        before, start = _cpu_seconds(pid), time.monotonic()
        time.sleep(seconds)
        spent = (_cpu_seconds(pid) - before) / (time.monotonic() - start)
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert "obstore" in Path(f"/proc/{pid}/maps").read_text(), "the client library is loaded"
        run.close(wait=False)
    return {"agent_rss_anon_mib": int(status["RssAnon"].split()[0]) / 1024, "agent_idle_cpu_percent": 100 * spent}


def _watching(near: str) -> int:
    """Return the process of the agent, once it has read its root and watches."""
    for _ in range(600):
        time.sleep(0.1)
        try:
            status = api.agent_status(near)
        except holdfast.MissingError:
            continue
        if (
            status.is_running
            and status.state == "watching"
            and "obstore" in Path(f"/proc/{status.pid}/maps").read_text()
        ):
            assert not status.error, status.error
            time.sleep(3.0)  # The first request to the root ends.
            return status.pid
    raise AssertionError(f"no agent watches {near}")


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process: in nanoseconds, since an agent takes few ticks."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def measure(folder: Path, *, quick: bool) -> list[Round]:
    """Measure both in processes of their own, some times."""
    found = []
    from tests.support.object_server import object_server  # As in `agent`.

    with object_server(folder) as server:
        for _ in range(1 if quick else 3):
            this: Round = {}
            for what in (["saves", "1024"], ["agent", "5" if quick else "20"]):
                command = [sys.executable, "-m", "bench.shelf_memory", *what]
                environment = {**os.environ, **server.environment}
                ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
                this |= json.loads(ended.stdout)
            found.append(this)
            print(", ".join(f"{name} {value:.3f}" for name, value in this.items()), flush=True)
    return found


def keys(rounds: Sequence[Round]) -> dict[str, Spread]:
    """Return each of the values."""
    return {name: spread_of([each[name] for each in rounds]) for name in rounds[0]}


if __name__ == "__main__":
    print(json.dumps(saves(int(sys.argv[2])) if sys.argv[1] == "saves" else agent(float(sys.argv[2]))))
