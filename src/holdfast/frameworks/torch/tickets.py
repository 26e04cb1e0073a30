"""What is waited for: copies that are complete already, and several as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.ports.framework import Ticket


class _Done:
    def wait(self) -> None:
        """Return at once: copies within host memory are complete when the call returns."""


DONE: Ticket = _Done()


class Tickets:
    """Several copies, waited for as one."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        """Add a copy."""
        if ticket is not DONE:
            self._tickets.append(ticket)

    def wait(self) -> None:
        """Return once all of them are complete."""
        for ticket in self._tickets:
            ticket.wait()

    @contextmanager
    def awaited_on_failure(self) -> Iterator[None]:
        """Where the block fails, leave none under way."""
        try:
            yield
        except BaseException:
            self.wait()
            raise
