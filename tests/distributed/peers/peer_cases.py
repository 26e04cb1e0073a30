"""A rank of a job whose near tier is the memory of its nodes, until a kill.

All worlds train alike to the last bit, however many ranks there are: each rank computes the gradient of the whole
batch, and the sum that FSDP2 takes counts that of rank 0 alone. AdamW works on each element for itself, and all shards
are multiples of a vector register.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import holdfast
from holdfast.errors import ConflictError
from holdfast.settings import Settings
from holdfast.stored.peers.union import PeerStore
from holdfast.training.saving.handle import SaveHandle
from tests.distributed.peers.networks import enter
from tests.support.forked_processes import write_whole
from tests.support.gloo_worlds import World

STEPS = 300
"""Most steps of a training."""

NEAR_EVERY, ROOT_EVERY = 2, 10
PROTECT_SECONDS = 6.0
STEP_SECONDS = 0.02
"""A step takes at least so long, so that a training outlasts what is done to it."""

SETTINGS = Settings(collect_grace_seconds=0.0, lease_seconds=2.0, commit_timeout_seconds=15.0)
"""A rank waits for killed ranks for so long: less than the next job takes to train to its end."""

_WIDTH, _HIDDEN, _BLOCKS, _SAMPLES = 128, 384, 3, 8


class _Training:
    """A small model, on this rank."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(_WIDTH, _HIDDEN, bias=False), nn.GELU(), nn.Linear(_HIDDEN, _WIDTH, bias=False))
            for _ in range(_BLOCKS)
        ]
        self._weight = float(rank == 0)
        self._model = nn.Sequential(*blocks, nn.Linear(_WIDTH, _HIDDEN, bias=False))
        for module in (*blocks, self._model):
            sharded = fully_shard(module)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-2)

    def state(self) -> dict[str, object]:
        """Return the state that is saved."""
        return {"model": self._model, "optimizer": self._optimizer}

    def loss(self, step: int) -> float:
        """Train one step; return its loss."""
        draw = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(_SAMPLES, _WIDTH, generator=draw), torch.arange(_SAMPLES)
        loss = functional.cross_entropy(self._model(inputs), targets)
        (loss * self._weight).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


class _Journal:
    """What rank 0 notes, line by line: all that a later job must not contradict."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"pid.{rank}", str(os.getpid()))
        name = folder / "journal" if rank == 0 else Path(os.devnull)
        self._fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._waiting: list[tuple[int, SaveHandle]] = []

    def note(self, *words: object) -> None:
        """Add a line."""
        os.write(self._fd, (" ".join(map(str, words)).replace("\n", " ") + "\n").encode())

    def watch(self, step: int, handle: SaveHandle | None) -> None:
        """Note, once it comes, how a save ends and how its step is protected; and all that has come since."""
        self._waiting += [] if handle is None else [(step, handle)]
        for number, each in [*self._waiting]:
            if not each.near.done():
                continue
            error = each.near.exception()
            if error is None and not each.replicated.done():
                continue
            self._waiting.remove((number, each))
            if error is not None:
                self.note("failed", number, f"{type(error).__name__}: {error}")
            else:
                why = each.replicated.exception()
                self.note(each.near.result().tier, number)
                self.note(*(("replicated", number) if why is None else ("unprotected", number, why)))
            if isinstance(error, ConflictError):
                raise error


def undisturbed(world: World, folder: str) -> None:
    """Train without any checkpoint."""
    journal, training = _Journal(Path(folder), world.rank), _Training(world.rank)
    for step in range(1, STEPS + 1):
        journal.note("loss", step, training.loss(step).hex())


def _stop_before_manifest(step: int) -> None:
    """Have the process stop, once, when it is about to put the manifest of a step on the keepers."""
    put, stops = PeerStore.put_if_absent, {f"step-{step:012d}/manifest.json"}

    def put_or_stop(store: PeerStore, name: str, data: bytes, **options: bool) -> None:
        if name in stops:
            stops.remove(name)
            # To this thread: one that is sent to the process may stop it only after this thread has put the manifest.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        put(store, name, data, **options)

    PeerStore.put_if_absent = put_or_stop  # type: ignore[method-assign]


def live(
    world: World,
    folder: str,
    near: str,
    life: str,
    nodes: Sequence[str],
    domains: Sequence[str],
    last_step: int,
    stops_at: int = 0,
    networks: Sequence[tuple[str, str]] = (),
) -> None:
    """Resume, train and save, as a rank of the node of its number."""
    if stops_at:
        _stop_before_manifest(stops_at)
    if networks:  # A namespace and an address in there, by rank. The training itself stays where it is.
        namespace, os.environ["HOLDFAST_ADDRESS"] = networks[world.rank]
        enter(namespace, int((world.scratch / "port").read_text()))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.environ |= {"HOLDFAST_NODE": nodes[world.rank], "HOLDFAST_DOMAIN": domains[world.rank]}
    place = Path(folder)
    tier = holdfast.Tier(
        f"peers://{near}",
        every=NEAR_EVERY,
        orphan_seconds=20.0,
        linger_seconds=10.0,
        group=2 if len(nodes) > 1 else None,
        protect_timeout_seconds=PROTECT_SECONDS,
    )
    journal, training = _Journal(place / life, world.rank), _Training(world.rank)
    with holdfast.CheckpointManager(
        place / "root", every=ROOT_EVERY, keep_last=3, near=tier, settings=SETTINGS
    ) as manager:
        state = training.state()
        resumed = manager.load(state) or 0
        journal.note("resumed", resumed)
        for step in range(resumed + 1, last_step + 1):
            began = time.monotonic()
            journal.note("loss", step, training.loss(step).hex())
            called = time.monotonic()
            handle = manager.maybe_save(step, state)
            journal.note("blocked", step, f"{time.monotonic() - called:.3f}")
            journal.watch(step, handle)
            time.sleep(max(began + STEP_SECONDS - time.monotonic(), 0.0))
    journal.watch(last_step, None)
