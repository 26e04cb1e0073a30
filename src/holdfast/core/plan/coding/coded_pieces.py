"""Decides which pieces are coded, and by which codec first. Pure: no rank asks another, and no byte is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate

from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import Shard
from holdfast.base.types.coding import Kind

_FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Element types whose exponents shrink."""


def codec_for(dtype: str) -> str:
    """Return the codec that chunks of an element type are coded by, unless a look at them suggests another."""
    return "planes" if dtype in _FLOATS else "zstd"


@dataclass(frozen=True, slots=True)
class CodingChoice:
    """Which pieces of a save are coded."""

    chunk_bytes: int
    """Raw bytes of a chunk."""

    coded_bytes_min: int
    """Smallest piece that is coded: a smaller one takes more in headers and reads than it saves."""

    kinds: Mapping[str, Kind]
    """The kind of each tensor that may be coded, by FQN."""

    coded: Collection[Kind]
    """The kinds that are coded."""

    def codec(self, shard: Shard, region: Region) -> str:
        """Return the codec of a piece; empty if it is stored as it is."""
        tensor = shard.tensor
        if region.numel * tensor.itemsize < self.coded_bytes_min or self.kinds.get(tensor.fqn) not in self.coded:
            return ""
        return codec_for(tensor.dtype)


def matches(fqn: str, patterns: Collection[str]) -> bool:
    """Return whether a pattern matches a name, or a name above it."""
    if not patterns:
        return False
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in _names_above(fqn))


def unmatched(patterns: Sequence[str], fqns: Iterable[str]) -> list[str]:
    """Return the patterns that match none of some names, nor a name above them."""
    matchers = {pattern: re.compile(translate(pattern)).match for pattern in patterns}
    for fqn in fqns:
        if not matchers:
            break
        names = _names_above(fqn)
        for pattern in [pattern for pattern, is_match in matchers.items() if any(map(is_match, names))]:
            del matchers[pattern]
    return list(matchers)


def _names_above(fqn: str) -> list[str]:
    """Return a name and all names above it."""
    return [fqn, *(fqn[:at] for at, letter in enumerate(fqn) if letter == ".")]
