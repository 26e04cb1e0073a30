"""What is waited for: copies that are complete already, and several as one."""

from __future__ import annotations

from contextlib import ExitStack

from holdfast.ports.framework import Ticket


class _Done:
    def wait(self) -> None:
        """Return at once: copies within host memory are complete when the call returns."""


DONE: Ticket = _Done()


class Unsure:
    """Copies that may be under way, and cannot be waited for."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> None:
        """Raise what queueing them failed with."""
        raise self._error


class Tickets:
    """Several copies, waited for as one."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        """Add a copy."""
        if ticket is not DONE:
            self._tickets.append(ticket)

    def wait(self) -> None:
        """Return once all of them are complete. One copy's failure says nothing of another's: all are waited for."""
        with ExitStack() as waits:
            for ticket in self._tickets:
                waits.callback(ticket.wait)

    def ended_by(self, error: BaseException) -> Ticket:
        """Raise an error once none is under way; where that cannot be told, return what raises it when waited for."""
        try:
            self.wait()
        except Exception:  # noqa: BLE001 - whoever waits for what is returned hears of the first error
            return Unsure(error)
        raise error
