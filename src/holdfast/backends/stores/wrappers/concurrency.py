"""How many requests to one server may be in flight: one more after each round trip, half after a sign of pressure.

All threads of a process that use one server share one limit, whichever save or load they work for.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from holdfast.base.interrupts import GUARD


class AdaptiveWindow:
    """The arithmetic of the limit; no thread waits here."""

    def __init__(self, most: int) -> None:
        """Begin with the most: a store that has shown no pressure is not held back.

        Args:
            most: Bound of the limit, at least 1.
        """
        self._most = most
        self._width = float(most)
        self._begun = self._halved_after = 0

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return int(self._width)

    def begin(self) -> int:
        """Count a request that begins; return its number."""
        self._begun += 1
        return self._begun

    def note_answered(self, in_flight: int) -> None:
        """Widen the limit by one for as many answers as it allows requests: once a round trip.

        Args:
            in_flight: Requests that were in flight, the answered one among them. If they were fewer than half of what
                the limit allows, the answer says nothing of what the server takes.
        """
        if 2 * in_flight >= self.limit:
            self._width = min(self._width + 1.0 / self._width, float(self._most))

    def note_pressure(self, number: int) -> None:
        """Halve the limit, once for all requests that were in flight when it was halved.

        Args:
            number: Of the request that met the pressure. One that began before the last halving says nothing new.
        """
        if number > self._halved_after:
            self._halved_after = self._begun
            self._width = max(self._width / 2.0, 1.0)


@dataclass(slots=True)
class Slot:
    """The place of one request among those in flight."""

    number: int
    """Number of the request."""

    has_met_pressure: bool = False
    """Set by its holder if the server showed pressure."""

    is_answered: bool = False
    """Set by its holder if the server did what was asked, or said why not."""


class ConcurrencyLimit:
    """Lets as many requests begin as the window allows. Any thread may call."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reset()
        _LIMITS.add(self)

    def _reset(self) -> None:
        """Begin anew: a forked child has none of the threads that hold slots."""
        self._changed = threading.Condition(GUARD)
        self._window = AdaptiveWindow(self._most)
        self._in_flight = {False: 0, True: 0}

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return self._window.limit

    @property
    def in_flight(self) -> int:
        """Requests that are in flight now."""
        return sum(self._in_flight.values())

    @contextmanager
    def slot(self, *, moves_much: bool = False) -> Iterator[Slot]:
        """Wait until one more request may be in flight, and count the block as one.

        Every slot is given back within the time limit of its request, so this wait ends.

        Args:
            moves_much: Whether it moves a pack or a range of one. Those are counted apart: a heartbeat must not wait
                for packs.
        """
        with GUARD:
            changed, window, in_flight = self._changed, self._window, self._in_flight
            changed.wait_for(lambda: in_flight[moves_much] < window.limit)
            in_flight[moves_much] += 1
            slot = Slot(window.begin())
        try:
            yield slot
        finally:
            with GUARD:
                if slot.has_met_pressure:
                    window.note_pressure(slot.number)
                elif slot.is_answered:
                    window.note_answered(in_flight[moves_much])
                in_flight[moves_much] -= 1
                changed.notify_all()

    @classmethod
    def shared(cls, server: str, most: int) -> Self:
        """Return the limit of a server that all stores of this process share; the first one chooses its bound.

        Args:
            server: Scheme and host of the store's URL.
            most: Bound of the limit.
        """
        with GUARD:
            limit = _shared.get(server)
            if not isinstance(limit, cls):
                limit = _shared[server] = cls(most)
            return limit


_LIMITS: weakref.WeakSet[ConcurrencyLimit] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[str, ConcurrencyLimit] = weakref.WeakValueDictionary()


def _forget_threads() -> None:
    for limit in list(_LIMITS):
        limit._reset()


os.register_at_fork(after_in_child=_forget_threads)
