"""Loads of a new job from the memory of peers: of the share of a lost node, and with one agent that sends slowly.

A save and each load are jobs of their own, so nothing of them is warm. The ranks of the save end by SIGKILL, and their
agents go on.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path

import numpy as np
import torch
import xxhash

from bench import conditions, job
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spread_of
from bench.peers_place import NODES, State, end_agent, folder_of, manager, memory_of_nodes, near, share
from bench.peers_sockets import WINDOW_BYTES, PlainPeers, Pull
from bench.state import MIB
from holdfast.training.runs.tiers.agent_files import SERVING_FILE, read_serving

STEP, LOST, SLOWER = 1, 3, 10
ROOT = "HOLDFAST_BENCH_ROOT"
"""Variable that names the root, which outlives each job."""

_PIECE_BYTES = 64 << 10


def _save_and_die(root: Path, params: Params) -> Measured:
    torch.manual_seed(conditions.rank())
    with manager(Path(os.environ[ROOT])) as run:
        state = {f"stage{conditions.rank()}": share(params["mib"])}
        run.load(state)
        run.save(STEP, state, near_only=True).wait("replicated")
        conditions.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the rank is dead")


def _load(name: str, stage: int, target: State | None) -> Round:
    """Load the share that the node of a rank saved, into tensors; without tensors only take part."""
    with manager(Path(os.environ[ROOT])) as run:
        state = {} if target is None else {f"stage{stage}": target}
        # Python walks all imported objects, 0.07 s on each rank, once in a new process: by chance within this load.
        gc.collect()
        found = conditions.measured(name, lambda: run.load(state, step=STEP))
        run.close(wait=False)
    if target is not None:
        torch.manual_seed(stage)
        conditions.require_equal(share(sum(each.nbytes for each in target.values()) // MIB), target)
    return found


def _load_from_peers(root: Path, params: Params) -> Measured:
    """Load the share of the next node on each rank, with all agents alike and with a slow one."""
    rank, rounds = conditions.rank(), list[Round]()
    target, stage = share(params["mib"]), (rank + 1) % NODES
    pace = params["mib"] * MIB / _load("even", stage, target)["even"] / SLOWER
    for number in range(params["rounds"]):
        this: Round = {}
        for name in in_turn(["even", "slow"], number):
            is_proxy = name == "slow" and rank == 0
            with paced(folder_of(LOST), pace) if is_proxy else nullcontext():
                conditions.barrier()
                this |= _load(name, stage, target)
        rounds.append(this)
        conditions.say(", ".join(f"{name} {value:.3f}" for name, value in this.items()))
    return Measured(rounds, [])


def _recover(root: Path, params: Params) -> Measured:
    """Load the share of the lost node on its rank, beside plain sockets."""
    reads, peers = conditions.rank() == LOST, PlainPeers(near().parent, params["mib"])
    target = share(params["mib"]) if reads else None
    contenders: list[Callable[[], Round]] = [
        lambda: _load("recover", LOST, target),
        lambda: _limit(peers, params["mib"], torch.ones(params["mib"] * MIB // 4), reads),
    ]
    this: Round = {}
    for act in in_turn(contenders, params["number"]):
        this |= act()
    conditions.say(", ".join(f"{name} {value:.3f}" for name, value in this.items()))
    return Measured([this], [])


def _limit(peers: PlainPeers, mib: int, target: torch.Tensor, reads: bool) -> Round:
    """Rebuild by plain sockets: one thread for each segment pulls three ranges, makes the XOR, copies and hashes."""
    others, segment_bytes = [each for each in range(NODES) if each != LOST], mib * MIB // (NODES - 1)
    into = target.numpy().view(np.uint8)

    def rebuilt(segment: int, pull: Pull) -> None:
        room, first = np.ones(WINDOW_BYTES, np.uint8), segment * segment_bytes

        def take(at: int, window: np.ndarray) -> None:
            place = into[first + at : first + at + len(window)]
            np.copyto(place, window)
            xxhash.xxh3_128_digest(place)

        pull.run(lambda at, end: room[: end - at], take)

    pulls = [Pull(peers, others, number * segment_bytes, (number + 1) * segment_bytes) for number in range(NODES - 1)]
    threads = [threading.Thread(target=rebuilt, args=each) for each in enumerate(pulls)] if reads else []

    def work() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        conditions.barrier()

    return conditions.measured("limit", work)


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the results of either part as a ratio."""
    if "slow" in rounds[0]:
        return {"load_with_slow_peer": spread_of([each["slow"] / each["even"] for each in rounds])}
    return {"recover_node_vs_limit": spread_of([each["limit"] / each["recover"] for each in rounds])}


SAVED = Part(
    name="peers_killed",
    question="None: four ranks save, and are killed",
    ranks=NODES,
    full={"mib": 256},
    quick={"mib": 64},
    measure=_save_and_die,
    keys=lambda rounds, params: {},
)
SLOW = Part(
    name="peers_slow",
    question="How much longer does a load from peers take if one of them sends a tenth as fast?",
    ranks=NODES,
    full={"mib": 256, "rounds": 9},
    quick={"mib": 64, "rounds": 2},
    measure=_load_from_peers,
    keys=keys,
)
RECOVERED = Part(
    name="peers_recovery",
    question="How fast does a restarted job load the share of a lost node beside plain sockets and XOR?",
    ranks=NODES,
    full={"mib": 256, "rounds": 9},
    quick={"mib": 64, "rounds": 2},
    measure=_recover,
    keys=keys,
)


@contextmanager
def paced(folder: Path, bytes_per_second: float) -> Iterator[None]:
    """Put a proxy before the agent of a node for a block, which sends so many bytes a second over all connections."""
    serving = read_serving(str(folder))
    assert serving is not None, "the agent has begun"
    listener, lock, free_at = socket.create_server((serving.host, 0), backlog=64), threading.Lock(), 0.0

    def pump(source: socket.socket, target: socket.socket, seconds_per_byte: float) -> None:
        nonlocal free_at
        with suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                with lock:
                    now = time.monotonic()
                    free_at = max(free_at, now) + len(piece) * seconds_per_byte
                    wait_seconds = free_at - now if seconds_per_byte else 0.0
                time.sleep(wait_seconds)
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                rank, _ = listener.accept()
                agent = socket.create_connection((serving.host, serving.port))
                for pair in ((rank, agent, 0.0), (agent, rank, 1 / bytes_per_second)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    file = folder / SERVING_FILE
    file.write_text(dumps(asdict(replace(serving, port=listener.getsockname()[1]))))
    try:
        yield
    finally:
        file.write_text(dumps(asdict(serving)))
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def measure(part: Part, params: Params, folder: Path) -> Measured:
    """Save and kill the ranks; then load in new ranks: all rounds in one job, or a job for each loss of a node."""
    with memory_of_nodes():
        os.environ[ROOT] = str(folder / "root")
        with suppress(SystemExit):  # The job says that its ranks have failed.
            job.run(SAVED, params, folder / "job")
        if part is SLOW:
            return job.run(part, params, folder / "job")
        rounds: list[Round] = []
        for number in range(params["rounds"]):
            end_agent(folder_of(LOST))
            shutil.rmtree(folder_of(LOST))
            rounds += job.run(part, {**params, "number": number}, folder / "job").rounds
        return Measured(rounds, [])
