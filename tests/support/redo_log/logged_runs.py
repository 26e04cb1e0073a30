"""Trainings with a redo log in the memory of this process, and what a load of them must find."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.ports.store import Store
from holdfast.stored.repository.logs import Segment, segments_of
from tests.unit.training.redo_log.test_lives import Training

_numbers = itertools.count()


def memory_store() -> MemoryStore:
    """Return an empty store that is passed as an object: one of a user."""
    name = f"logged-{next(_numbers)}"
    store = MemoryStore(name)
    store.url = f"kept://{name}"
    return store


@dataclass(frozen=True)
class Logged:
    """A run that was killed, as stored."""

    store: Store
    digests: Mapping[int, str]
    """The digest of the state after each step."""

    @property
    def last(self) -> int:
        return max(self.digests)

    def segments(self) -> list[Segment]:
        """Return the segments of rank 0, ascending."""
        return [segment for by_rank in segments_of(self.store).values() for segment in by_rank[0]]


def logged(store: Store, *groups: range, every: int = 1000, **options: object) -> Logged:
    """Train, and die. Each group of steps ends with a seal of all its records.

    Args:
        store: The root of the run.
        groups: The steps.
        every: Steps between bases.
        options: Of the manager.
    """
    training, digests = Training(store, every=every, **options), {}
    for steps in groups:
        for step in steps:
            training.step(step)
            digests[step] = training.digest()
        training.settle()
    training.die()
    return Logged(store, digests)


class Loader:
    """Loads one run again and again."""

    def __init__(self, run: Logged, store: Store | None = None) -> None:
        self._run = run
        self._training = Training(run.store if store is None else store, differential=False)

    def load(self) -> tuple[int | None, str]:
        """Return the loaded step and why there is no later one; the state must be that of the step."""
        training = self._training
        step = training.manager.load(training.state)
        report = training.manager.load_report
        assert report is not None and report.step == step
        assert training.digest() == self._run.digests[step], f"step {step} has another state: {report}"
        return step, report.why_not_further

    def close(self) -> None:
        self._training.manager.close()
