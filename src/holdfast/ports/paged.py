"""Stores that answer a listing in pages, from any key on."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from holdfast.ports.store import Readable


@runtime_checkable
class Paged(Protocol):
    """A store that begins a listing at any key with one request.

    A part of a listing then costs its own pages only. Elsewhere it costs those before it too, as on Azure, or the whole
    folder, as on a disk. A wrapper is as paged as what it wraps.
    """

    page_entries: int | None
    """Entries that one request brings; None if a listing cannot begin at any key."""


def entries_per_page(files: Readable) -> int | None:
    """Return the entries that one request of a listing brings; None if a listing cannot begin at any key."""
    return files.page_entries if isinstance(files, Paged) else None
