"""Text that others wrote, as it may be shown on a terminal or put into a log."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return a text with everything that could steer a terminal written as an escape, e.g. `\x1b`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
