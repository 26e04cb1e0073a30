"""Text of error messages: values of a foreign file, and the advice to convert it."""

from __future__ import annotations

CONVERT = "Convert the checkpoint with DeepSpeed's ds_to_universal, and read its output"
"""Advice for a layout that cannot be read in place."""

_CHARACTERS_MAX = 120


def shown(value: object) -> str:
    """Return a value as text of bounded length."""
    try:
        text = repr(value)
    except ValueError:
        return "a huge integer"  # Python refuses to write one in decimal.
    return text if len(text) <= _CHARACTERS_MAX else f"{type(value).__name__} {text[:_CHARACTERS_MAX]}…"
