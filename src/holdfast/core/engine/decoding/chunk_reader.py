"""Reads single chunks of stored pieces, one after the other, each decoded: for whoever checks or copies whole packs."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.base.geometry.chunking import chunk_range
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.packs import Packs, Stored
from holdfast.base.ports.ranges import read_range
from holdfast.base.types.plan import ChunkRead, Piece
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.engine.decoding.decode import Decoder, stored_place
from holdfast.core.format.coded_chunks import base_number
from holdfast.core.format.digest import digest_of
from holdfast.errors import CheckpointError, CorruptError, MissingError
from holdfast.settings import PAGE_BYTES

Read = Callable[[Stored, Piece, int, int, memoryview], memoryview]
"""Returns a half-open byte range of the pack of a piece; its buffer takes the range and a page more."""


def read_chunk(stored: Stored, piece: Piece, start: int, stop: int, buffer: memoryview) -> memoryview:
    """Read one range and no more."""
    return read_range(stored.files, stored.key, start, stop, buffer)


class ChunkReader:
    """Reads chunks for one thread. The base of a chunk is kept for the chunk after it, which shares it most often."""

    def __init__(
        self, packs: Packs, codecs: Codecs, chunk_bytes: int, read: Read = read_chunk, read_base: Read = read_chunk
    ) -> None:
        """Allocate a buffer for one chunk; for a base once one is needed.

        Args:
            packs: Locates packs by name.
            codecs: What decodes coded chunks.
            chunk_bytes: Raw bytes of a chunk, at most.
            read, read_base: How stored bytes of chunks and of their bases are read.
        """
        self._read, self._read_base = read, read_base
        self._packs, self._decoder = packs, Decoder(codecs)
        self._buffer = allocate_aligned(chunk_bytes + PAGE_BYTES)
        self._base_buffer = memoryview(b"")
        self._base: tuple[str, int, memoryview] | None = None
        """Pack, offset and raw bytes of the base that was read last."""

    def raw(self, piece: Piece, number: int, stored: Stored | None = None) -> memoryview:
        """Return the raw bytes of a chunk, valid until the next call. Its digest is not compared; that of a base is.

        Args:
            piece: The piece; with the piece of its pair, if the chunk is coded against it.
            number: Number of the chunk.
            stored: Where the piece's pack is; None: where `packs` says.
        Raises:
            CorruptError: The bytes end early, or are no stored form of the chunk; or its base is damaged.
        """
        stored = stored or self._packs(piece.pack)
        start, stop = piece.stored_range(number)
        data = self._read(stored, piece, start, stop, self._buffer)
        if piece.coding is None:
            return data
        return self.decoded(piece, number, data, stored)

    def decoded(self, piece: Piece, number: int, data: memoryview, stored: Stored) -> memoryview:
        """Return the raw bytes of a chunk of a coded piece whose stored bytes are at hand. Otherwise as `raw`."""
        return self._decoder.raw(chunk_of(piece, number), data, self._raw_base(piece, number, stored), stored.url)

    def forget(self) -> None:
        """Read the next base again: the bytes that are at hand may be wrong."""
        self._base = None

    def _raw_base(self, piece: Piece, number: int, stored: Stored) -> memoryview | None:
        """Return the raw bytes of the base of a chunk; None if it has none."""
        base = base_number(piece, number)
        if base is None:
            return None
        pair = piece.coding.pair if piece.coding is not None else None
        if pair is None:
            raise CorruptError(
                f"{stored.url}: {piece.tensor.fqn}: chunk {number} is coded against a tensor that has no stored piece "
                "of the same region. Read another copy"
            )
        # A pair in the same pack is read where the piece is: both may lie in a copy of the pack.
        place = stored if pair.pack == piece.pack else self._packs(pair.pack)
        start = pair.stored_range(base)[0]
        if self._base is None or self._base[:2] != (place.url, start):
            self._base = None
            try:
                raw = self._checked_base(place, pair, base)
            except CorruptError as error:
                raise CorruptError(
                    f"{stored.url}: {piece.tensor.fqn}: chunk {number} is coded against a damaged one: {error}"
                ) from error
            self._base = place.url, start, raw
        return self._base[2]

    def _checked_base(self, place: Stored, pair: Piece, number: int) -> memoryview:
        """Return the raw bytes of a chunk of a pair, whose digest is compared if it is known."""
        if not self._base_buffer:
            self._base_buffer = allocate_aligned(len(self._buffer))
        chunk, (start, stop) = chunk_of(pair, number), pair.stored_range(number)
        try:
            data = self._read_base(place, pair, start, stop, self._base_buffer)
        except MissingError as missing:
            raise CorruptError(f"{pair.tensor.fqn}: {place.url}: the pack is missing. Read another copy") from missing
        raw = self._decoder.raw_base(chunk, data, place.url)
        if chunk.expected and digest_of(raw) != chunk.expected:
            raise CorruptError(
                f"{pair.tensor.fqn}: {place.url}: {stored_place(chunk)} hash to {digest_of(raw).hex()}; expected "
                f"{chunk.expected.hex()}. Read another copy"
            )
        return raw


def chunk_of(piece: Piece, number: int) -> ChunkRead:
    """Return a chunk of a piece, without a place to go to."""
    start, stop = chunk_range(piece.bytes, piece.chunk_bytes, number)
    return ChunkRead(piece, number, piece.stored_range(number)[0], stop - start, ())


def refutation(chunks: ChunkReader, piece: Piece, number: int, stored: Stored) -> str:
    """Return how a chunk differs from what was saved; empty if it does not.

    Args:
        chunks: Reads it.
        piece: The piece, with digests.
        number: Number of the chunk.
        stored: Where the piece's pack is.
    """
    chunk = chunk_of(piece, number)
    try:
        digest = digest_of(chunks.raw(piece, number, stored))
    except CheckpointError as error:
        chunks.forget()
        return str(error)
    if digest == chunk.expected:
        return ""
    chunks.forget()
    how = "" if piece.coding is None else f" {number}, {f'coded by {chunk.codec}' if chunk.codec else 'stored raw'},"
    return f"chunk{how} hashes to {digest.hex()}; expected {chunk.expected.hex()}"
