"""Encodes single chunks, and proves that masters and their weights are pairs. Any thread may call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.dtype import MASTER_TYPE
from holdfast.base.geometry.value_class import value_class
from holdfast.base.ports.codec import Codecs, PairCodec, StoredPart
from holdfast.base.types.plan import Digest
from holdfast.core.engine import casting
from holdfast.core.engine.nonfinite import nonfinite_count
from holdfast.core.format.digest import digest_of, new_digest

_LOOK_BYTES = 4 << 10
"""Bytes of a chunk that are looked at before a codec is tried that takes few chunks."""

_LOOK_RUNS, _LOOK_RUN_ELEMENTS = 16, 32
"""Elements whose mantissas are counted: so many runs of so many."""

_MANTISSA = (1 << 23) - 1


@value_class
class EncodedChunk:
    """A chunk as it is stored."""

    digest: Digest
    """The digest of its raw bytes."""

    codec: str
    """Its codec; empty if it is stored raw."""

    parts: Sequence[StoredPart]
    """Its stored bytes, to be written one after the other. Until then the memory that it was encoded from must stay."""

    nonfinite: int
    """NaN and infinite elements in it; 0 if they are not counted."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that are stored."""
        return sum(map(len, self.parts))


@value_class
class PairedWeight:
    """The part of a weight that some chunks of its master were rounded to, perhaps."""

    dtype: str
    """Element type of the weight."""

    digest: Digest
    """Digest of the chunk of the weight."""


class ChunkEncoder:
    """Encodes chunks; keeps nothing between calls."""

    def __init__(self, codecs: Codecs, *, counts_nonfinite: bool) -> None:
        self._codecs, self._counts_nonfinite = codecs, counts_nonfinite

    def encoded(
        self, dtype: str, codec: str, chunks: Sequence[memoryview], weight: PairedWeight | None = None
    ) -> list[EncodedChunk]:
        """Return consecutive chunks of a piece as they are stored.

        Args:
            dtype: The element type of the piece.
            codec: The codec that is tried first for it; empty: chunks are stored raw.
            chunks: Their raw bytes.
            weight: The chunk of a weight that all of them together were rounded to, perhaps. If that is proven, those
                that shrink are coded against it; else none is.
        """
        if weight is None:
            return [self._encoded(dtype, codec, raw, digest_of(raw), None) for raw in chunks]
        digests, residuals = self._residuals(chunks, weight)
        each = zip(chunks, digests, residuals, strict=True)
        return [self._encoded(dtype, codec, raw, digest, residual) for raw, digest, residual in each]

    def _encoded(
        self, dtype: str, codec: str, raw: memoryview, digest: Digest, residual: Sequence[StoredPart] | None
    ) -> EncodedChunk:
        nonfinite = nonfinite_count(dtype, raw) if self._counts_nonfinite else 0
        if residual is not None:
            return EncodedChunk(digest, "residual", residual, nonfinite)
        for name in _tried(dtype, codec, raw):
            tried = self._codecs[name]
            if not tried.takes(dtype):
                continue
            stored = tried.coder(dtype).encode(raw)
            if stored is not None:
                return EncodedChunk(digest, name, stored, nonfinite)
        return EncodedChunk(digest, "", (raw,), nonfinite)

    def _residuals(
        self, chunks: Sequence[memoryview], weight: PairedWeight
    ) -> tuple[Sequence[Digest], Sequence[Sequence[StoredPart] | None]]:
        """Return the digest of each chunk, and what it has more than the weight.

        Returns:
            The digests. What each chunk has more; None if the weight is not theirs, or nothing is gained.
        """
        coder = cast(PairCodec, self._codecs["residual"]).coder(MASTER_TYPE, weight.dtype)
        state = new_digest()
        digests, apart = [], []
        for raw in chunks:
            # First: it reads memory fastest, and what follows finds the chunk in the processor's cache.
            digests.append(digest_of(raw))
            apart.append(coder.rounded(raw))
            state.update(apart[-1].base)
        if state.digest() != weight.digest:
            return digests, [None] * len(chunks)
        return digests, [chunk.encode() for chunk in apart]


def rounded(master: memoryview, dtype: str) -> memoryview:
    """Return float32 elements rounded to a type of 16 bits."""
    return casting.cast(np.frombuffer(master, np.float32), MASTER_TYPE, dtype).view(np.uint8).data


def _tried(dtype: str, codec: str, raw: memoryview) -> Iterator[str]:
    """Yield the codecs to try for a chunk, in order: first those that a look at some of its bytes suggests."""
    if not codec:
        return
    looked_at = np.frombuffer(_middle(raw, _LOOK_BYTES), np.uint8)
    if 4 * np.count_nonzero(looked_at) <= len(looked_at):
        yield "sparse"
    if dtype == MASTER_TYPE and _has_few_mantissas(raw):
        yield "dictionary"
    yield codec


def _has_few_mantissas(raw: memoryview) -> bool:
    """Return whether float32 elements have few different mantissas, as 16-bit numbers times a factor have."""
    elements: NDArray[np.uint32] = np.frombuffer(raw, np.uint32)
    apart = len(elements) // _LOOK_RUNS
    if apart > _LOOK_RUN_ELEMENTS:
        # Runs, because every element elsewhere is another line of the processor's cache.
        elements = elements[: apart * _LOOK_RUNS].reshape(_LOOK_RUNS, apart)[:, :_LOOK_RUN_ELEMENTS]
    mantissas = np.bitwise_and(elements, _MANTISSA).reshape(-1)
    mantissas.sort()
    # `np.unique` takes ten times as long.
    different = 1 + int(np.count_nonzero(mantissas[1:] != mantissas[:-1]))
    return 2 * different <= len(mantissas)


def _middle(raw: memoryview, count: int) -> memoryview:
    """Return bytes from the middle of a chunk, from a whole page on."""
    start = max(len(raw) - count, 0) // 2 // 4096 * 4096
    return raw[start : start + count]
