"""Uploads that nobody has ended: parts of an object that no listing of objects shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class KeepsUploads(Protocol):
    """A store where an upload that was killed leaves parts that no listing of objects shows."""

    def abort_uploads(self, prefix: str, is_ours: Callable[[str], bool], *, dry_run: bool = False) -> int:
        """Remove uploads under a prefix that were neither completed nor aborted; return how many there were.

        The caller knows that nobody is sending them.

        Args:
            prefix: What their keys start with.
            is_ours: Takes the rest of a key; says whether that upload is to go.
            dry_run: Only count.
        Raises:
            InvalidError: This user may not list or abort uploads, or the server cannot.
            UnavailableError: It failed; the same call again removes the rest.
        """
        ...
