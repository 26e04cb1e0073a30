"""Codecs: reversible transforms between the raw bytes of a chunk and the bytes that are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol

Base = Literal["none", "pair"]
"""What a chunk is coded against: nothing, or the same elements of a paired tensor in the same checkpoint."""

RAW_PER_STORED_MAX = 4096
"""Most raw bytes for one stored byte. A reader bounds its memory by it, and an encoder pads what is shorter."""

GAIN_PARTS = 32
"""A stored form that is shorter by less than this part of the raw bytes, 1/32, is not worth decoding."""


class DirectPart(Protocol):
    """Stored bytes that are made of the chunk when they are written, so they are not copied once more."""

    def __len__(self) -> int:
        """Return how many bytes it has."""
        ...

    def write(self, start: int, target: memoryview) -> None:
        """Fill `target` with its bytes from `start` on. Any thread, any number of times."""
        ...


StoredPart = memoryview | DirectPart
"""Some stored bytes of a chunk."""


class Coder(Protocol):
    """A codec for chunks of one element type. It keeps nothing between calls; any thread may call it."""

    def encode(self, raw: memoryview, base: memoryview | None = None) -> Sequence[StoredPart] | None:
        """Return the stored form, or None: it would not be shorter by 1/32, so the chunk is stored raw.

        Args:
            raw: The chunk, contiguous bytes at any address. It is only read.
            base: As many elements of the pair, contiguous bytes; None for a codec without a base.
        Returns:
            The stored form in parts, to be written one after the other. Memory among them is their own: the caller may
            keep it for as long as it likes. A `DirectPart` reads `raw` when it is written, so `raw` must not change
            before.
        """
        ...

    def decode(self, stored: memoryview, base: memoryview | None, raw: memoryview) -> None:
        """Fill `raw` whole with the chunk of a stored form.

        Bounds are checked before anything is decoded, so hostile bytes take no more time or memory than a sound form.
        Damage that leaves a well-formed form gives other bytes: the caller compares digests.

        Args:
            stored: The whole stored form and nothing else.
            base: The same bytes as at `encode`; None for a codec without a base.
            raw: Writable contiguous memory, exactly as long as the chunk. Nothing beyond it is written. After an error
                its content is undefined.
        Raises:
            CorruptError: The bytes are no stored form of a chunk of this length. It says what was expected and found;
                the caller adds the tensor, the pack and the range.
        """
        ...


class Rounded(Protocol):
    """A chunk apart: its elements rounded to the type of the pair, and what rounding dropped."""

    @property
    def base(self) -> memoryview:
        """The rounded elements. The memory is undefined once the coder rounds another chunk on this thread."""
        ...

    def encode(self) -> Sequence[StoredPart] | None:
        """Return what `Coder.encode` returns for the chunk and this base. Called at most once."""
        ...


class PairCoder(Coder, Protocol):
    """A coder against the elements of a pair."""

    def rounded(self, raw: memoryview) -> Rounded:
        """Return a chunk apart, in one pass over its elements.

        Args:
            raw: The chunk, whole elements. It is only read.
        """
        ...


class Codec(Protocol):
    """A reversible transform with a name that stands in the format."""

    @property
    def name(self) -> str:
        """The name in the index. Frozen: what it means never changes."""
        ...

    @property
    def base(self) -> Base:
        """What chunks are coded against."""
        ...

    def takes(self, dtype: str, base_dtype: str = "") -> bool:
        """Return whether it codes elements of a type.

        Args:
            dtype: The element type of the chunk, a name of `base/geometry/dtype.py`.
            base_dtype: The element type of the base; empty for a codec without one.
        """
        ...

    def coder(self, dtype: str, base_dtype: str = "") -> Coder:
        """Return the coder for elements of a type.

        Raises:
            InvalidError: It does not take the type.
        """
        ...


class PairCodec(Codec, Protocol):
    """A codec whose base is a pair."""

    def coder(self, dtype: str, base_dtype: str = "") -> PairCoder:
        """Return the coder for elements of a type."""
        ...


Codecs = Mapping[str, Codec]
"""The codecs by name."""

NO_CODECS: Codecs = MappingProxyType({})
"""For what reads and writes no coded chunk."""
