"""Storage fails at one call of a logged training, or of a load: no step that was promised is lost, and none is wrong.

Each call of a load meets one kind of fault, and every fourth call of a training. With `SWEEP_STRIDE=1`, as in
`make campaign`, each call meets every kind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch

from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.settings import Settings
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.support.redo_log.logged_runs import Loader, Logged, logged, memory_store
from tests.unit.training.redo_log.test_lives import Training

LAST, EVERY = 6, 3
KINDS = ("once", "reply-lost", "three-calls")
STRIDE = int(os.environ.get("SWEEP_STRIDE", "4"))


@dataclass
class Fault:
    """Fails calls of a store, counted from the moment the fault is armed."""

    kind: str
    at: int
    """Number of the first call."""
    is_armed: bool = False
    counted: int = 0
    met: list[FaultPoint] = field(default_factory=list)

    def store(self, inner: Store) -> FaultyStore:
        return FaultyStore(inner, Faults(self, lasting=True, after=self.kind == "reply-lost"))

    def __call__(self, operation: FaultPoint) -> None:
        self.counted += self.is_armed
        if self.is_armed and self.at <= self.counted < self.at + (3 if self.kind == "three-calls" else 1):
            self.met.append(operation)
            raise_error(UnavailableError)(operation)


def faults(stride: int) -> Iterator[Fault]:
    """Yield faults until the taker meets none: at calls so far from each other, of one kind or of each."""
    at, fault = 1, None
    while fault is None or fault.met:
        for kind in KINDS if STRIDE == 1 else (KINDS[at // stride % len(KINDS)],):
            fault = Fault(kind, at)
            yield fault
        at += stride


def copied(run: Logged) -> Logged:
    store = memory_store()
    for entry in run.store.list():
        store.put(entry.key, run.store.get(entry.key, 1 << 30))
    return Logged(store, run.digests)


def trained(fault: Fault, store: Store) -> tuple[Mapping[int, str], int]:
    """Train with a fault after the first base; return the digests, and the last step that was said to be recoverable.

    No step raises. A base that failed may say so to a caller who waits for the base, as without a log.
    """
    settings = Settings(collect_grace_seconds=0)
    training = Training(fault.store(store), every=EVERY, keep_last=1, settings=settings)
    training.run(1, 1)
    digests, fault.is_armed, promised = {1: training.digest()}, True, 1
    for step in range(2, LAST + 1):
        training.step(step)
        digests[step] = training.digest()
        try:
            training.settle()
        except UnavailableError:
            assert any("log/" not in each.subject for each in fault.met)
        recoverable = training.manager.recoverable
        assert recoverable is not None and recoverable >= promised
        promised = recoverable
    fault.is_armed = False
    training.die()
    return digests, promised


@pytest.mark.long
def test_each_call_of_a_training_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    met = set()
    for fault in faults(STRIDE):
        store = memory_store()
        digests, promised = trained(fault, store)
        loader = Loader(Logged(store, digests))
        step, _ = loader.load()
        loader.close()
        assert step is not None and step >= promised, (fault.kind, fault.met)
        assert promised >= LAST - 3 or fault.kind == "three-calls", (fault.kind, fault.met)
        met |= {each.subject.partition("/")[0] for each in fault.met}
    assert {"log", f"step-{EVERY:012d}"} <= met


def test_each_call_of_a_load_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    whole = logged(memory_store(), *(range(step, step + 1) for step in range(1, LAST + 1)))
    outcomes = set()
    for fault in faults(1):
        run = copied(whole)
        again = Training(fault.store(run.store), every=1000)
        fault.is_armed = True
        try:
            step = again.manager.load(again.state)
        except CheckpointError:
            step = None
        else:
            assert step is not None and again.digest() == run.digests[step], (fault.kind, fault.met)
        fault.is_armed = False
        # A fault of one call takes no step away, and training goes on wherever the load ended.
        with torch.random.fork_rng():
            loader = Loader(run)
            assert loader.load() == (LAST, ""), (fault.kind, fault.met)
            loader.close()
        if step is None:
            step = again.manager.load(again.state)
            assert (step, again.digest()) == (LAST, run.digests[LAST])
        outcomes.add(step)
        expected = dict(run.digests)
        for number in range(step + 1, LAST + 3):
            again.run(number, number)
            expected[number] = again.digest()
        again.die()
        assert {number: expected[number] for number in run.digests} == dict(run.digests)
        loader = Loader(Logged(run.store, expected))
        assert loader.load() == (LAST + 2, ""), (fault.kind, fault.met)
        loader.close()
    print(f"loads ended at {sorted(outcomes)}")
