"""Stores that answer a listing in pages, from any key on."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from holdfast.base.ports.store import Readable


@runtime_checkable
class Paged(Protocol):
    """A store that is asked for many sizes by listings, since a request for each would take a round trip.

    A wrapper is as paged as what it wraps.
    """

    page_entries: int | None
    """Entries that are best listed together: as many as one request brings, where it may begin at any key. More than
    any folder has, where each listing is read from its beginning. None, as for files: sizes are asked for one by one.
    """


def entries_per_page(files: Readable) -> int | None:
    """Return the entries that are best listed together; None if sizes are asked for one by one."""
    return files.page_entries if isinstance(files, Paged) else None
