"""Values of a stranger's file in messages."""

from __future__ import annotations

CONVERT = "Convert the checkpoint with DeepSpeed's ds_to_universal, and read what that writes"
"""What to do with a layout that cannot be read in place."""

_CHARACTERS_MAX = 120


def shown(value: object) -> str:
    """Return a value in brief, whatever it is."""
    try:
        text = repr(value)
    except ValueError:
        return "a huge integer"  # Python refuses to write one in decimal.
    return text if len(text) <= _CHARACTERS_MAX else f"{type(value).__name__} {text[:_CHARACTERS_MAX]}…"
