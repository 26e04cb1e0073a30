"""Worlds of real gloo processes that run a list of cases and leave what came of each as JSON.

A world costs a second, so one world runs many cases, in order, with a barrier before each. A case is a
function `case(world, **arguments)` named `module:function`; it returns something JSON can hold. A world whose ranks
are meant to die runs one case, and nothing waits for the dead.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Literal

from tests.support.forked_processes import KILLED_SECONDS, Work, start_ranks, write_whole

PORT_WAIT_SECONDS = 60.0
GLOO_TIMEOUT_SECONDS = 60.0
"""After this a rank that waits for one that failed gives up; a healthy case needs a second."""


@dataclass(frozen=True, slots=True)
class Case:
    """One function to run on every rank."""

    function: str
    """`module:function`."""

    arguments: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments, JSON."""

    name: str = ""
    """What its results go by; the function's own name if empty."""

    def key(self) -> str:
        return self.name or self.function.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class World:
    """What a case is told of the world it runs in."""

    rank: int
    size: int
    scratch: Path
    """A folder of this world, the same on every rank."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case on one rank: a value or an error."""

    value: object = None
    error: str | None = None
    """Name of the exception's type."""

    message: str = ""
    trace: str = ""


class Launch:
    """The processes of one world; leaving the context kills whatever still lives.

    Args:
        size: Ranks.
        cases: What every rank runs.
        scratch: Folder for results and logs.
        store_host: `rank0` hosts the key-value store, or `launcher`, which survives every rank.
        deadline_seconds: After this every rank is killed.
    """

    def __init__(
        self,
        size: int,
        cases: Sequence[Case],
        scratch: Path,
        *,
        store_host: Literal["rank0", "launcher"] = "launcher",
        deadline_seconds: float = 120.0,
    ) -> None:
        self._size, self._cases, self.scratch = size, list(cases), scratch
        scratch.mkdir(parents=True, exist_ok=True)
        assert len({case.key() for case in cases}) == len(cases), "names of cases are distinct"
        self._store = None
        if store_host == "launcher":
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            (scratch / "port").write_text(str(self._store.port))
        spec = {"size": size, "host": store_host, "cases": [asdict(case) | {"name": case.key()} for case in cases]}
        (scratch / "spec.json").write_text(json.dumps(spec))
        self._deadline = time.monotonic() + deadline_seconds
        self.processes = start_ranks(
            [Work.of_rank(rank, scratch, "tests.support.gloo_worlds:main", scratch, rank) for rank in range(size)]
        )

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait(KILLED_SECONDS)

    def join(self) -> Results:
        """Wait for every rank, or kill what is left at the deadline; return what there is."""
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(self._deadline - time.monotonic(), 0.1))
        self.__exit__(None, None, None)
        return Results(self.scratch, self._size, [process.returncode for process in self.processes])

    def wait_for(self, name: str) -> Path:
        """Wait until a case has written the file `name` into the scratch folder."""
        path = self.scratch / name
        while not path.exists():
            assert time.monotonic() < self._deadline, f"{name} never came:\n{self.logs()}"
            assert any(p.poll() is None for p in self.processes), f"all ranks ended before {name}:\n{self.logs()}"
            time.sleep(0.02)
        return path

    def logs(self) -> str:
        return logs_of(self.scratch, self._size)


@dataclass(frozen=True, slots=True)
class Results:
    """What came of a world."""

    scratch: Path
    size: int
    exits: Sequence[int]
    """Exit status of each rank; negative is the signal that killed it."""

    def outcome(self, name: str, rank: int) -> Outcome | None:
        """Return what a rank said of a case; None if it never got to say."""
        path = self.scratch / f"{name}.{rank}.json"
        return Outcome(**json.loads(path.read_text())) if path.exists() else None

    def of(self, name: str) -> list[Outcome]:
        """Return what every rank said of a case."""
        found = [self.outcome(name, rank) for rank in range(self.size)]
        silent = [rank for rank, each in enumerate(found) if each is None]
        assert not silent, f"{name}: ranks {silent} of {self.size} said nothing (exits {self.exits}):\n{self.logs()}"
        return [each for each in found if each is not None]

    def values(self, name: str) -> list[object]:
        """Return what every rank returned; an error on any is this test's failure."""
        for rank, each in enumerate(self.of(name)):
            assert each.error is None, f"{name}, rank {rank}: {each.error}: {each.message}\n{each.trace}"
        return [each.value for each in self.of(name)]

    def logs(self) -> str:
        return logs_of(self.scratch, self.size)


def logs_of(scratch: Path, size: int) -> str:
    parts = []
    for rank in range(size):
        path = scratch / f"log.{rank}"
        text = path.read_text(errors="replace")[-4000:] if path.exists() else ""
        parts.append(f"--- rank {rank}\n{text}")
    return "\n".join(parts)


def run_world(size: int, cases: Sequence[Case], scratch: Path, *, deadline_seconds: float = 120.0) -> Results:
    """Run a world in which nobody dies."""
    with Launch(size, cases, scratch, deadline_seconds=deadline_seconds) as launch:
        return launch.join()


def run_worlds(
    size: int, worlds: Sequence[Sequence[Case]], scratch: Path, *, deadline_seconds: float = 120.0
) -> dict[str, Results]:
    """Run worlds that mostly wait, at one time; return them by the names of their cases."""
    with ExitStack() as stack:
        launched = [
            stack.enter_context(Launch(size, cases, scratch / f"world-{number}", deadline_seconds=deadline_seconds))
            for number, cases in enumerate(worlds)
        ]
        joined = [launch.join() for launch in launched]
    return {case.key(): results for cases, results in zip(worlds, joined, strict=True) for case in cases}


def main(scratch_folder: str, rank_number: str) -> None:
    """Be one rank of a world: join it, run its cases, leave what came of each."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    scratch, rank = Path(scratch_folder), int(rank_number)
    spec = json.loads((scratch / "spec.json").read_text())
    size, hosts = spec["size"], spec["host"] == "rank0" and rank == 0
    timeout = timedelta(seconds=GLOO_TIMEOUT_SECONDS)
    port_file = scratch / "port"
    if hosts:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        write_whole(port_file, str(store.port))
    else:
        deadline = time.monotonic() + PORT_WAIT_SECONDS
        while not port_file.exists():
            assert time.monotonic() < deadline, "the store's host never said its port"
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    # Kept here, as a case may replace what it finds in torch.distributed.
    barrier = dist.barrier
    world = World(rank, size, scratch)
    for case in spec["cases"]:
        if len(spec["cases"]) > 1:
            barrier()
        module, _, name = case["function"].partition(":")
        try:
            outcome = Outcome(value=getattr(importlib.import_module(module), name)(world, **case["arguments"]))
        except BaseException as error:  # every rank says what it met, whatever it was
            outcome = Outcome(error=type(error).__name__, message=str(error), trace=traceback.format_exc())
        write_whole(scratch / f"{case['name']}.{rank}.json", json.dumps(asdict(outcome)))
    sys.stdout.flush()
    sys.stderr.flush()
    if len(spec["cases"]) > 1:
        barrier()
        dist.destroy_process_group()
    else:
        # Taking gloo down would wait for ranks that are dead on purpose.
        os._exit(0)
