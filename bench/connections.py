"""Connections of a rank to the host of the key-value store, and its calls on the training thread, with real code.

Limit: the ranks are few and run on one machine. No number here depends on how many ranks there are, so the keys
hold for 16,384. The connections are counted in a job of four processes over gloo, with torch's own store.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import holdfast
from holdfast.base.clock import SystemClock
from holdfast.base.ports.comm import KeyValueStore
from holdfast.policies import AnyOf, EveryNSteps, OnRequest
from holdfast.settings import Settings
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_schedule import Schedule
from tests.doubles.comm import ThreadComm, run_ranks

RANKS, STEPS = 4, 40
ANNOUNCED_STEPS, STEP_SECONDS = 400, 0.01


def connections_to(port: int) -> int:
    """Return the connections of this process to a port, torch's among them; those that it accepted do not count."""
    count = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # Any thread may close the descriptor in between.
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                connection = socket.socket(fileno=descriptor)
                try:
                    count += connection.getpeername()[1:2] == (port,)
                finally:
                    connection.detach()
    return count


def connections_per_rank(ranks: int = RANKS) -> dict[str, int]:
    """Return the most connections of a rank during saves, and at rest after them."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        multiprocessing.spawn(_train, (port, folder, ranks), nprocs=ranks)
        counts = [tuple(map(int, path.read_text().split())) for path in Path(folder).glob("count-*")]
    assert len(counts) == ranks, counts
    return {
        "connections_per_rank": max(max(each) for each in counts),
        "connections_per_rank_at_rest": max(at_rest for _, at_rest in counts),
    }


def _train(rank: int, port: int, folder: str, ranks: int) -> None:
    """Train and save on one rank; a second thread counts the connections all the time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    most, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.002):
            most = max(most, connections_to(port))

    watcher = threading.Thread(target=watch)
    watcher.start()
    weights = torch.zeros(1 << 18)
    with holdfast.CheckpointManager(f"{folder}/run", every=2) as manager:
        for step in range(STEPS):
            weights += 1
            manager.maybe_save(step, {"weights": weights})
        manager.wait()
        dist.barrier()
        is_over.set()
        watcher.join()
        Path(folder, f"count-{rank}").write_text(f"{most} {connections_to(port)}")
        dist.barrier()
    dist.destroy_process_group()


class _ByThread:
    """A key-value store that counts its calls by thread."""

    def __init__(self, inner: KeyValueStore) -> None:
        self._inner, self.calls = inner, Counter[int]()

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.calls[threading.get_ident()] += 1
        return getattr(self._inner, name)  # type: ignore[no-any-return]


def announced_step_calls(steps: int = ANNOUNCED_STEPS) -> dict[str, int]:
    """Return the calls to the key-value store over announced steps: the most on a training thread, and all.

    Rank 0 stores the announcements, two calls each. All other ranks read them.
    """

    def loop(comm: ThreadComm) -> tuple[int, int]:
        store = comm.key_value_store
        job = Job(comm, SystemClock(), Settings())
        schedule = Schedule(job, AnyOf(EveryNSteps(100), OnRequest()))
        for step in range(1, steps):
            schedule.is_due(step)
            threading.Event().wait(STEP_SECONDS)
        assert isinstance(store, _ByThread)
        return store.calls[threading.get_ident()], store.calls.total()

    counts = run_ranks(2, loop, view_of=lambda _, inner: _ByThread(inner))  # type: ignore[arg-type, return-value]
    return {
        "announced_step_calls_on_training_thread": max(own for own, _ in counts),
        "announced_step_calls": sum(total for _, total in counts),
    }
