"""Tickets to wait for copies: failed, or several as one."""

from __future__ import annotations

from contextlib import ExitStack

from holdfast.base.ports.framework import DONE, Ticket


class Unsure:
    """Copies that may still run, and whose end cannot be observed."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> None:
        """Raise the error that queueing them raised."""
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
        """Return once all of them are complete; after a failure too, wait for the others before raising it."""
        with ExitStack() as waits:
            for ticket in self._tickets:
                waits.callback(ticket.wait)

    def ended_by(self, error: BaseException) -> Ticket:
        """Raise an error once no copy runs. If that cannot be observed, return a ticket that raises it."""
        try:
            self.wait()
        except Exception:  # noqa: BLE001 - the first error is the cause, and the ticket raises it
            return Unsure(error)
        raise error
