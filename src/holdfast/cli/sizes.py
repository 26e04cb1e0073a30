"""Sizes as people type them: `5GB`, `512MiB`."""

from __future__ import annotations

import re

from holdfast.errors import InvalidError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", 1)
    for suffix, base in (("", 1024), ("B", 1000), ("IB", 1024))
}


def bytes_of(text: str, option: str) -> int:
    """Return the bytes that a text states: KB, MB and GB are powers of 1000; KiB, MiB, GiB, K, M and G of 1024.

    Raises:
        InvalidError: The text is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    count = int(float(match[1]) * unit) if match and unit else 0
    if not 0 < count < 1 << 60:
        raise InvalidError(f"{option} {text[:80]!r}: expected a size such as 5GB or 512MiB")
    return count
