"""Another process acts between any two calls that one operation makes of a store: what holds wherever it does so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError
from tests.doubles.faults import FaultPoint, Faults, FaultyStore

CALLS_MAX = 200
"""More calls than any operation makes that is tried so."""


@dataclass(frozen=True)
class Gap:
    """One try: the operation, with another process that acted before one of its calls."""

    store: Store
    """What is stored now."""

    point: FaultPoint
    """The call before which the other process acted."""

    outcome: object
    """What the operation returned or raised."""


def every_gap(
    fresh: Callable[[], Store],
    operation: Callable[[Store], object],
    act: Callable[[Store], object],
    then: Callable[[Store, int], object] = lambda store, turn: None,
) -> Iterator[Gap]:
    """Yield the outcomes of an operation for each call before which another process acts.

    Args:
        fresh: Returns a store that was prepared anew.
        operation: What is tried. It sees the store through a wrapper.
        act: What the other process does, once.
        then: What it does before each later call, given the number of that call after the first.
    """
    for at in range(1, CALLS_MAX):
        store, points = fresh(), list[FaultPoint]()

        def interrupt(point: FaultPoint, store: Store = store, points: list[FaultPoint] = points) -> None:
            points.append(point)
            if len(points) == 1:
                act(store)
            else:
                then(store, len(points) - 1)

        outcome: object
        try:
            outcome = operation(FaultyStore(store, Faults(interrupt, at=at, lasting=True)))
        except CheckpointError as error:
            outcome = error
        if not points:
            assert at > 1, "the operation makes no call"
            return
        yield Gap(store, points[0], outcome)
    raise AssertionError("more calls than expected")


class StoreWithoutLinks(ForwardingStore):
    """A store that gives no object a further key, as object stores."""

    def link(self, key: str, new_key: str) -> bool:
        """Return False."""
        self.size(key)
        return False
