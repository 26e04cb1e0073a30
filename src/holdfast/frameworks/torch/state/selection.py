"""Which names `only` and `skip` select for a save or load."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from holdfast.ports.framework import Selection


def takes_all(selection: Selection) -> bool:
    """Return whether every name is selected."""
    return selection.only is None and not selection.skip


def selected(selection: Selection, name: str) -> bool:
    """Return whether a name is selected. A pattern applies to the names it matches and to all names below them."""
    if takes_all(selection):
        return True
    names = [name, *(name[:at] for at, letter in enumerate(name) if letter == ".")]

    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(prefix, pattern) for pattern in patterns for prefix in names)

    return (selection.only is None or matches(selection.only)) and not matches(selection.skip)


def selected_whole(selection: Selection, path: str) -> bool:
    """Return whether a value that is saved and loaded as a whole is selected, by its name or by a pattern below it."""
    return selected(selection, f"{path}.")
