"""Decides which pieces are coded, and by which codec first. Pure: no rank asks another, and no byte is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from holdfast.geometry.region import Region
from holdfast.geometry.tensor import Role, Shard, TensorSpec
from holdfast.geometry.value_class import value_class

_FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Element types whose exponents shrink."""

WORTH_PARTS = 20
"""A kind that shrinks by less than this part, 5 %, is not worth decoding."""

_SAVES_PLAIN = 16
"""Saves after which a kind that did not shrink is tried again."""


@value_class
class Kind:
    """Tensors that are likely to shrink alike."""

    dtype: str
    """Their element type."""

    key: str
    """Their role, or the key of optimizer state."""


def kind_of(tensor: TensorSpec, role: Role) -> Kind:
    """Return the kind of a tensor."""
    key = tensor.fqn.rpartition(".")[2] if role is Role.OPTIMIZER else role.value
    return Kind(tensor.dtype, key)


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

    skip: tuple[str, ...]
    """Patterns of tensors that stay plain."""

    plain_kinds: tuple[Kind, ...]
    """Kinds that stay plain, in a fixed order."""

    def codec(self, shard: Shard, region: Region) -> str:
        """Return the codec of a piece; empty if it is stored as it is."""
        tensor = shard.tensor
        if region.numel * tensor.itemsize < self.coded_bytes_min or matches(tensor.fqn, self.skip):
            return ""
        return "" if kind_of(tensor, shard.role) in self.plain_kinds else codec_for(tensor.dtype)


def matches(fqn: str, patterns: Collection[str]) -> bool:
    """Return whether a pattern matches a name, or a name above it."""
    if not patterns:
        return False
    names = [fqn, *(fqn[:at] for at, letter in enumerate(fqn) if letter == ".")]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


class CodingHistory:
    """What the saves of a job found: the kinds that coding did not shrink. They stay plain for some saves."""

    def __init__(self) -> None:
        """Know nothing."""
        self._saves_left: dict[Kind, int] = {}

    @property
    def plain_kinds(self) -> tuple[Kind, ...]:
        """The kinds that the next save leaves plain."""
        return tuple(sorted(self._saves_left, key=lambda kind: (kind.dtype, kind.key)))

    def record(self, found: Mapping[Kind, tuple[int, int]]) -> None:
        """Take note of a save.

        Args:
            found: By kind that was coded, its raw and its stored bytes.
        """
        left = {kind: count - 1 for kind, count in self._saves_left.items() if count > 1}
        for kind, (raw, stored) in found.items():
            if WORTH_PARTS * (raw - stored) < raw:
                left[kind] = _SAVES_PLAIN
        # One assignment: the training thread reads it while the commit thread records.
        self._saves_left = left
