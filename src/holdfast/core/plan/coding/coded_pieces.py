"""Decides which pieces are coded, and by which codec first. Pure: no rank asks another, and no byte is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import Shard
from holdfast.base.name_patterns import with_names_above
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
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in with_names_above(fqn))
