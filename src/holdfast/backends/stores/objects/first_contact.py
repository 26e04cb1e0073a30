"""Says at once that a server was never reached, since its endpoint may be mistyped; what answered before is waited for.

A name that nobody has is final, as long as no request of this process was answered there. Afterwards it is a failure of
the network like any other: a server that is restarted may lose its name for a while.
"""

from __future__ import annotations

import re

from holdfast.backends.stores.objects.refusals import has_status
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError, InvalidError

_UNKNOWN_NAME = re.compile(r"Name or service not known|No address associated with hostname|Name does not resolve")
"""What the C library says if the name servers know no such host. If they do not answer, it says something else."""

_NO_TLS = "InvalidContentType"
"""What a client of TLS says of a server that speaks plain HTTP."""

_answered: set[str] = set()
"""Servers that have answered a request of this process."""


class FirstContact:
    """What this process knows of one server."""

    def __init__(self, server: str) -> None:
        """Remember which one."""
        self._server = server

    def note_answer(self) -> None:
        """Record that it has answered."""
        if self._server not in _answered:
            _answered.add(self._server)

    def judged(self, failure: CheckpointError, text: str) -> CheckpointError:
        """Return what a request has failed with, in view of those before.

        Args:
            failure: How it failed.
            text: What the client says of it.
        """
        if has_status(text):
            self.note_answer()
        if not isinstance(failure, TemporaryError) or self._server in _answered:
            return failure
        if _UNKNOWN_NAME.search(text):
            return InvalidError(f"{failure}. No host has this name: mend endpoint, region, account or proxy")
        if _NO_TLS in text:
            return InvalidError(f"{failure}. The server does not speak TLS: begin the endpoint with http://")
        failure.is_first_contact = True
        return failure
