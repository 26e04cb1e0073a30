"""Which names take part in a save or load."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from holdfast.ports.framework import Selection


def takes_all(selection: Selection) -> bool:
    """Return whether every name takes part."""
    return selection.only is None and not selection.skip


def selected(selection: Selection, name: str) -> bool:
    """Return whether a name takes part: a pattern speaks of the names it matches and of all that stands under them."""
    if takes_all(selection):
        return True
    names = [name, *(name[:at] for at, letter in enumerate(name) if letter == ".")]

    def spoken_of(patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(each, pattern) for pattern in patterns for each in names)

    return (selection.only is None or spoken_of(selection.only)) and not spoken_of(selection.skip)


def selected_whole(selection: Selection, path: str) -> bool:
    """Return whether something that is saved and loaded as one takes part, by its own name or by what is under it."""
    return selected(selection, f"{path}.")
