"""A run on real ranks whose store or key-value store meets faults, put together as `CheckpointManager` does it."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.clock import SystemClock
from holdfast.base.ports.comm import Comm, KeyValueStore
from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError
from holdfast.settings import Settings
from holdfast.training.coordination.job import Job
from holdfast.training.saving.handle import SaveHandle
from tests.doubles.faults import Action, FaultPoint, Faults, FaultyKeyValueStore, FaultyStore
from tests.support.resumed_run import goes_on
from tests.support.tuning import tuned

TIMEOUT_SECONDS = 5.0
"""Of the commits in these tests."""

GRACE_SECONDS = 5.0
"""How much later than the timeout a handle may fail."""

SETTINGS = tuned(
    Settings(commit_timeout_seconds=TIMEOUT_SECONDS, chunk_bytes=4096), window_bytes=8192, windows_in_flight=2
)
"""Small windows, so that a small state takes many writes."""

PATIENT = replace(SETTINGS, commit_timeout_seconds=60.0)
"""For saves that no timeout may end, however busy the machine is."""


@dataclass
class Trigger:
    """A fault that waits to be armed and meets only operations whose subject ends in a given way."""

    action: Action
    names: Sequence[str]
    ending: str = ""
    after: bool = False
    at: int | None = 1
    """Which of them meets it; None for each."""
    armed: bool = False
    met: int = field(default=0)

    def faults(self) -> Faults:
        return Faults(self._act, names=tuple(self.names), lasting=True, after=self.after)

    def _act(self, operation: FaultPoint) -> None:
        if not self.armed or self.ending not in operation.subject:
            return
        self.met += 1
        if self.at is None or self.met == self.at:
            self.action(operation)


def die_first(marker: Path) -> Action:
    """Return an action that kills the first process to meet it, of all that share the marker; later ones pass."""

    def act(operation: FaultPoint) -> None:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    return act


class BoardedComm:
    """A comm whose board meets faults."""

    def __init__(self, inner: Comm, key_value_store: KeyValueStore, faults: Faults) -> None:
        self._inner = inner
        self._key_value_store = FaultyKeyValueStore(key_value_store, faults)

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    @property
    def group_id(self) -> str:
        return self._inner.group_id

    @property
    def timeout_seconds(self) -> float | None:
        return self._inner.timeout_seconds

    @property
    def key_value_store(self) -> KeyValueStore:
        return self._key_value_store

    def broadcast(self, payload: bytes | None) -> bytes:
        return self._inner.broadcast(payload)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._inner.all_gather(payload)

    def bitwise_or(self, payload: bytes) -> bytes:
        return self._inner.bitwise_or(payload)

    def exchange(self, gives: Mapping[int, Sequence[memoryview]], takes: Mapping[int, Sequence[memoryview]]) -> None:
        self._inner.exchange(gives, takes)


def run_with(
    root: str | Path,
    *,
    store: Trigger | None = None,
    key_value_store: Trigger | None = None,
    over: KeyValueStore | None = None,
    process_group: object = None,
    settings: Settings = SETTINGS,
) -> CheckpointManager:
    """Return a run over a root; making it is a collective.

    Args:
        root: Its folder.
        store: A fault of the store.
        board: A fault of the key-value store.
        over: The key-value store that `key_value_store` stands before, if not the group's own.
        process_group: As for the public verbs.
        settings: How to save.
    """
    inner: Store = wiring.store_at(str(root), settings)
    if store is not None:
        inner = FaultyStore(inner, store.faults())
    real = wiring.comm_of(process_group)
    comm: Comm = (
        BoardedComm(real, over or real.key_value_store, key_value_store.faults())
        if key_value_store is not None
        else real
    )
    return goes_on(CheckpointManager.over(inner, Job(comm, SystemClock(), settings, wiring.framework_of(real))))


def state_of(step: int, elements: int = 30_000) -> dict[str, object]:
    """Return a state that is equal on every rank and tells its step."""
    random = torch.Generator().manual_seed(step)
    return {name: torch.randn(elements, generator=random) for name in ("a", "b", "c")} | {"step": step}


def save(run: CheckpointManager, step: int) -> SaveHandle:
    return run.save(step, state_of(step))


def said_of(
    handle_of: Callable[[], SaveHandle], within_seconds: float = TIMEOUT_SECONDS + GRACE_SECONDS
) -> dict[str, object]:
    """Return what a save came to: committed, aborted (certainly no checkpoint) or unknown, and in which words.

    A handle that says nothing in time says `late`.
    """
    try:
        handle_of().wait(timeout=within_seconds)
    except TimeoutError as error:
        # Into the rank's log: where every thread stands.
        faulthandler.dump_traceback(all_threads=True)
        return {"said": "late", "error": "TimeoutError", "message": str(error)}
    except CheckpointError as error:
        said = "unknown" if "outcome unknown" in str(error) else "aborted"
        return {"said": said, "error": type(error).__name__, "message": str(error)}
    return {"said": "committed", "error": "", "message": ""}


def said_of_save(run: CheckpointManager, step: int) -> dict[str, object]:
    patience = run._job.settings.commit_timeout_seconds + GRACE_SECONDS
    return said_of(lambda: save(run, step), patience)
