"""Who wants to know how far a long piece of work has come."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Told of progress; must return quickly and never raise."""

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Hear that `done_bytes` of `total_bytes` are done."""
        ...
